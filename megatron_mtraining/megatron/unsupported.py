"""Unsupported flags, options and arguments: tables of rows, each one sentence with what to do, read in one function.

``FLAGS`` is for Megatron-LM's validated arguments. ``MODEL``, ``LAYER``, ``CALL`` and ``PACK`` are for programs without
flags too: they are read where a model is built and where its attention is called.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from ..backends.resolve import resolve_backend
from ..config import MTrainingConfig
from ..errors import BackendUnavailableError, invalid
from ..layout import SequenceLayout
from ..ranks import is_first_rank
from .compat import bounds_reach_every_stage, cuda_graphs_cover_attention, windowed_layers

_LOG = logging.getLogger(__name__)


class Row(NamedTuple):
    """Something unsupported: the error is ``<name> must be <rule>, got <value>. <remedy>``."""

    name: str
    rule: str
    """Requirement; may hold facts of the case in braces."""

    remedy: str
    when: Callable[[Case], Any] = lambda case: True
    """Condition under which the value breaks the rule."""

    value: Callable[[Case], Any] | None = None
    """Value in the error: None, False or empty where nothing is wrong. Default: that of the flag or option ``name``."""


class Case(SimpleNamespace):
    """Facts by name; any other attribute is that of the fact ``given`` (flags or options), or None if it has none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["given"], name, None)


def check(rows: Iterable[Row], **facts: Any) -> None:
    """Raise ValueError for the first of ``rows`` that ``facts`` break, naming the flag or option and what to do."""
    case = Case(**facts)
    for row in rows:
        if not row.when(case):
            continue
        value = row.value(case) if row.value else getattr(case, row.name.removeprefix("--").replace("-", "_"))
        if value:
            value = "it" if value is True and row.name.startswith("--") else value
            raise invalid(row.name, row.rule.format_map(facts), value, row.remedy)


def check_extra(extra: dict[str, Any]) -> None:
    """Raise ValueError for keywords of other core attentions, unless they are None."""
    for name, value in extra.items():
        if value is not None:
            raise invalid(name, "None", type(value).__name__, _DENSE)


def check_arguments(args: Namespace, config: MTrainingConfig) -> None:
    """Check that a run trains with this attention, and on a right mask, before any group or model is made.

    Raises:
        ValueError: naming the flag and what to do.
    """
    check_flags(FLAGS, args, config)
    if is_first_rank():
        _warn_of_unused(args, config)


def check_flags(rows: Iterable[Row], args: Namespace, config: MTrainingConfig) -> None:
    """Check ``rows`` of flags; those that a release of Megatron has not count as absent."""
    cp_size = getattr(args, "context_parallel_size", None) or 1
    check(rows, given=args, config=config, layout=config.layout, cp_size=cp_size)


def _warn_of_unused(args: Namespace, config: MTrainingConfig) -> None:
    kinds = getattr(args, "cp_comm_type", None) or []
    unused = {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "p2p"}
    if unused:
        _LOG.warning("--cp-comm-type %s is not used: --mtraining-schedule decides how keys travel.", " ".join(unused))
    selection = config.pattern
    if selection == "vertical_slash":
        selection += f", --mtraining-budget {config.budget} and --mtraining-estimator {config.estimator}"
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


def _is_split_otherwise(case: Case) -> bool:
    """Return whether the layout gives a rank other tokens than Megatron's own split."""
    return case.cp_size > 1 and case.layout != "zigzag"


def _is_packed(case: Case) -> bool:
    return bool(case.sft or case.dataloader_inter_document_masking)


def _is_spread_pack(case: Case) -> bool:
    return _is_packed(case) and case.cp_size > 1


def _is_staged_pack(case: Case) -> bool:
    return _is_packed(case) and (case.pipeline_model_parallel_size or 1) > 1


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
    if not sizes or math.prod(sizes) == case.cp_size:
        return None
    return f"{' '.join(map(str, sizes))} with --context-parallel-size {case.cp_size}"


def _undivided_length(case: Case) -> str | None:
    sizes = {"cp_size": case.cp_size, "block_size": case.config.block_size}
    multiple = SequenceLayout.required_multiple(case.layout, **sizes)
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


def _offloads_attention(case: Case) -> bool:
    return case.fine_grained_activation_offloading and "core_attn" in (case.offload_modules or ())


def _captures_attention(case: Case) -> bool:
    return cuda_graphs_cover_attention(case.given)


def _quoted(name: str) -> Callable[[Case], str]:
    """Return a function of the value of a fact or option as Python writes it."""
    return lambda case: repr(getattr(case, name))


