"""Reduction of dK and dV over the ranks: each rank's contributions travel back to the owners of the keys."""

from __future__ import annotations

from torch import Tensor

from ..transport import Pending, RingTransports, Transport
from ..transport.base import Received
from .schedule import RingSchedule, RingStep


class RingReduction:
    """Sums that travel around a ring behind the KV blocks.

    The contribution to this rank's own keys stays. Every other one joins the sum that arrives from rank - 1 and
    travels on; after ``size - 1`` hops each sum is at the owner of its keys.
    """

    def __init__(self, ring: Transport) -> None:
        self._ring = ring
        self._own: Tensor | None = None
        self._arriving: Pending | None = None

    def set_own(self, contribution: Tensor) -> None:
        """Take the contribution to this rank's own keys; the caller does not use it afterwards."""
        self._own = contribution

    def add(self, contribution: Tensor) -> None:
        """Take the contribution to another rank's keys: in the k-th call those of rank - k."""
        if self._arriving is not None:
            contribution = self._arriving.wait().add_(contribution)
        self._arriving = self._ring.exchange(contribution)

    def settle(self) -> None:
        """Wait for the sum that arrives, so that the one sent takes no memory while nothing is added."""
        if self._arriving is not None:
            self._arriving = Received(self._arriving.wait())

    def total(self) -> Tensor:
        """Return the sum for this rank's own keys, once, after the last contribution."""
        if self._arriving is not None:
            self._own.add_(self._arriving.wait())
        return self._own


class NodeReduceScatter:
    """The sum for ``gather``: one contribution holds those to the keys of all ranks of the node, end to end."""

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
        self._gathers, self._group = schedule.gathers, groups.inner_gradient
        self._between_nodes = RingReduction(groups.outer_gradient)
        self._own_node, self._node = self._new_node(), None
        self._other_nodes = groups.outer_gradient.size - 1  # whose sums have not left yet

    def begin(self, step: RingStep) -> None:
        """Prepare for the contribution of ``step``."""
        if step.arrives_from == "outer":
            if not self._gathers:
                self._own_node.settle()
            self._node = self._new_node()
        elif step.arrives_from in ("self", "held"):
            self._node = self._own_node

    def sends(self, step: RingStep) -> bool:
        """True if the contribution of ``step`` goes to another rank at once."""
        return self._joins_sum(step) or self._leaves_node(step)

    def add(self, contribution: Tensor, step: RingStep) -> None:
        """Take the contribution of ``step``; the last node's sum, and one that waits for nobody, leaves at once."""
        if self._joins_sum(step):
            self._node.add(contribution)
        else:
            self._node.set_own(contribution)
        if self._leaves_node(step):
            self.end(step)

    def end(self, step: RingStep) -> None:
        """Hand a node's sum on, after the last step on its keys."""
        if not step.ends_node or self._node is None:
            return
        if self._node is self._own_node:
            self._between_nodes.set_own(self._node.total())
        else:
            self._between_nodes.add(self._node.total())
            self._other_nodes -= 1
        self._node = None

    def total(self) -> Tensor:
        """Return the sum of all ranks' contributions to this rank's own keys, once, after the last step."""
        return self._between_nodes.total()

    def _joins_sum(self, step: RingStep) -> bool:
        return self._gathers or step.arrives_from in ("inner", "held")

    def _leaves_node(self, step: RingStep) -> bool:
        is_due = self._other_nodes == 1 or self._group.size == 1
        return is_due and step.ends_node and self._node is not self._own_node

    def _new_node(self) -> RingReduction | NodeReduceScatter:
        return NodeReduceScatter(self._group) if self._gathers else RingReduction(self._group)
