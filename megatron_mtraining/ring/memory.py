"""Bytes that the ring's backward holds; ``tests/ring/test_backward_memory.py`` compares with the ring's own code."""

from __future__ import annotations

from .schedule import RingShape


def backward_bytes(ring: RingShape, *, query: int, kv: int) -> int:
    """Return the bytes of a backward of several ranks, beside its arguments, its results in bfloat16 and packs.

    Beside a rank's own keys, which are saved inputs: the stacked copy and the keys that arrive, 2 ``kv`` for each ring;
    dQ between steps in float32, 2 ``query``; and sums of dK and dV in float32, 2 ``kv`` each: the one computed and
    those in flight. The last step has one set of keys, and dQ in bfloat16 too. Where a node gathers: its keys, their
    gradients in float32, and these once more in sending order. While other nodes' steps interrupt those on the own
    node: the keys of its next step, and where two of its steps are done the sum that has arrived for it.

    Args:
        ring: schedule and ranks.
        query: bytes of a rank's queries in bfloat16.
        kv: bytes of a rank's keys and values in bfloat16, together.
    """
    schedule = ring.schedule
    inner = schedule.inner_size
    outer = ring.cp_size // inner
    if schedule.gathers:
        if outer == 1:
            return kv * (5 * inner + 1)
        # The last step has neither a rank's own stacked keys nor arriving ones, but dQ in both dtypes.
        sending = 2 * query + kv * (5 * inner + 2) + max(query, 2 * kv)
        return sending + 2 * kv * _sums_in_flight(outer) - (query + kv)
    sums = 1 + _sums_in_flight(inner) + _sums_in_flight(outer)
    earlier, last = 2 * query + 2 * kv * ((inner > 1) + (outer > 1)), 3 * query + kv
    if any(step.arrives_from == "held" for step in schedule.backward_steps):
        earlier += kv + 2 * kv * (schedule.backward_steps[1].arrives_from == "inner")
        last -= 2 * kv  # of a sum of the own node, which is not made yet
    return max(earlier, last) + 2 * kv * sums - (query + kv)


def _sums_in_flight(ranks: int) -> int:
    """Count sums of gradients beside the computed one: own, arriving, leaving; of two ranks the last two are one."""
    return min(ranks, 3) if ranks > 1 else 0