def _shape(tensor: Any) -> str | None:
    return None if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"


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
    "Pass a --seq-length that is one; data is cut to it.",
    value=_undivided_length,
)
SIZES = (
    Row(
        "the number of ranks",
        "a multiple of the parallel sizes",
        "Start as many with torchrun --nproc-per-node, or lower a size.",
        value=_undivided_ranks,
    ),
    Row(
        "--hierarchical-context-parallel-sizes",
        "sizes whose product is --context-parallel-size",
        "Pass the ranks inside a node and the number of nodes, or leave it out: the hosts' names are used.",
        value=_other_product,
    ),
    _LENGTH,
)
"""Sizes that do not fit each other: Megatron's own checks, with what to do. Facts as for ``FLAGS``."""

_UNLESS_ZIGZAG = "Pass --mtraining-layout zigzag, or leave it out."
_ONE_ROW = (
    "1 for packed documents on several pipeline stages",
    "Megatron-LM makes one pack of the rows and passes it on between stages in the shape of rows.",
    lambda case: _is_staged_pack(case) and not case.variable_seq_lengths,
)
FLAGS = (
    Row("--use-legacy-models", "absent", "Legacy models have no layer specs; use the core ones."),
    *(Row(_flag(name), "absent", remedy) for name, (_, remedy) in OFF.items()),
    Row("--mtp-hsm", "absent in this layout", f"{_MTP_HSM} {_UNLESS_ZIGZAG}", _is_split_otherwise),
    Row("--attention-dropout", "0", _DROPOUT),
    Row(
        "--window-size",
        "absent",
        _WINDOW,
        value=lambda case: (layers := windowed_layers(case.given)) and f"{case.window_size} in layers {layers}",
    ),
    Row("--softmax-type", "vanilla", _SINKS, lambda case: case.softmax_type != "vanilla"),
    Row(
        "--position-embedding-type",
        "rope, yarn, learned_absolute or none",
        "Positions of several dimensions and biases of scores are not supported.",
        lambda case: case.position_embedding_type in ("mrope", "relative"),
    ),
    Row(
        "--transformer-impl",
        "local or transformer_engine",
        "This is attention for training.",
        lambda case: case.transformer_impl == "inference_optimized",
    ),
    Row(
        "--cuda-graph-impl",
        "none, or leave attention out of --cuda-graph-modules (--cuda-graph-scope in earlier releases)",
        _GRAPHS,
        _captures_attention,
    ),
    Row("--offload-modules", "without core_attn", "Pass --recompute-modules core_attn instead.", _offloads_attention),
    _LENGTH,
    Row(
        "--mtraining-dense-layers",
        "layers that there are, counted from 1",
        "Pass numbers up to --num-layers.",
        value=_uncounted_layers,
    ),
    Row(
        "--mtraining-dense-layers",
        "attention layers of the hybrid layer pattern, in which every layer counts from 1",
        "Pass the places of its *.",
        value=_layers_without_attention,
    ),
    Row(
        "--mtraining-index-sharing",
        _SHARING,
        _SHARED,
        lambda case: case.group_query_attention,
        _shared_over_ranks,
    ),
    Row(
        "--hierarchical-context-parallel-sizes",
        "two sizes, ranks inside a node and nodes",
        "Pass two, or leave it out: the hosts' names are used.",
        lambda case: case.cp_size > 1 and len(case.hierarchical_context_parallel_sizes or ()) != 2,
    ),
    Row(
        "--reset-attention-mask",
        "absent",
        "Attention takes no mask; --dataloader-inter-document-masking, in later releases, separates documents.",
    ),
    Row(
        "--no-create-attention-mask-in-dataloader",
        "passed",
        "Attention is causal without one.",
        lambda case: case.create_attention_mask_in_dataloader,
        lambda case: "a mask of seq x seq",
    ),
    Row(
        "--mtraining-layout",
        f"{_PACK_LAYOUTS} several ranks",
        _PACK_ZIGZAG,
        lambda case: _is_spread_pack(case) and case.layout == "zigzag",
        lambda case: case.layout,
    ),
    Row(
        "--no-rope-fusion",
        "passed for packed documents on several ranks",
        "The fused kernel computes Megatron's split only.",
        _is_spread_pack,
        lambda case: case.apply_rope_fusion,
    ),
    Row(
        "--pipeline-model-parallel-size",
        "1 for packed documents",
        "This Megatron-LM does not send their bounds to every stage; core 0.18 does.",
        lambda case: _is_staged_pack(case) and not bounds_reach_every_stage(),
    ),
    *(
        Row(_flag(name), *_ONE_ROW, lambda case, name=name: (rows := getattr(case, name) or 1) > 1 and rows)
        for name in ("micro_batch_size", "eval_micro_batch_size")
    ),
    Row(
        "--overlap-moe-expert-parallel-comm",
        "absent for packed documents",
        "Megatron-LM's schedule for it does not pass on where documents end.",
        _is_packed,
    ),
    *(
        Row(_flag(name), "absent in this layout", f"{reason} {_UNLESS_ZIGZAG}", _is_split_otherwise)
        for name, reason in {
            "perform_rl_step": "Reinforcement learning packs sequences by Megatron's own split.",
            "logits_load_dir": "A teacher's logits are saved by rank, in the split of the run that saved them.",
            "logits_save_dir": "Logits are saved by rank, and a student reads them by Megatron's split.",
        }.items()
    ),
    Row("--use-kitchen-attention", "absent", "Both replace the core attention; choose one."),
    Row("--mtraining-backend", "auto or reference here", "", value=_no_backend),
)
"""Facts: ``given``, Megatron's arguments; ``config`` of attention and its ``layout``; ``cp_size``."""

