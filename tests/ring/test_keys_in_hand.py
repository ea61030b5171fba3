"""How many sets of keys a rank keeps at a time: what travels is let go of before the next set arrives."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.config import SCHEDULES
from megatron_mtraining.layout import shard_sequence
from megatron_mtraining.ring import ring as ring_module
from megatron_mtraining.testing.simulator import RankSimulator, ThreadTransport

from .cases import layout_of, on_schedule, random_problem

_OF_RANK = threading.local()


class CountingBackend:
    """The reference backend; notes, before each operation on keys, how many sets that were sent still exist."""

    name = "counting"

    def __getattr__(self, operation: str) -> Any:
        function = getattr(ReferenceBackend(), operation)

        def call(*arguments: Any, **options: Any) -> Any:
            if options.get("packed") is not None:
                own = _OF_RANK.key.data_ptr()
                _OF_RANK.alive += (
                    ["own keys"]
                    if own in [each.data_ptr() for each in arguments[:4] if isinstance(each, torch.Tensor)]
                    else []
                )
            elif operation in ("forward", "backward"):
                _OF_RANK.alive.append(sum(storage() is not None for storage in _OF_RANK.sent))
            return function(*arguments, **options)

        return call


@pytest.fixture
def run_counted(monkeypatch):
    """Runs forward and backward on every rank; gives each rank's counts."""
    exchange = ThreadTransport.exchange

    def noting_exchange(transport: ThreadTransport, tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.bfloat16:  # keys and values; gradients travel in float32
            _OF_RANK.sent.append(weakref.ref(tensor.untyped_storage()))
        return exchange(transport, tensor)

    monkeypatch.setattr(ring_module, "resolve_backend", lambda *_, **__: CountingBackend())
    monkeypatch.setattr(ThreadTransport, "exchange", noting_exchange)

    def run(schedule: str, *, cp_size: int, inner_size: int) -> list[list[Any]]:
        problem = random_problem(cp_size * 8, block_size=4, heads=(2, 1))
        layout = layout_of(problem, "striped", cp_size)

        def body(group: ThreadTransport) -> list[Any]:
            shards = [shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:3]]
            inputs = [shard.bfloat16().requires_grad_() for shard in shards]
            _OF_RANK.sent, _OF_RANK.alive, _OF_RANK.key = [], [], inputs[1]
            options = {"index": problem.index, "layout": layout, "groups": group.ring_groups(inner_size)}
            config = on_schedule(schedule, problem.index)
            sparse_attention(*inputs, config, **options).out.sum().backward()
            return _OF_RANK.alive

        return RankSimulator(cp_size).run(body)

    return run


@pytest.mark.parametrize(("schedule", "cp_size", "inner_size"), [("flat", 5, 5), ("hierarchical", 6, 3)])
def test_one_set_of_keys_is_in_hand(run_counted, schedule, cp_size, inner_size):
    for counts in run_counted(schedule, cp_size=cp_size, inner_size=inner_size):
        assert len(counts) == 2 * (cp_size - 1)
        assert max(counts) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_alone_computes_on_its_own_keys(run_counted, schedule):
    assert run_counted(schedule, cp_size=1, inner_size=1) == [["own keys", "own keys"]]
