"""Unsupported flags, options and arguments: tables of rows, each one sentence with what to do, read in one function.

``FLAGS`` is for Megatron-LM's validated arguments. ``MODEL``, ``LAYER``, ``CALL`` and ``PACK`` are for programs without
flags too: they are read where a model is built and where its attention is called.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from ..backends.resolve import resolve_backend
from ..config import MTrainingConfig
from ..errors import BackendUnavailableError, invalid
from ..layout import SequenceLayout
from ..ranks import is_first_rank
from ..selection import get_estimator
from .compat import bounds_reach_every_stage, cuda_graphs_cover_attention, windowed_layers

_LOG = logging.getLogger(__name__)


class Row(NamedTuple):
    """Something unsupported: the error is ``<name> must be <rule>, got <value>. <remedy>``."""

    name: str
    rule: str
    """Requirement; may hold facts of the case in braces."""

    value: Callable[[Case], Any]
    """Value that breaks the rule; None, False or empty where nothing is wrong."""

    remedy: str


class Case(dict):
    """Facts by name; any other attribute is that of the fact ``given`` (flags or options), or None if it has none."""

    def __getattr__(self, name: str) -> Any:
        return self[name] if name in self else getattr(self.get("given"), name, None)


def check(rows: Iterable[Row], **facts: Any) -> None:
    """Raise ValueError for the first of ``rows`` that ``facts`` break, naming the flag or option and what to do."""
    case = Case(facts)
    for row in rows:
        value = row.value(case)
        if value:
            value = "it" if value is True and row.name.startswith("--") else value
            raise invalid(row.name, row.rule.format_map(facts), value, row.remedy)


def check_extra(extra: dict[str, Any]) -> None:
    """Raise ValueError for keywords of other core attentions, unless they are None."""
    rows = (Row(name, "None", lambda case, name=name: type(case[name]).__name__, _DENSE) for name in extra)
    check((row for row in rows if extra[row.name] is not None), **extra)


def check_arguments(args: Namespace, config: MTrainingConfig) -> None:
    """Check that a run trains with this attention, and on a right mask, before any group or model is made.

    Raises:
        ValueError: naming the flag and what to do, or an estimator that nobody registered.
    """
    get_estimator(config.estimator)
    check(FLAGS, given=args, config=config)
    if is_first_rank():
        _warn_of_unused(args, config)


def _warn_of_unused(args: Namespace, config: MTrainingConfig) -> None:
    kinds = getattr(args, "cp_comm_type", None) or []
    unused = {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "p2p"}
    if unused:
        _LOG.warning("--cp-comm-type %s is not used: --mtraining-schedule decides how keys travel.", " ".join(unused))
    selection = config.pattern
    if selection == "vertical_slash":
        selection += f" and --mtraining-estimator {config.estimator}"
    for name in config.unused:
        _LOG.warning("%s is not used with --mtraining-pattern %s.", _flag(f"mtraining_{name}"), selection)


_DENSE = "Use Megatron's own core attention for this model."
_DTYPE = "Attention runs in the dtype of its inputs."
_LARGEST_LOGIT = "The largest attention logit is not tracked."
_ONE_GROUP = "The context-parallel group must be the same for every sequence."
OFF = {
    "multi_latent_attention": ("False", f"Keys and values of one head_dim are needed. {_DENSE}"),
    "experimental_attention_variant": ("None", _DENSE),
    "fp8_dot_product_attention": ("False", _DTYPE),
    "fp8_multi_head_attention": ("False", _DTYPE),
    "qk_clip": ("False", _LARGEST_LOGIT),
    "log_max_attention_logit": ("False", _LARGEST_LOGIT),
    "batch_invariant_mode": ("False", "It needs Megatron's flash attention."),
    "flash_decode": ("False", "This is attention for training; decode with Megatron's own."),
    "hybrid_context_parallel": ("False", _ONE_GROUP),
    "dynamic_context_parallel": ("False", _ONE_GROUP),
    "mrope_section": ("None", "Use rope or yarn positions."),
}
"""Options of a TransformerConfig, and flags, that must be off: the spelling of "off" and what to do."""

_MTP_HSM = "Hidden states of earlier depths would be mixed across pieces of Megatron's split."
_ZIGZAG = "Use layout=zigzag, which is Megatron's own split"
_GRAPHS = "Which keys are selected depends on the data, so attention cannot be captured."
_SHARING = "head with more tensor-parallel ranks than key/value heads"
_SHARED = "The selected keys of a group would depend on which of its heads share a rank."
_SINKS = "Learned sinks are not supported."
_WINDOW = "Slashes replace the window."
_DROPOUT = "Pass --attention-dropout 0."
_PACK_LAYOUTS = "striped, node_striped, rotated or contiguous for packed documents on"
_PACK_ZIGZAG = "Megatron's zigzag splits each document by itself; the other layouts split the pack."
_MADE_BY = "Use megatron_mtraining.megatron.packed_seq_params."


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _absent(name: str, remedy: str) -> Row:
    return Row(_flag(name), "absent", lambda case: getattr(case, name), remedy)


def _absent_unless_zigzag(name: str, remedy: str) -> Row:
    remedy = f"{remedy} Pass --mtraining-layout zigzag, or leave it out."
    return Row(_flag(name), "absent in this layout", lambda case: _is_relayed(case) and getattr(case, name), remedy)


def _one_row_a_pack(name: str) -> Row:
    return Row(
        _flag(name),
        "1 for packed documents on several pipeline stages",
        lambda case: (
            _is_packed(case)
            and not case.variable_seq_lengths
            and (case.pipeline_model_parallel_size or 1) > 1
            and (getattr(case, name) or 1) > 1
            and getattr(case, name)
        ),
        "Megatron-LM makes one pack of the rows and passes it on between stages in the shape of rows.",
    )


def _among(name: str, values: tuple[str, ...]) -> Callable[[Case], str | None]:
    """Return the value of a flag if it is one of ``values``."""
    return lambda case: getattr(case, name) in values and getattr(case, name)


def _cp_size(case: Case) -> int:
    return case.context_parallel_size or 1


def _is_relayed(case: Case) -> bool:
    """Return whether the layout gives a rank other tokens than Megatron's own split."""
    return _cp_size(case) > 1 and case.config.layout != "zigzag"


