"""What one attention call sends: the sizes of its messages, and links that carry them and remember how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .profile import Profile

GRADIENT_BYTES = 4
"""Gradients of keys travel in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """Shape of one layer's attention call."""

    seq_len: int
    num_heads: int
    """Query heads of a rank, after tensor parallelism."""

    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2
    """Bytes of a key's element."""

    num_lists: int | None = None
    """Lists of the index; None for one for each query head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Bytes of each kind of message; keys and values together."""

    keys: int
    """A rank's own keys and values."""

    gradients: int
    """Their gradients."""

    packs: int
    """Vertical rows of the whole sequence; 0 where they are not gathered."""

    pack_gradients: int

    @classmethod
    def of(cls, sizes: CallSizes, *, cp_size: int, pack_width: int) -> Messages:
        """The messages of one call.

        Args:
            sizes: of the call.
            cp_size: ranks that share the sequence.
            pack_width: vertical rows that are gathered for each list; 0 for none.
        """
        rows = 2 * sizes.seq_len // cp_size * sizes.num_kv_heads * sizes.head_dim
        packed = 2 * pack_width * (sizes.num_lists or sizes.num_heads) * sizes.head_dim
        return cls(
            keys=rows * sizes.element_bytes,
            gradients=rows * GRADIENT_BYTES,
            packs=packed * sizes.element_bytes,
            pack_gradients=packed * GRADIENT_BYTES,
        )


@dataclass(frozen=True, slots=True)
class Route:
    """One ring's links: every rank receives from its predecessor. Float64 where nothing else is said."""

    predecessor: Tensor
    """int64 ``[cp_size]``."""

    successor: Tensor
    """int64 ``[cp_size]``."""

    link: Tensor
    """int64 ``[cp_size]``: which of all links the rank receives over."""

    latency: Tensor
    """``[cp_size]``, seconds."""

    seconds_per_byte: Tensor
    """``[cp_size]``."""


class Links:
    """Every rank's link inside its node and its link out of it: when each is free, and what it has sent.

    A link carries one message after the other. A transfer starts when both ends have posted it. A collective starts
    when all its ranks have come; it does not wait for messages under way but holds back later ones.
    """

    def __init__(self, profile: Profile, *, cp_size: int, node_size: int) -> None:
        self._rank = torch.arange(cp_size)
        self._in_node = min(node_size, cp_size)
        self._node = self._rank // self._in_node
        self._num_nodes = cp_size // self._in_node
        # Level 0 is inside a node, level 1 between nodes; link ``level * cp_size + rank`` leads out of a rank.
        rates = torch.tensor([profile.inner_gb_s, profile.outer_gb_s], dtype=torch.float64)
        self._seconds_per_byte = 1e-9 / rates
        self._latency = 1e-6 * torch.tensor([profile.inner_latency_us, profile.outer_latency_us], dtype=torch.float64)
        self._free = torch.zeros(2 * cp_size, dtype=torch.float64)
        self._sent = torch.zeros(2 * cp_size, dtype=torch.float64)

    @property
    def sent_bytes(self) -> Tensor:
        """float64 ``[2, cp_size]``: what each rank has sent inside its node and out of it."""
        return self._sent.view(2, -1)

    def route(self, predecessor: Tensor) -> Route:
        """The links of a ring in which rank r receives from ``predecessor[r]``: int64 ``[cp_size]``, a permutation."""
        level = (self._node[predecessor] != self._node).long()
        successor = torch.empty_like(predecessor)
        successor[predecessor] = self._rank
        link = level * len(self._rank) + predecessor
        return Route(predecessor, successor, link, self._latency[level], self._seconds_per_byte[level])

    def exchange(self, posted: Tensor, route: Route, num_bytes: int) -> Tensor:
        """When each rank has received from its predecessor and been received from.

        Args:
            posted: float64 ``[cp_size]``, seconds.
            route: which links to take.
            num_bytes: that each rank sends.
        """
        start = torch.maximum(torch.maximum(posted, posted.take(route.predecessor)), self._free.take(route.link))
        done = torch.add(start + route.latency, route.seconds_per_byte, alpha=num_bytes)
        self._free[route.link] = done
        self._sent[route.link] += num_bytes
        return torch.maximum(done, done.take(route.successor))

    def gather_in_node(self, posted: Tensor, num_bytes: int) -> Tensor:
        """When every rank of a node has what each of them gives: an all-gather, or a reduce-scatter of as much."""
        if self._in_node == 1:
            return posted
        came = posted.view(self._num_nodes, -1).amax(1)[self._node]
        return self._collect(came, (self._in_node - 1) * num_bytes, level=0, phases=1)

    def all_reduce(self, posted: Tensor, num_bytes: int) -> Tensor:
        """When all ranks have the sum: reduced inside nodes, then each piece between nodes, then gathered inside."""
        now = posted.amax().expand_as(posted)
        if not num_bytes:
            return posted
        in_node, nodes = self._in_node, self._num_nodes
        if in_node > 1:
            now = self._collect(now, 2 * num_bytes * (in_node - 1) / in_node, level=0, phases=2)
        if nodes > 1:
            now = self._collect(now, 2 * num_bytes / in_node * (nodes - 1) / nodes, level=1, phases=2)
        return now

    def _collect(self, came: Tensor, num_bytes: float, *, level: int, phases: int) -> Tensor:
        seconds = phases * self._latency[level] + num_bytes * self._seconds_per_byte[level]
        free = self._free.view(2, -1)[level]
        free.copy_(torch.maximum(free, came) + seconds)
        self.sent_bytes[level] += num_bytes
        return came + seconds
