"""Reduction of dK and dV over the ranks: each rank's contributions travel back to the owners of the keys."""

from __future__ import annotations

from torch import Tensor

from ..transport import Pending, RingTransports, Transport
from .schedule import RingSchedule, RingStep


class RingReduction:
    """Sums that travel around a ring behind the KV blocks.

    Call number ``s`` of :meth:`add` gives the contribution to the keys of rank - s. The first is to this rank's own
    keys and stays; every later one joins the sum that arrives from rank - 1 and travels on during the next step.
    After ``size - 1`` hops each sum is at the owner of its keys.
    """

    def __init__(self, ring: Transport) -> None:
        self._ring = ring
        self._own: Tensor | None = None
        self._arriving: Pending | None = None

    @property
    def sends(self) -> bool:
        """True if the next contribution goes to another rank: all but the first."""
        return self._own is not None

    def add(self, contribution: Tensor) -> None:
        """Take the contribution of the current step; the caller does not use it afterwards."""
        if self._own is None:
            self._own = contribution
            return
        if self._arriving is not None:
            contribution = self._arriving.wait().add_(contribution)
        self._arriving = self._ring.exchange(contribution)

    def total(self) -> Tensor:
        """Return the sum for this rank's own keys, once, after the last step."""
        if self._arriving is not None:
            self._own.add_(self._arriving.wait())
        return self._own


class NodeReduceScatter:
    """The sum for ``gather``: one contribution holds those to the keys of all ranks of the node, end to end."""

    sends = True

    def __init__(self, group: Transport) -> None:
        self._group = group
        self._arriving: Pending | None = None

    def add(self, contribution: Tensor) -> None:
        """Take ``[2, batch, size * local_len, num_kv_heads, head_dim]``."""
        parts = contribution.unflatten(2, (self._group.size, -1))
        self._arriving = self._group.post_reduce_scatter(parts.movedim(2, 0).contiguous())

    def total(self) -> Tensor:
        """Return the sum for this rank's own keys."""
        return self._arriving.wait()


class GradientReduction:
    """The two levels of the reduction: inside a node behind every step, between nodes behind a node's last step."""

    def __init__(self, schedule: RingSchedule, groups: RingTransports) -> None:
        self._node_kind = NodeReduceScatter if schedule.gathers else RingReduction
        self._group = groups.inner_gradient
        self._between_nodes = RingReduction(groups.outer_gradient)
        self._in_node: RingReduction | NodeReduceScatter | None = None

    def begin(self, step: RingStep) -> None:
        """Start a node's reduction before the first step on its keys."""
        if step.arrives_from != "inner":
            self._in_node = self._node_kind(self._group)

    def sends(self, step: RingStep) -> bool:
        """True if the contribution of ``step`` goes to another rank at once."""
        return self._in_node.sends or (step.is_last and self._between_nodes.sends)

    def add(self, contribution: Tensor, step: RingStep) -> None:
        """Take the contribution of ``step``; after the very last one the node's sum leaves at once."""
        self._in_node.add(contribution)
        if step.is_last and self._between_nodes.sends:
            self._end_node()

    def end(self, step: RingStep) -> None:
        """Hand a node's sum on, after the last step on its keys."""
        if step.ends_node and self._in_node is not None:
            self._end_node()

    def total(self) -> Tensor:
        """Return the sum of all ranks' contributions to this rank's own keys, once, after the last step."""
        return self._between_nodes.total()

    def _end_node(self) -> None:
        self._between_nodes.add(self._in_node.total())
        self._in_node = None