def _is_packed(case: Case) -> bool:
    return bool(case.sft or case.dataloader_inter_document_masking)


def _undivided_ranks(case: Case) -> str | None:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {_flag(name): getattr(case.given, name, 1) for name in names}
    num_ranks, world_size = math.prod(sizes.values()), getattr(case.given, "world_size", 1)
    if min(sizes.values()) > 0 and world_size % num_ranks == 0:
        return None
    product = " times ".join(f"{flag} {size}" for flag, size in sizes.items())
    return f"{product} on {world_size} rank{'s' * (world_size > 1)}"


def _other_product(case: Case) -> str | None:
    sizes = case.hierarchical_context_parallel_sizes
    if not sizes or math.prod(sizes) == _cp_size(case):
        return None
    return f"{' '.join(map(str, sizes))} with --context-parallel-size {_cp_size(case)}"


def _undivided_length(case: Case) -> str | None:
    multiple = SequenceLayout.required_multiple(
        case.config.layout, cp_size=_cp_size(case), block_size=case.config.block_size
    )
    return case.seq_length and case.seq_length % multiple and f"{case.seq_length}, which is no multiple of {multiple}"


def _uncounted_layers(case: Case) -> list[int]:
    last = math.inf if case.num_layers is None else case.num_layers + (case.mtp_num_layers or 0)
    return [layer for layer in case.config.dense_layers if layer > last]


