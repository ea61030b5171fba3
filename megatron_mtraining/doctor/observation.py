"""Observation of attention layers: the indices of a step and the inputs of its calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..megatron.runtime import LayerRecord, current_runtime, process
from ..metrics import computed_pairs_of_lists, density
from ..metrics.density import counted_slashes, counted_verticals, triangle
from ..transport import as_transport
from ..types import AttentionIndex, VerticalSlashIndex
from .training import Training

_COUNTED = (counted_verticals, counted_slashes)
_NO_POSITION = 2**40


class Observation:
    """Observer of every attention call inside a ``with`` block.

    Args:
        training: whose layers are observed.
        record_inputs: whether to record queries, keys and values of each layer's first call.
    """

    def __init__(self, training: Training, *, record_inputs: bool = False) -> None:
        self._modules = training.attentions
        self._record_inputs = record_inputs
        self._current = ""
        self.indices: dict[str, list[AttentionIndex]] = {}
        """Index of every call, by layer."""
        self.first: dict[str, LayerRecord] = {}
        """First call, by layer."""
        self.inputs: dict[str, tuple[tuple, dict[str, Any]]] = {}
        """Inputs of the first call, by layer, where they are recorded."""

    def __enter__(self) -> Observation:
        self._before, process().observers = process().observers, [self]
        self._handles = [
            module.register_forward_pre_hook(functools.partial(self._note, name), with_kwargs=True)
            for name, module in self._modules.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        process().observers = self._before
        for handle in self._handles:
            handle.remove()

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Take a call; see :class:`megatron_mtraining.megatron.runtime.AttentionObserver`."""
        self.indices.setdefault(self._current, []).append(call.index)
        if self._current not in self.first:
            self.first[self._current] = call if self._record_inputs else dataclasses.replace(call, query=None, key=None)

    def _note(self, name: str, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._current = name
        if self._record_inputs and name not in self.inputs:
            self.inputs[name] = _detached(args), dict(zip(kwargs, _detached(tuple(kwargs.values())), strict=True))


@contextlib.contextmanager
def given_indices(training: Training, indices: dict[str, AttentionIndex]) -> Iterator[None]:
    """Have each layer attend by ``indices`` instead of by what it would select."""
    modules = {name: module for name, module in training.attentions.items() if name in indices}
    for name, module in modules.items():
        module.given_index = indices[name]
    try:
        yield
    finally:
        for module in modules.values():
            module.given_index = None


def is_same(one: AttentionIndex, other: AttentionIndex) -> bool:
    """Return whether two indices of one kind of call are the same, bit for bit."""
    if not isinstance(one, VerticalSlashIndex) or not isinstance(other, VerticalSlashIndex):
        pairs = zip(one.tensors, other.tensors, strict=True)
        return type(one) is type(other) and all(_is_equal(each, its) for each, its in pairs)
    counts = ((one.num_vertical, other.num_vertical), (one.num_slash, other.num_slash))
    lists = ([count(index, seq_len=_NO_POSITION) for index in (one, other)] for count in _COUNTED)
    return all(_is_equal(each, its) for each, its in (*counts, *lists))


def common_share(one: VerticalSlashIndex, other: VerticalSlashIndex, *, seq_len: int) -> float:
    """Return entries that two indices have in common, over those that either has; the mean over lists."""
    common = either = 0
    for counted in _COUNTED:
        # No list holds numbers as large as those that pad it here; they share a column, which is removed.
        tables = [_table(counted(index, seq_len=_NO_POSITION), seq_len) for index in (one, other)]
        common = common + (tables[0] & tables[1]).sum(-1)
        either = either + (tables[0] | tables[1]).sum(-1)
    return float((common / either.clamp(min=1)).mean())


def densities(calls: dict[str, LayerRecord]) -> dict[str, Tensor]:
    """Return the density of each list by layer; for block lists a context-parallel collective."""
    return {name: _density(call) for name, call in calls.items()}


def _density(call: LayerRecord) -> Tensor:
    seq_len, index = call.layout.seq_len, call.index
    if index.is_global:
        return density(index, seq_len=seq_len, cu_seqlens=call.cu_seqlens).cpu()
    group = as_transport(current_runtime().cp_group)
    pairs = computed_pairs_of_lists(index, call.layout, cp_rank=group.rank, cu_seqlens=call.cu_seqlens).sum(0)
    bounds = torch.tensor([0, seq_len], device="cpu") if call.cu_seqlens is None else call.cu_seqlens.cpu().long()
    return group.all_reduce(pairs).double().cpu() / triangle(bounds.diff()).sum() / index.rows


def _detached(values: tuple) -> tuple:
    return tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in values)


def _table(entries: Tensor, seq_len: int) -> Tensor:
    """Return bool ``[rows, lists, seq_len]``, True where a number is in the list."""
    table = torch.zeros(*entries.shape[:2], seq_len + 1, dtype=torch.bool, device=entries.device)
    return table.scatter_(2, entries.clamp(max=seq_len), True)[..., :-1]


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
