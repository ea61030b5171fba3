"""The user's flags made small: a few layers, one short step, and nothing that writes files."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from ..errors import invalid
from ..layout import SequenceLayout
from ..megatron.compat import require_symbol
from . import CannotStartError

FEWEST_LAYERS = 2
OFF = {
    "save": None,
    "load": None,
    "pretrained_checkpoint": None,
    "non_persistent_ckpt_type": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "async_save": False,
    "rampup_batch_size": None,
    "inprocess_restart": False,
    "skip_train": False,
    "eval_iters": 0,
    "full_validation": False,
    "num_workers": 0,
    "use_distributed_optimizer": False,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "use_custom_fsdp": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "ddp_average_in_collective": False,
    "calculate_per_token_loss": True,
    "check_for_nan_in_loss_and_grad": False,
    "check_for_spiky_loss": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "mtraining_dense_warmup_steps": 0,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Flags that are set otherwise silently: none of them changes what attention computes."""

NOTED = {
    "hidden_dropout": (0.0, "dropout is off: it would hide what differs"),
    "moe_input_jitter_eps": (None, "router jitter is off: it would hide what differs"),
    "moe_router_force_load_balancing": (False, "routing is the router's own: at random nothing repeats"),
    "moe_pad_expert_input_to_capacity": (False, "expert inputs are not padded"),
    "moe_expert_capacity_factor": (
        None,
        "no token is dropped here; with --moe-expert-capacity-factor the other tokens of a rank decide which are, "
        "so other ranks and other documents do change results",
    ),
}
"""Flags that are set otherwise where the user gave them, and the note about it."""

_LAYER_PATTERNS = ("hybrid_override_pattern", "hybrid_layer_pattern", "heterogeneous_layers_config_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The differences of one run of the script to the user's flags."""

    cp_size: int | None = None
    """Context-parallel ranks; None as in the flags. What they leave become data-parallel ranks."""

    seq_len: int | None = None
    """Tokens in a sequence; None as in the flags."""

    megatrons_attention: bool = False
    """True if attention is Megatron's own."""


def apply(setting: Setting, args: Namespace) -> list[str]:
    """Set Megatron's parsed arguments, before it validates them, and return notes on what the user would miss.

    Raises:
        CannotStartError: the flags do not choose this attention, or leave nothing sparse to examine.
    """
    backends = require_symbol("megatron.core.transformer.enums", "AttnBackend")
    if args.attention_backend is not backends["mtraining"]:
        raise _cannot("--attention-backend", "mtraining", args.attention_backend.name, "It is what is examined.")
    if getattr(args, "perform_rl_step", False):
        raise CannotStartError("unsupported: doctor with --perform-rl-step. Leave the flag out.")
    notes = _switch_off(args)
    notes += _cut_layers(args)
    least = shortest_length(args)
    if args.seq_length is None or args.seq_length < least:
        rule = (
            f"at least {least}, longer than --mtraining-dense-below {args.mtraining_dense_below} and two blocks "
            f"on each of {args.context_parallel_size} context-parallel ranks"
        )
        raise _cannot("--seq-length", rule, args.seq_length, "Raise it, or lower --mtraining-dense-below.")
    args.seq_length = setting.seq_len or args.seq_length
    if setting.cp_size is not None:
        args.context_parallel_size, args.hierarchical_context_parallel_sizes = setting.cp_size, None
    if setting.megatrons_attention:
        args.attention_backend = backends["auto"]
        args.create_attention_mask_in_dataloader = False
    args.global_batch_size = args.micro_batch_size * _replicas(args) * num_microbatches(args)
    return notes


def num_microbatches(args: Namespace) -> int:
    """Return the micro-batches of a step: one, or one for each pipeline stage, all of the same data."""
    return args.pipeline_model_parallel_size


def shortest_length(args: Namespace) -> int:
    """Return the fewest tokens that attend sparsely and fill two blocks on every rank, as the layout divides them."""
    cp_size, block = args.context_parallel_size, args.mtraining_block_size
    multiple = SequenceLayout.required_multiple(args.mtraining_layout, cp_size=cp_size, block_size=block)
    multiple = math.lcm(multiple, args.tensor_model_parallel_size * cp_size)
    return -(-max(args.mtraining_dense_below + 1, 2 * cp_size * block) // multiple) * multiple


def _switch_off(args: Namespace) -> list[str]:
    for name, value in OFF.items():
        if hasattr(args, name):
            setattr(args, name, value)
    notes = []
    for name, (value, note) in NOTED.items():
        if getattr(args, name, None):
            setattr(args, name, value)
            notes.append(note)
    return notes


def _cut_layers(args: Namespace) -> list[str]:
    """Leave a few layers, spread over the model, as many on each pipeline stage."""
    if args.num_layers is None or any(getattr(args, name, None) for name in _LAYER_PATTERNS):
        return ["all layers remain: their pattern cannot be cut"]
    before, chunks = args.num_layers, args.pipeline_model_parallel_size * _virtual_stages(args)
    after = chunks * -(-FEWEST_LAYERS // chunks)
    if getattr(args, "recompute_num_layers", None):
        args.recompute_num_layers = 1
    if getattr(args, "num_layers_per_virtual_pipeline_stage", None):
        args.num_layers_per_virtual_pipeline_stage = after // chunks
    if after >= before:
        return []
    layers = [round(number * (before - 1) / max(1, after - 1)) for number in range(after)]
    for name, value in vars(args).items():
        if name.endswith("_freq") and isinstance(value, list) and len(value) == before:
            setattr(args, name, [value[layer] for layer in layers])
    args.num_layers = after
    dense = set(args.mtraining_dense_layers or ())
    args.mtraining_dense_layers = tuple(new for new, old in enumerate(layers, 1) if old + 1 in dense)
    if len(args.mtraining_dense_layers) == after:
        args.mtraining_dense_layers = ()
    return [f"{after} of {before} layers, those numbered {', '.join(str(layer + 1) for layer in layers)}"]


def _virtual_stages(args: Namespace) -> int:
    given = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    per_stage = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if given or not per_stage:
        return given or 1
    return max(1, args.num_layers // args.pipeline_model_parallel_size // per_stage)


def _replicas(args: Namespace) -> int:
    """Return the number of data-parallel ranks.

    Raises:
        CannotStartError: the parallel sizes do not divide the number of ranks.
    """
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    replicas, rest = divmod(args.world_size, math.prod(sizes))
    if rest or not replicas:
        rule = f"a multiple of {math.prod(sizes)}, tensor x pipeline x context-parallel size"
        raise _cannot("--nproc-per-node x --nnodes", rule, args.world_size, "Start as many ranks as training would.")
    return replicas


def _cannot(name: str, rule: str, value: Any, remedy: str) -> CannotStartError:
    return CannotStartError(str(invalid(name, rule, value, remedy)))
