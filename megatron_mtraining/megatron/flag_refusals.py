"""Flags of Megatron-LM that do not go together with this attention, refused once its arguments are validated.

One table, a row a flag. What a model can be built without them is refused again where it is built (:mod:`.refusals`),
for programs that have no flags.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..backends.resolve import resolve_backend
from ..config import MTrainingConfig
from ..errors import BackendUnavailableError, invalid
from ..ranks import is_first_rank
from ..layout import SequenceLayout
from ..selection import get_estimator
from .compat import bounds_reach_every_stage, cuda_graphs_cover_attention, windowed_layers
from .refusals import ALWAYS_OFF, GRAPHS, OFF_UNLESS_ZIGZAG, SHARED_OVER_RANKS

_PARALLEL_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Flags whose product divides the number of ranks."""

_LOG = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A flag, and the condition under which it is refused."""

    flag: str
    rule: str
    """Requirement on the flag, for the sentence."""

    offence: Callable[[Namespace, MTrainingConfig], Any]
    """Value that offends the rule; None, False or empty where nothing is wrong."""

    remedy: str


def check_arguments(args: Namespace, config: MTrainingConfig) -> None:
    """Refuse what would train without this attention, or on a wrong mask, before any group or model is made.

    Args:
        args: Megatron's arguments, validated; those of a release that lacks a flag count as without it.
        config: the configuration of this attention.

    Raises:
        ValueError: naming the flag and what to do, or an estimator that nobody registered.
    """
    get_estimator(config.estimator)
    _check(_TABLE, args, config)
    _check_backend(args, config)
    if is_first_rank():
        _warn_of_unused(args, config)


def check_sizes(args: Namespace, config: MTrainingConfig) -> None:
    """Refuse sizes and a length that do not fit each other or the ranks: Megatron's own checks, with what to do.

    Raises:
        ValueError: naming the flag and what to do.
    """
    _check(_SIZES, args, config)


def _check(rows: Iterable[_Row], args: Namespace, config: MTrainingConfig) -> None:
    for row in rows:
        offence = row.offence(args, config)
        if offence:
            raise invalid(row.flag, row.rule, "it" if offence is True else offence, row.remedy)


def _warn_of_unused(args: Namespace, config: MTrainingConfig) -> None:
    unused = {kind for kind in _list_of(getattr(args, "cp_comm_type", None)) if kind != "p2p"}
    if unused:
        _LOG.warning("--cp-comm-type %s is not used: --mtraining-schedule says how keys travel.", " ".join(unused))
    for name in config.unused:
        flag = name.replace("_", "-")
        _LOG.warning("--mtraining-%s is not used with --mtraining-pattern %s.", flag, _selection_of(config))


def _selection_of(config: MTrainingConfig) -> str:
    if config.pattern != "vertical_slash":
        return config.pattern
    strategies = f"--mtraining-budget {config.budget} and --mtraining-estimator {config.estimator}"
    return f"{config.pattern}, {strategies}"


def _check_backend(args: Namespace, config: MTrainingConfig) -> None:
    if config.backend != "cuda":
        return
    try:
        resolve_backend(
            config.backend,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            dtype=getattr(args, "params_dtype", torch.bfloat16),
            head_dim=getattr(args, "kv_channels", None) or 128,
            block_size=config.block_size,
        )
    except BackendUnavailableError as error:
        raise invalid("--mtraining-backend", "auto or reference here", "cuda", str(error)) from error


def _value(name: str) -> Callable[[Namespace, MTrainingConfig], Any]:
    return lambda args, config: getattr(args, name, None)


def _absent(name: str, remedy: str) -> _Row:
    return _Row(_flag(name), "absent", _value(name), remedy)


def _absent_unless_zigzag(name: str, remedy: str) -> _Row:
    return _Row(
        _flag(name),
        "absent in this layout",
        lambda args, config: _is_relayed(args, config) and getattr(args, name, None),
        f"{remedy} Pass --mtraining-layout zigzag, or leave it out.",
    )


def _absent_in_packs(name: str, remedy: str) -> _Row:
    return _Row(
        _flag(name),
        "absent for packed documents",
        lambda args, config: _is_packed(args) and getattr(args, name, None),
        remedy,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _list_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _cp_size(args: Namespace) -> int:
    return getattr(args, "context_parallel_size", 1)


def _is_relayed(args: Namespace, config: MTrainingConfig) -> bool:
    """Return whether a rank's tokens are others than under Megatron's own split."""
    return _cp_size(args) > 1 and config.layout != "zigzag"


def _is_packed(args: Namespace) -> bool:
    return bool(getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False))


def _undivided_ranks(args: Namespace, config: MTrainingConfig) -> str | None:
    sizes = {_flag(name): getattr(args, name, 1) for name in _PARALLEL_SIZES}
    num_ranks, world_size = math.prod(sizes.values()), getattr(args, "world_size", 1)
    if min(sizes.values()) > 0 and world_size % num_ranks == 0:
        return None
    product = " times ".join(f"{flag} {size}" for flag, size in sizes.items())
    return f"{product} on {world_size} rank{'s' * (world_size > 1)}"


def _other_product(args: Namespace, config: MTrainingConfig) -> str | None:
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    if not sizes or math.prod(sizes) == _cp_size(args):
        return None
    return f"{' '.join(map(str, sizes))} with --context-parallel-size {_cp_size(args)}"


def _undivided(args: Namespace, config: MTrainingConfig) -> str | None:
    seq_len, cp_size = getattr(args, "seq_length", None), _cp_size(args)
    multiple = SequenceLayout.required_multiple(config.layout, cp_size=cp_size, block_size=config.block_size)
    if seq_len is None or seq_len % multiple == 0:
        return None
    return f"{seq_len}, which is no multiple of {multiple}"


def _uncounted_layers(args: Namespace, config: MTrainingConfig) -> list[int]:
    num_layers = getattr(args, "num_layers", None)
    if num_layers is None:
        return []
    return [layer for layer in config.dense_layers if layer > num_layers + (getattr(args, "mtp_num_layers", 0) or 0)]


def _layers_without_attention(args: Namespace, config: MTrainingConfig) -> list[int]:
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""
    layers = pattern.split("/")[0].replace("|", "")  # before the prediction layers, without the ends of stages
    return [layer for layer in config.dense_layers if layer <= len(layers) and layers[layer - 1] != "*"]


def _shared_over_ranks(args: Namespace, config: MTrainingConfig) -> str | None:
    grouped = getattr(args, "group_query_attention", False) and config.index_sharing == "kv_group"
    ranks, groups = getattr(args, "tensor_model_parallel_size", 1), getattr(args, "num_query_groups", 1)
    return f"kv_group with {ranks} and {groups}" if grouped and ranks > groups else None


def _other_levels(args: Namespace, config: MTrainingConfig) -> list[int] | None:
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    return sizes if _cp_size(args) > 1 and sizes and len(sizes) != 2 else None


def _masked_by_tensor(args: Namespace, config: MTrainingConfig) -> bool:
    return bool(getattr(args, "create_attention_mask_in_dataloader", False))


def _unbounded_stages(args: Namespace, config: MTrainingConfig) -> int | None:
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    return stages if _is_packed(args) and stages > 1 and not bounds_reach_every_stage() else None


def _several_rows(name: str) -> Callable[[Namespace, MTrainingConfig], Any]:
    """Return the rows of a micro batch that become one pack, where a pipeline stage would hand it on as rows again."""

    def offence(args: Namespace, config: MTrainingConfig) -> int | None:
        rows, stages = getattr(args, name, None) or 1, getattr(args, "pipeline_model_parallel_size", 1)
        fixed = not getattr(args, "variable_seq_lengths", False)
        return rows if _is_packed(args) and fixed and stages > 1 and rows > 1 else None

    return offence


def _offloaded(args: Namespace, config: MTrainingConfig) -> list[str] | None:
    modules = _list_of(getattr(args, "offload_modules", None))
    return modules if getattr(args, "fine_grained_activation_offloading", False) and "core_attn" in modules else None


_LENGTH = _Row(
    "--seq-length",
    "a multiple of ranks and block size for --mtraining-layout",
    _undivided,
    "Pass a --seq-length that is one; data is cut to it.",
)
_SIZES = (
    _Row(
        "the number of ranks",
        "a multiple of the parallel sizes",
        _undivided_ranks,
        "Start as many with torchrun --nproc-per-node, or lower a size.",
    ),
    _Row(
        "--hierarchical-context-parallel-sizes",
        "sizes whose product is --context-parallel-size",
        _other_product,
        "Pass the ranks inside a node and the number of nodes, or leave it out: the hosts tell.",
    ),
    _LENGTH,
)
_TABLE = (
    _absent("use_legacy_models", "Legacy models have no layer specs; use the core ones."),
    *(_absent(option.name, option.remedy) for option in ALWAYS_OFF),
    *(_absent_unless_zigzag(option.name, option.remedy) for option in OFF_UNLESS_ZIGZAG),
    _Row("--attention-dropout", "0", _value("attention_dropout"), "Pass --attention-dropout 0."),
    _Row(
        "--window-size",
        "absent",
        lambda args, config: windowed_layers(args) and f"{args.window_size} in layers {windowed_layers(args)}",
        "Slashes replace the window.",
    ),
    _Row(
        "--softmax-type",
        "vanilla",
        lambda args, config: getattr(args, "softmax_type", "vanilla") != "vanilla" and args.softmax_type,
        "Learned sinks are not supported.",
    ),
    _Row(
        "--position-embedding-type",
        "rope, yarn, learned_absolute or none",
        lambda args, config: (
            getattr(args, "position_embedding_type", "rope") in ("mrope", "relative") and args.position_embedding_type
        ),
        "Positions of several dimensions and biases of scores are not supported.",
    ),
    _Row(
        "--transformer-impl",
        "local or transformer_engine",
        lambda args, config: getattr(args, "transformer_impl", None) == "inference_optimized" and args.transformer_impl,
        "This is attention for training.",
    ),
    _Row(
        "--cuda-graph-impl",
        "none, or leave attention out of --cuda-graph-modules (--cuda-graph-scope in earlier releases)",
        lambda args, config: cuda_graphs_cover_attention(args) and args.cuda_graph_impl,
        GRAPHS,
    ),
    _Row("--offload-modules", "without core_attn", _offloaded, "Pass --recompute-modules core_attn instead."),
    _LENGTH,
    _Row(
        "--mtraining-dense-layers",
        "layers that there are, counted from 1",
        _uncounted_layers,
        "Pass numbers up to --num-layers.",
    ),
    _Row(
        "--mtraining-dense-layers",
        "attention layers of the hybrid layer pattern, in which every layer counts from 1",
        _layers_without_attention,
        "Pass the places of its *.",
    ),
    _Row(
        "--mtraining-index-sharing",
        "head with more tensor-parallel ranks than key/value heads",
        _shared_over_ranks,
        SHARED_OVER_RANKS,
    ),
    _Row(
        "--hierarchical-context-parallel-sizes",
        "two sizes, ranks inside a node and nodes",
        _other_levels,
        "Pass two, or leave it out: the hosts tell.",
    ),
    _Row(
        "--reset-attention-mask",
        "absent",
        _value("reset_attention_mask"),
        "Attention takes no mask; --dataloader-inter-document-masking, in later releases, separates documents.",
    ),
    _Row(
        "--no-create-attention-mask-in-dataloader",
        "passed",
        lambda args, config: _masked_by_tensor(args, config) and "a mask of seq x seq",
        "Attention is causal without one.",
    ),
    _Row(
        "--mtraining-layout",
        "striped, node_striped, rotated or contiguous for packed documents on several ranks",
        lambda args, config: _is_packed(args) and _cp_size(args) > 1 and config.layout == "zigzag" and config.layout,
        "Megatron's zigzag splits each document by itself; the other layouts split the pack.",
    ),
    _Row(
        "--no-rope-fusion",
        "passed for packed documents on several ranks",
        lambda args, config: _is_packed(args) and _cp_size(args) > 1 and getattr(args, "apply_rope_fusion", False),
        "The fused kernel knows Megatron's split only.",
    ),
    _Row(
        "--pipeline-model-parallel-size",
        "1 for packed documents",
        _unbounded_stages,
        "This Megatron-LM does not send their bounds to every stage; core 0.18 does.",
    ),
    *(
        _Row(
            _flag(name),
            "1 for packed documents on several pipeline stages",
            _several_rows(name),
            "Megatron-LM makes one pack of the rows and hands it on between stages in the shape of rows.",
        )
        for name in ("micro_batch_size", "eval_micro_batch_size")
    ),
    _absent_in_packs(
        "overlap_moe_expert_parallel_comm",
        "Megatron-LM's schedule for it does not hand on where documents end.",
    ),
    _absent_unless_zigzag("perform_rl_step", "Reinforcement learning packs sequences by Megatron's own split."),
    _absent_unless_zigzag(
        "logits_load_dir", "A teacher's logits lie by rank, in the split of the run that saved them."
    ),
    _absent_unless_zigzag("logits_save_dir", "Logits are saved by rank, and a student reads them by Megatron's split."),
    _absent("use_kitchen_attention", "Both replace the core attention; choose one."),
)