def _layers_without_attention(case: Case) -> list[int]:
    pattern = case.hybrid_layer_pattern or case.hybrid_override_pattern or ""
    layers = pattern.split("/")[0].replace("|", "")  # before the prediction layers, without the ends of stages
    return [layer for layer in case.config.dense_layers if layer <= len(layers) and layers[layer - 1] != "*"]


def _shared_over_ranks(case: Case) -> str | None:
    """Return tensor-parallel ranks and groups where heads that share lists are on several ranks."""
    ranks, groups = case.tensor_model_parallel_size or 1, case.num_query_groups
    is_shared = case.config.index_sharing == "kv_group" and groups is not None and ranks > groups
    return f"kv_group with {ranks} and {groups}" if is_shared else None


def _offloaded(case: Case) -> list[str] | None:
    modules = case.offload_modules or []
    return case.fine_grained_activation_offloading and "core_attn" in modules and modules


def _no_backend(case: Case) -> str | None:
    """Return why the kernels that were asked for by name cannot run here."""
    if case.config.backend != "cuda":
        return None
    try:
        resolve_backend(
            "cuda",
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            dtype=case.params_dtype or torch.bfloat16,
            head_dim=case.kv_channels or 128,
            block_size=case.config.block_size,
        )
    except BackendUnavailableError as error:
        return f"cuda. {str(error).removesuffix('.')}"
    return None


_LENGTH = Row(
    "--seq-length",
    "a multiple of ranks and block size for --mtraining-layout",
    _undivided_length,
    "Pass a --seq-length that is one; data is cut to it.",
)
SIZES = (
    Row(
        "the number of ranks",
        "a multiple of the parallel sizes",
        _undivided_ranks,
        "Start as many with torchrun --nproc-per-node, or lower a size.",
    ),
    Row(
        "--hierarchical-context-parallel-sizes",
        "sizes whose product is --context-parallel-size",
        _other_product,
        "Pass the ranks inside a node and the number of nodes, or leave it out: the hosts' names are used.",
    ),
    _LENGTH,
)
"""Sizes that do not fit each other: Megatron's own checks, with what to do. Facts as for ``FLAGS``."""

