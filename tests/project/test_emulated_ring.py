"""A rank of a large ring that few ranks emulate: its operations on the shapes that the ring has, and as many bytes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_mtraining.commands.stopwatch import Stopwatch
from megatron_mtraining.commands.trace import phases
from megatron_mtraining.commands.trace.emulated_ring import EmulatedTransport, groups_of_large_ring
from megatron_mtraining.commands.trace.layer import Layer, Options
from megatron_mtraining.commands.trace.layer_run import parsed
from megatron_mtraining.commands.trace.phases import PHASES, Phase, measure_phases, table
from megatron_mtraining.config import SCHEDULES
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import RingGroups, Transport

RANKS, INNER, PRESENT = 8, 4, 2
GROUPS = [field.name for field in fields(RingGroups)]


class Call(NamedTuple):
    """What a rank called."""

    group: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WritingTransport:
    """Writes down every call on a transport."""

    def __init__(self, name, transport, calls):
        self.rank, self.size, self.global_ranks = transport.rank, transport.size, transport.global_ranks
        self.name, self.transport, self.calls = name, transport, calls

    def check_device(self, device):
        self.transport.check_device(device)


def _writing(operation):
    def call(self, tensor, **options):
        self.calls.append(Call(self.name, operation, tuple(tensor.shape), tensor.dtype))
        return getattr(self.transport, operation)(tensor, **options)

    return call


for name in vars(Transport):
    if not name.startswith("_") and name not in vars(WritingTransport):
        setattr(WritingTransport, name, _writing(name))


def layer_of(schedule, ring, *, emulated):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "max_vertical": 32, "max_slash": 8, "seq_len": 4608}
    slot = {"ranks": PRESENT if emulated else RANKS, "as_part_of": RANKS if emulated else 0, "inner_size": INNER}
    options = Options(**sizes, **slot, layout="striped", schedule=schedule, steps=0, out=Path())
    return Layer(options, ring, torch.device("cpu"))


def true_groups(cp):
    return cp.ring_groups(INNER)


def present_groups(cp):
    return RingGroups(**{name: cp.split([range(cp.size)]) for name in GROUPS})


def calls_of_a_step(schedule, num_ranks, groups_of, *, emulated):
    """By rank: what it calls in a step, all groups together."""

    def rank_of(cp):
        torch.manual_seed(cp.rank)
        calls = []
        groups = groups_of(cp)
        ring = RingGroups(**{name: WritingTransport(name, getattr(groups, name), calls) for name in GROUPS})
        layer_of(schedule, ring, emulated=emulated).step()
        return calls

    return RankSimulator(num_ranks).run(rank_of)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_emulated_rank_calls_what_a_rank_of_the_ring_calls(schedule):
    def emulated(cp):
        return groups_of_large_ring(present_groups(cp), size=RANKS, inner_size=INNER)

    assert (
        calls_of_a_step(schedule, PRESENT, emulated, emulated=True)
        == calls_of_a_step(schedule, RANKS, true_groups, emulated=False)[:PRESENT]
    )


@pytest.mark.parametrize("present", [1, 2, 4])
def test_gives_what_the_ring_gives_and_sends_as_much(present):
    entry, entries = torch.arange(6.0).view(2, 3), torch.arange(48.0).view(8, 2, 3)

    def rank_of(cp):
        calls = []
        ring = EmulatedTransport(WritingTransport("present", cp, calls), rank=cp.rank, global_ranks=tuple(range(8)))
        shapes = {
            "exchange": ring.exchange(entry).wait().shape,
            "all_gather": ring.all_gather(entry).shape,
            "post_all_gather": ring.post_all_gather(entry).wait().shape,
            "all_to_all": ring.all_to_all(entries).shape,
            "post_reduce_scatter": ring.post_reduce_scatter(entries).wait().shape,
        }
        sent = {call.operation: call.shape for call in calls}
        return {name: tuple(shape) for name, shape in shapes.items()}, sent

    for shapes, sent in RankSimulator(present).run(rank_of):
        whole = dict.fromkeys(("all_gather", "post_all_gather", "all_to_all"), (8, 2, 3))
        assert shapes == whole | dict.fromkeys(("exchange", "post_reduce_scatter"), (2, 3))
        assert sent["exchange"] == (2, 3)
        if present > 1:
            parts = -(-7 // (present - 1))  # to each of the others, all of them at least what a rank of 8 sends
            assert sent["post_all_gather"] == (parts, 2, 3)
            assert sent["post_reduce_scatter"] == (present, parts, 2, 3)


def test_what_few_ranks_cannot_emulate_is_one_sentence():
    def rank_of(cp, **ring):
        return groups_of_large_ring(present_groups(cp), **ring)

    with pytest.raises(ValueError, match=r"inner_size must be a divisor of the 8 ranks of the ring, got 3\."):
        RankSimulator(2).run(lambda cp: rank_of(cp, size=8, inner_size=3))
    with pytest.raises(ValueError, match=r"the number of ranks present must be a divisor of a group's 9, got 2\."):
        RankSimulator(2).run(lambda cp: rank_of(cp, size=9, inner_size=3))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--ranks 4 --as-part-of 32 --inner-size 6",
            r"inner_size must be a divisor of the 32 ranks of the ring, got 6\.",
        ),
        ("--ranks 4 --as-part-of 2", r"the number of ranks present must be a divisor of a group's 2, got 4\."),
        ("--ranks 2 --as-part-of 8 7", r"the number of ranks present must be a divisor of a group's 7, got 2\."),
        ("--ranks 2 --as-part-of -8", r"--as-part-of must be ranks of a ring, or 0, got -8\."),
        ("--ranks 4 --inner-size 3", r"inner_size must be a divisor of the 4 ranks of the ring, got 3\."),
        ("--ranks 2 --seq-len 100", r"seq_len must be a multiple of 128 .* got 100\."),
    ],
)
def test_a_trace_that_cannot_be_is_one_sentence_before_ranks_start(capsys, monkeypatch, words, sentence):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(SystemExit):
        parsed(words.split())
    assert re.search(f"error: {sentence}", capsys.readouterr().err)


def test_phases_are_those_of_a_step(monkeypatch):
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr(phases, "REPEATS", 2)

    def rank_of(cp):
        ring = groups_of_large_ring(present_groups(cp), size=RANKS, inner_size=INNER)
        return measure_phases(layer_of("gather", ring, emulated=True), Stopwatch(torch.device("cpu")))

    (found,) = RankSimulator(1).run(rank_of)
    assert list(found) == [*PHASES, "step"]
    assert all(phase.host_ms > 0 and phase.gpu_ms > 0 and phase.free_ms > 0 for phase in found.values())
    assert found["step"].host_ms == pytest.approx(sum(found[name].host_ms for name in PHASES))


def test_the_slower_of_host_and_gpu():
    waiting = Phase(host_ms=16, gpu_ms=4, exposed_ms=1, free_ms=16)
    busy = Phase(host_ms=2, gpu_ms=4, exposed_ms=0, free_ms=4)
    assert (waiting.slower, waiting.idle_share, busy.slower, busy.idle_share) == ("host", 0.75, "GPU", 0)
    assert "75.0%  host" in "\n".join(table({"forward": waiting}))