MODEL = (
    Row(
        "context_parallel_size",
        "the size {cp_size} of the group that initialize() saw",
        "Call megatron_mtraining.megatron.initialize after initialize_model_parallel.",
        lambda case: case.context_parallel_size != case.cp_size,
    ),
    *(Row(name, off, remedy) for name, (off, remedy) in OFF.items()),
    Row("mtp_hsm", "False with layout={layout} on {cp_size} ranks", f"{_MTP_HSM} {_ZIGZAG}.", _is_split_otherwise),
    Row("softmax_type", "'vanilla'", _SINKS, lambda case: case.softmax_type != "vanilla", _quoted("softmax_type")),
    Row("cuda_graph_impl", "'none' or leave attention out", _GRAPHS, _captures_attention, _quoted("cuda_graph_impl")),
    Row("offload_modules", "without core_attn", "Use recompute_modules=core_attn.", _offloads_attention),
    Row(
        "spec",
        "of causal self attentions only with layout={layout} on {cp_size} ranks",
        f"{_ZIGZAG}, or one context-parallel rank.",
        _is_split_otherwise,
        lambda case: case.others and f"{', '.join(dict.fromkeys(case.others))} beside them",
    ),
)
"""Facts: ``given``, a TransformerConfig; ``layout``; ``cp_size``; ``others``, the model's attentions of Megatron."""

SHARING = (Row("index_sharing", _SHARING, _SHARED, value=_shared_over_ranks),)
"""Facts: ``given``, the TransformerConfig of a whole model (with fewer key/value heads than ranks Megatron gives a core
attention a copy with other numbers), and ``config`` of attention."""

LAYER = (
    Row("attention_type", "'self'", _DENSE, lambda case: case.attention_type != "self", _quoted("attention_type")),
    Row("attn_mask_type", "causal", _DENSE, lambda case: case.attn_mask_type is not AttnMaskType.causal),
    Row("attention_dropout", "0", _DROPOUT),
    Row(
        "window_size",
        "None in layer {layer_number}",
        _WINDOW,
        lambda case: is_layer_window_attention(case.window_size, case.window_attn_skip_freq, case.layer_number),
    ),
)
"""Facts: ``given``, a TransformerConfig, and what its builder passes to one layer's attention."""

CALL = (
    Row(
        "attention_mask",
        "None",
        "Attention is causal and separates documents by packed_seq_params; "
        "pass --no-create-attention-mask-in-dataloader.",
        value=lambda case: _shape(case.attention_mask),
    ),
    Row(
        "attn_mask_type",
        "causal",
        "Decoding is not supported; use Megatron's attention.",
        lambda case: case.attn_mask_type is not AttnMaskType.causal,
    ),
    Row("attention_bias", "None", _DENSE, value=lambda case: _shape(case.attention_bias)),
    Row(
        "packed_seq_params.qkv_format",
        "'sbhd' for input of four dimensions",
        _MADE_BY,
        lambda case: not case.is_packed and case.qkv_format not in ("sbhd", None),
        _quoted("qkv_format"),
    ),
    Row(
        "packed_seq_params.cu_seqlens_q",
        "None for input of four dimensions",
        _MADE_BY,
        lambda case: not case.is_packed and case.cu_seqlens_q is not None,
        _quoted("cu_seqlens_q"),
    ),
)
"""Facts: ``given``, PackedSeqParams or None; the other arguments of a forward call; ``is_packed``, as its input is."""

PACK = (
    Row(
        "packed_seq_params.local_cp_size",
        "None",
        "Hybrid context parallelism is not supported; every sequence uses the same group.",
        lambda case: case.local_cp_size is not None or case.cp_group is not None,
        _quoted("local_cp_size"),
    ),
    Row(
        "layout",
        f"{_PACK_LAYOUTS} {{cp_size}} ranks",
        _PACK_ZIGZAG,
        lambda case: case.cp_size > 1 and case.layout == "zigzag",
    ),
    Row(
        "apply_rope_fusion",
        "False for packed documents on {cp_size} ranks",
        "The fused kernel computes Megatron's split only; pass --no-rope-fusion.",
        lambda case: case.cp_size > 1,
    ),
)
"""Facts: ``given``, PackedSeqParams; ``layout``; ``cp_size``; ``apply_rope_fusion`` of the model."""