FLAGS = (
    _absent("use_legacy_models", "Legacy models have no layer specs; use the core ones."),
    *(_absent(name, remedy) for name, (_, remedy) in OFF.items()),
    _absent_unless_zigzag("mtp_hsm", _MTP_HSM),
    Row("--attention-dropout", "0", lambda case: case.attention_dropout, _DROPOUT),
    Row(
        "--window-size",
        "absent",
        lambda case: (layers := windowed_layers(case.given)) and f"{case.window_size} in layers {layers}",
        _WINDOW,
    ),
    Row(
        "--softmax-type",
        "vanilla",
        lambda case: case.softmax_type != "vanilla" and case.softmax_type,
        _SINKS,
    ),
    Row(
        "--position-embedding-type",
        "rope, yarn, learned_absolute or none",
        _among("position_embedding_type", ("mrope", "relative")),
        "Positions of several dimensions and biases of scores are not supported.",
    ),
    Row(
        "--transformer-impl",
        "local or transformer_engine",
        _among("transformer_impl", ("inference_optimized",)),
        "This is attention for training.",
    ),
    Row(
        "--cuda-graph-impl",
        "none, or leave attention out of --cuda-graph-modules (--cuda-graph-scope in earlier releases)",
        lambda case: cuda_graphs_cover_attention(case.given) and case.cuda_graph_impl,
        _GRAPHS,
    ),
    Row("--offload-modules", "without core_attn", _offloaded, "Pass --recompute-modules core_attn instead."),
    _LENGTH,
    Row(
        "--mtraining-dense-layers",
        "layers that there are, counted from 1",
        _uncounted_layers,
        "Pass numbers up to --num-layers.",
    ),
    Row(
        "--mtraining-dense-layers",
        "attention layers of the hybrid layer pattern, in which every layer counts from 1",
        _layers_without_attention,
        "Pass the places of its *.",
    ),
    Row(
        "--mtraining-index-sharing",
        _SHARING,
        lambda case: case.group_query_attention and _shared_over_ranks(case),
        _SHARED,
    ),
    Row(
        "--hierarchical-context-parallel-sizes",
        "two sizes, ranks inside a node and nodes",
        lambda case: _cp_size(case) > 1 and len(sizes := case.hierarchical_context_parallel_sizes or "") != 2 and sizes,
        "Pass two, or leave it out: the hosts' names are used.",
    ),
    _absent(
        "reset_attention_mask",
        "Attention takes no mask; --dataloader-inter-document-masking, in later releases, separates documents.",
    ),
    Row(
        "--no-create-attention-mask-in-dataloader",
        "passed",
        lambda case: case.create_attention_mask_in_dataloader and "a mask of seq x seq",
        "Attention is causal without one.",
    ),
    Row(
        "--mtraining-layout",
        f"{_PACK_LAYOUTS} several ranks",
        lambda case: _is_packed(case) and _cp_size(case) > 1 and case.config.layout == "zigzag" and "zigzag",
        _PACK_ZIGZAG,
    ),
    Row(
        "--no-rope-fusion",
        "passed for packed documents on several ranks",
        lambda case: _is_packed(case) and _cp_size(case) > 1 and case.apply_rope_fusion,
        "The fused kernel computes Megatron's split only.",
    ),
    Row(
        "--pipeline-model-parallel-size",
        "1 for packed documents",
        lambda case: (
            _is_packed(case)
            and (case.pipeline_model_parallel_size or 1) > 1
            and not bounds_reach_every_stage()
            and case.pipeline_model_parallel_size
        ),
        "This Megatron-LM does not send their bounds to every stage; core 0.18 does.",
    ),
    _one_row_a_pack("micro_batch_size"),
    _one_row_a_pack("eval_micro_batch_size"),
    Row(
        "--overlap-moe-expert-parallel-comm",
        "absent for packed documents",
        lambda case: _is_packed(case) and case.overlap_moe_expert_parallel_comm,
        "Megatron-LM's schedule for it does not pass on where documents end.",
    ),
    _absent_unless_zigzag("perform_rl_step", "Reinforcement learning packs sequences by Megatron's own split."),
    _absent_unless_zigzag(
        "logits_load_dir", "A teacher's logits are saved by rank, in the split of the run that saved them."
    ),
    _absent_unless_zigzag("logits_save_dir", "Logits are saved by rank, and a student reads them by Megatron's split."),
    _absent("use_kitchen_attention", "Both replace the core attention; choose one."),
    Row("--mtraining-backend", "auto or reference here", _no_backend, ""),
)
"""Facts: ``given``, Megatron's arguments (a flag that a release has not counts as absent); ``config`` of attention."""

MODEL = (
    Row(
        "context_parallel_size",
        "the size {cp_size} of the group that initialize() saw",
        lambda case: case.context_parallel_size != case.cp_size and case.context_parallel_size,
        "Call megatron_mtraining.megatron.initialize after initialize_model_parallel.",
    ),
    *(Row(name, off, lambda case, name=name: getattr(case, name), remedy) for name, (off, remedy) in OFF.items()),
    Row(
        "mtp_hsm",
        "False with layout={layout} on {cp_size} ranks",
        lambda case: case.cp_size > 1 and case.layout != "zigzag" and case.mtp_hsm,
        f"{_MTP_HSM} {_ZIGZAG}.",
    ),
    Row("softmax_type", "'vanilla'", lambda case: case.softmax_type != "vanilla" and repr(case.softmax_type), _SINKS),
    Row(
        "cuda_graph_impl",
        "'none' or leave attention out",
        lambda case: cuda_graphs_cover_attention(case.given) and repr(case.cuda_graph_impl),
        _GRAPHS,
    ),
    Row("offload_modules", "without core_attn", _offloaded, "Use recompute_modules=core_attn."),
    Row(
        "spec",
        "of causal self attentions only with layout={layout} on {cp_size} ranks",
        lambda case: (
            case.cp_size > 1
            and case.layout != "zigzag"
            and case.others
            and f"{', '.join(dict.fromkeys(case.others))} beside them"
        ),
        f"{_ZIGZAG}, or one context-parallel rank.",
    ),
)
"""Facts: ``given``, a TransformerConfig; ``layout``; ``cp_size``; ``others``, the model's attentions of Megatron."""

