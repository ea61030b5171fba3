"""Validation and plan of one call, before anything is communicated."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from .backends.resolve import resolve_backend
from .config import MTrainingConfig
from .layout import SequenceLayout
from .request import AttentionRequest
from .ring import RingContext, ring_schedule
from .selection import Score, prepare_selection
from .transport import Groups, RingGroups, as_ring_groups, as_transport
from .transport.agreement import announced_errors
from .types import AttentionIndex
from .validate import check_index, validate_request


class PreparedCall(NamedTuple):
    """A call that is valid on this rank; nothing has been communicated but the refusal of one that is not."""

    request: AttentionRequest
    context: RingContext
    score: Score | None
    """The planned selection; None where the caller gives the index."""


def prepare_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: MTrainingConfig | None,
    *,
    index: AttentionIndex | None,
    layout: SequenceLayout | None,
    groups: Groups | None,
    softmax_scale: float | None,
    cu_seqlens: Tensor | None,
    num_valid: Tensor | None,
) -> PreparedCall:
    """Validate the arguments of :func:`sparse_attention`, plan the selection and resolve the backend."""
    groups = as_ring_groups(groups)
    with announced_errors(as_transport(groups.cp), query, key, value):
        if config is None and index is not None:
            check_index(index)
            config = default_config(index.block_size)
        config = with_schedule(config, query, key, layout=layout, groups=groups)
        request = validate_request(
            query,
            key,
            value,
            config,
            index=index,
            layout=layout,
            groups=groups,
            softmax_scale=softmax_scale,
            cu_seqlens=cu_seqlens,
            num_valid=num_valid,
        )
        score = prepare_selection(request) if index is None else None
        return PreparedCall(request, _ring_context(request), score)


def with_schedule(
    config: MTrainingConfig | None,
    query: Tensor,
    key: Tensor,
    *,
    layout: SequenceLayout | None,
    groups: RingGroups,
) -> MTrainingConfig | None:
    """Return ``config`` with the schedule that it leaves to ``auto``, decided in the first such call.

    Arguments are not validated yet: those of another kind are left as they are, for the validation to name. On one
    rank every schedule is the same.
    """
    if not isinstance(config, MTrainingConfig) or config.schedule != "auto":
        return config
    cp = as_transport(groups.cp)
    shapes = [tensor.shape for tensor in (query, key) if isinstance(tensor, Tensor) and tensor.dim() == 4]
    if cp.size == 1 or len(shapes) < 2 or not isinstance(layout, SequenceLayout):
        return config
    node = (groups.inner or cp) if groups.outer is None else groups.inner  # a group alone is one node
    node_size = 1 if node is None else as_transport(node).size
    if cp.size % node_size:
        return config
    sizes = cp.size, node_size, layout.seq_len, shapes[0][2], shapes[1][2], shapes[0][3]
    return _decided(config, layout.kind, cp.global_ranks[cp.rank] == 0, *sizes)


@lru_cache(maxsize=64)
def _decided(config: MTrainingConfig, layout: str, log: bool, *sizes: int) -> MTrainingConfig:
    from .planner.auto import RingCall, decide

    names = ("cp_size", "node_size", "seq_len", "num_heads", "num_kv_heads", "head_dim")
    call = RingCall(**dict(zip(names, sizes, strict=True)))
    return replace(config, schedule=decide(config, call, layout=layout, log=log).schedule)


def _ring_context(request: AttentionRequest) -> RingContext:
    query, config, groups = request.query, request.config, request.groups
    sizes = {"cp_rank": groups.cp.rank, "cp_size": groups.cp.size, "inner_size": groups.inner.size}
    return RingContext(
        layout=request.layout,
        documents=request.documents,
        groups=groups,
        schedule=ring_schedule("flat" if config.schedule == "auto" else config.schedule, **sizes),
        backend=resolve_backend(
            config.backend,
            device=query.device,
            dtype=query.dtype,
            head_dim=query.shape[3],
            block_size=config.block_size,
        ),
        softmax_scale=request.softmax_scale,
    )


@lru_cache(maxsize=8)
def default_config(block_size: int, backend: str = "auto") -> MTrainingConfig:
    """Return the configuration beside an index that comes without one."""
    return MTrainingConfig(block_size=block_size, backend=backend)
