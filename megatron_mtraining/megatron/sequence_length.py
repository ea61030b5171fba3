"""Length that a model trains on: the one Megatron was told, split over the context-parallel ranks once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import invalid
from ..ranks import is_first_rank
from ..layout import SequenceLayout, token_positions
from ..tensors import to_device
from .compat import global_of_training

if TYPE_CHECKING:
    from .runtime import Runtime

_LOG = logging.getLogger(__name__)
_SPLIT_ONCE = "Split every batch once, with get_batch_on_this_cp_rank or megatron_mtraining.megatron.shard_batch."
_VARIABLE = "Pass --variable-seq-lengths (variable_seq_lengths=True) where lengths are meant to change."


def check_length(model: Any, given: Mapping[str, Any], runtime: Runtime) -> None:
    """Check that a model on several context-parallel ranks is given this rank's part of a sequence, no more nor less.

    Packed documents are left to their bounds, which end where the pack does.

    Args:
        model: a GPTModel or HybridModel, or its part on a pipeline stage.
        given: the arguments of its forward pass by name.
        runtime: of this process.

    Raises:
        ValueError: a batch that nobody split, one that was split twice, or one of another length than was told.
    """
    cp_size = runtime.cp_group.size()
    tokens = next((given[name] for name in ("input_ids", "labels") if given.get(name) is not None), None)
    if cp_size == 1 or tokens is None or tokens.dim() != 2:
        return
    params = given.get("packed_seq_params")
    if params is None or params.qkv_format != "thd":
        _check_total(model, tokens.shape[1], cp_size)
    if given.get("position_ids") is not None and given["position_ids"].shape == tokens.shape:
        _check_positions(given["position_ids"], runtime, cp_size)


def _check_total(model: Any, local_len: int, cp_size: int) -> None:
    told, name = _told_length(model)
    if local_len * cp_size == told:
        return
    is_training = model.training and torch.is_grad_enabled()
    if local_len * cp_size < told and (not is_training or model.config.variable_seq_lengths):
        if not is_training:
            _say_shorter(local_len * cp_size, told, name)
        return
    causes = {told: "a batch that nobody split", told // cp_size**2: "a batch that was split twice"}
    cause = causes.get(local_len, "a sequence of another length")
    raise invalid(
        f"The tokens of a sequence on each of {cp_size} context-parallel ranks",
        f"{told // cp_size}, of {name} {told}",
        f"{local_len}: {cause}",
        _SPLIT_ONCE if local_len in causes else f"{_SPLIT_ONCE} {_VARIABLE}",
    )


def _told_length(model: Any) -> tuple[int, str]:
    """Return the length that Megatron was told, and the name of what told it."""
    told = getattr(global_of_training("get_args"), "seq_length", None)
    return (model.max_sequence_length, "max_sequence_length") if told is None else (told, "--seq-length")


@functools.cache
def _say_shorter(seq_len: int, told: int, name: str) -> None:
    if is_first_rank():
        _LOG.warning("evaluation of sequences of %d tokens, shorter than %s %d.", seq_len, name, told)


def _check_positions(position_ids: Tensor, runtime: Runtime, cp_size: int) -> None:
    """Look once at the first batch of each length; the host waits for it."""
    kind = (tuple(position_ids.shape), runtime.cp_group.rank())
    if kind in runtime.checked_lengths:
        return
    runtime.checked_lengths.add(kind)
    config = runtime.config
    sizes = {"seq_len": position_ids.shape[1] * cp_size, "cp_size": cp_size, "block_size": config.block_size}
    layout = SequenceLayout(config.layout, **sizes, node_size=runtime.inner_size)
    expected = to_device(token_positions(layout, cp_rank=runtime.cp_group.rank()), position_ids.device)
    ahead = position_ids - expected
    # Positions that begin anew in each document lag behind; a text that is continued is ahead everywhere alike.
    if bool(((ahead > 0).any(1) & (ahead != ahead[:, :1]).any(1)).any()):
        raise invalid(
            "position_ids",
            f"those of this rank's tokens in layout {config.layout}",
            "others: a batch that was split twice, or by another layout",
            _SPLIT_ONCE,
        )