SHARING = (Row("index_sharing", _SHARING, _shared_over_ranks, _SHARED),)
"""Facts: ``given``, the TransformerConfig of a whole model (with fewer key/value heads than ranks Megatron gives a core
attention a copy with other numbers), and ``config`` of attention."""

LAYER = (
    Row("attention_type", "'self'", lambda case: case.attention_type != "self" and repr(case.attention_type), _DENSE),
    Row(
        "attn_mask_type",
        "causal",
        lambda case: case.attn_mask_type is not AttnMaskType.causal and case.attn_mask_type,
        _DENSE,
    ),
    Row("attention_dropout", "0", lambda case: case.attention_dropout, _DROPOUT),
    Row(
        "window_size",
        "None in layer {layer_number}",
        lambda case: (
            is_layer_window_attention(case.window_size, case.window_attn_skip_freq, case.layer_number)
            and case.window_size
        ),
        _WINDOW,
    ),
)
"""Facts: ``given``, a TransformerConfig, and what its builder passes to one layer's attention."""

CALL = (
    Row(
        "attention_mask",
        "None",
        lambda case: _shape(case.attention_mask),
        "Attention is causal and separates documents by packed_seq_params; "
        "pass --no-create-attention-mask-in-dataloader.",
    ),
    Row(
        "attn_mask_type",
        "causal",
        lambda case: case.attn_mask_type not in (None, AttnMaskType.causal) and case.attn_mask_type,
        "Decoding is not supported; use Megatron's attention.",
    ),
    Row("attention_bias", "None", lambda case: _shape(case.attention_bias), _DENSE),
    Row(
        "packed_seq_params.qkv_format",
        "'sbhd' for input of four dimensions",
        lambda case: not case.is_packed and case.qkv_format not in ("sbhd", None) and repr(case.qkv_format),
        _MADE_BY,
    ),
    Row(
        "packed_seq_params.cu_seqlens_q",
        "None for input of four dimensions",
        lambda case: not case.is_packed and case.cu_seqlens_q is not None and str(case.cu_seqlens_q),
        _MADE_BY,
    ),
)
"""Facts: ``given``, PackedSeqParams or None; the other arguments of a forward call; ``is_packed``, as its input is."""

PACK = (
    Row(
        "packed_seq_params.local_cp_size",
        "None",
        lambda case: (case.local_cp_size is not None or case.cp_group is not None) and f"{case.local_cp_size}",
        "Hybrid context parallelism is not supported; every sequence uses the same group.",
    ),
    Row(
        "layout",
        f"{_PACK_LAYOUTS} {{cp_size}} ranks",
        lambda case: case.cp_size > 1 and case.layout == "zigzag" and case.layout,
        _PACK_ZIGZAG,
    ),
    Row(
        "apply_rope_fusion",
        "False for packed documents on {cp_size} ranks",
        lambda case: case.cp_size > 1 and case.fuses_rope,
        "The fused kernel computes Megatron's split only; pass --no-rope-fusion.",
    ),
)
"""Facts: ``given``, PackedSeqParams; ``layout``; ``cp_size``; ``fuses_rope``, the model's ``apply_rope_fusion``."""


def _shape(tensor: Any) -> str | None:
    return None if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
