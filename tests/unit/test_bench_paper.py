"""The paper's comparison on two ranks of a CPU; what it makes of measured steps, and what it refuses."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.commands.stopwatch import Stopwatch
from megatron_mtraining.errors import RankMismatchError
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import backward_flops, forward_flops, rank_pairs, work_of_pairs
from megatron_mtraining.ring import RingShape
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.types import VerticalSlashIndex
from tests.forkserver import fork_server
from tools.bench.paper import rank, report
from tools.bench.paper.balance import Balance, balances
from tools.bench.paper.calibration import Calibration
from tools.bench.paper.dry_run import DryRun
from tools.bench.paper.layer import ParallelState, RingLayer, whole_inputs
from tools.bench.paper.methods import METHODS, chosen
from tools.bench.paper.step_clock import CallTimes
from tools.bench.paper.suite import first_error
from tools.bench.problem import Problem
from tools.bench.run import main

SIZES = "--device cpu --gpus 2 --seqs 1024 --heads 2 --kv-heads 1 --head-dim 16 --repeats 1 --simulated-seq 16384"
PROBLEM = Problem(
    seq_len=512, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
)
CALIBRATION = Calibration(
    slash_pairs=4e6,
    vertical_pairs=1e6,
    slash_forward_ms=5.0,
    forward_ms=6.0,
    slash_backward_ms=13.0,
    backward_ms=16.0,
    empty_forward_ms=1.0,
    empty_backward_ms=3.0,
    beside_forward_ms=0.25,
    beside_backward_ms=0.5,
    exchange_ms=1.5,
    exchange_bytes=10**8,
    small_exchange_ms=0.5,
    sm_mhz=None,
)


def test_two_ranks_of_a_cpu(tmp_path, capsys):
    """Once through: checked, timed, replayed, written. Methods that are not there are named."""
    fork_server()  # else the suite would start one, and it would be the only one, without the modules of other tests
    names = "mtraining,XAttention,dense,TransformerEngine p2p"
    status = main([*f"--suite paper {SIZES} --no-figures --output {tmp_path}".split(), "--methods", names])
    written, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "README.md").read_text()
    assert status == 0
    assert [row["method"] for row in written["rows"]] == ["mtraining", "XAttention", "dense"]
    assert all(row["total_ms"] > 0 for row in written["rows"])
    inputs = whole_inputs(replace(PROBLEM, seq_len=1024))
    for row, method in zip(written["rows"], chosen("mtraining,XAttention,dense"), strict=True):
        index = select(inputs.query, inputs.key, method.config)
        assert row["density"] == pytest.approx(float(allowed_mask(index, seq_len=1024).sum()) / (1024 * 1025))
        assert 0 < row["density"] < 1 or method.name == "dense"
        assert row["density"] < row["recall"] < 1 or row["recall"] == pytest.approx(1, abs=1e-5)
    assert "--seqs 1024" in written["command"] and str(tmp_path) not in written["command"]
    assert written["absent"][0]["method"] == "TransformerEngine p2p" and "PyPI" in page
    forward, backward = written["balance"]
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    for each in written["balance"]:
        steps = torch.tensor(each["measured_steps"])
        assert steps.shape == (2, 2) == torch.tensor(each["predicted_steps"]).shape
        assert bool((steps > 0).all())
    assert [row["method"] for row in written["simulated"]][:2] == ["mtraining", "node_striped"]
    out = capsys.readouterr().out
    assert "Worst rank:" in out and "| XAttention" in out and "Simulated: 32 ranks" in page


def test_an_error_of_one_rank_is_reported_where_the_others_never_received_it(tmp_path, monkeypatch):
    sizes = {"seq_lens": (512,), "methods": "all", "world_size": 2, "node_size": 2, "repeats": 1, "longest_s": 1.0}
    parallel = ParallelState(rank=1, world_size=2, node_size=2, device=torch.device("cpu"), groups={})
    session = rank._Session(
        rank.Assignment(problem=PROBLEM, deadline=time.time() + 60, folder=tmp_path, **sizes), parallel
    )
    monkeypatch.setattr(rank.dist, "all_reduce", lambda tensor: None)

    def attempt(others: object) -> None:
        def gather(errors, error):
            assert first_error(tmp_path)[0]["why"] == "Rank 1: MemoryError: 64 GiB"
            errors[:] = [rank._Failure.of(RankMismatchError("rank 1 raised")), error]
            if others is not None:
                raise others

        def body():
            raise MemoryError("64 GiB")

        monkeypatch.setattr(rank.dist, "all_gather_object", gather)
        session._attempt("mtraining", 512, body)

    attempt(None)
    assert first_error(tmp_path) == [], "all ranks know it, and the first one reports it"
    assert session._absent.pop()["why"] == "Rank 1: MemoryError: 64 GiB"
    with pytest.raises(TimeoutError):
        attempt(TimeoutError())
    assert first_error(tmp_path) == [
        {"ranks": 2, "seq": 512, "method": "mtraining", "why": "Rank 1: MemoryError: 64 GiB", "failed": True}
    ]


def test_errors_of_all_ranks_skip_a_method_and_the_rest_continues(tmp_path, monkeypatch):
    """Inputs that do not fit skip a length, a method that does not fit skips itself."""
    sizes = {"seq_lens": (512, 1024), "methods": "all", "world_size": 2, "node_size": 2, "repeats": 1, "longest_s": 1.0}
    parallel = ParallelState(rank=0, world_size=2, node_size=2, device=torch.device("cpu"), groups={})
    session = rank._Session(
        rank.Assignment(problem=PROBLEM, deadline=time.time() + 60, folder=tmp_path, **sizes), parallel
    )
    monkeypatch.setattr(rank.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(session, "_is_right", lambda method: True)

    def gather(errors, error):
        errors[:] = [error] * 2

    def inputs(problem):
        if problem.seq_len == 512:
            raise MemoryError("inputs")

    def measure(method, problem, whole):
        if method.name == "MoBA":
            raise ValueError("a rule\nand more")
        session._rows.append(method.name)

    monkeypatch.setattr(rank.dist, "all_gather_object", gather)
    monkeypatch.setattr(rank, "whole_inputs", inputs)
    monkeypatch.setattr(session, "_measure", measure)
    session.run()
    written = json.loads((tmp_path / rank.RESULTS).read_text())
    assert written["rows"] == [method.name for method in METHODS if method.name != "MoBA"]
    named = [(each["method"], each["seq"], each["why"], each["failed"]) for each in written["absent"]]
    assert named == [
        ("every method", 512, "MemoryError: inputs", True),
        ("MoBA", 1024, "ValueError: a rule", True),
    ]


TRANSFERS = {
    "hierarchical": {"forward": [2.0, 0.0, 1.0, 0.0], "backward": [2.0, 1.0, 2.0, 1.0]},
    "flat": {"forward": [1.0, 1.0, 1.0, 0.0], "backward": [1.0, 2.0, 2.0, 1.0]},
}
"""Of as many bytes as a rank's keys have, beside each step: two nodes of two ranks."""


def of_a_perfect_machine(tmp_path, method: str):
    """Steps that last as long as the calibration says of their pairs, and what the tool makes of them."""
    config = next(each.config for each in METHODS if each.name == method)
    columns, distances = [0, 1, 70, 300], [0, 1, 3, 6]
    index = VerticalSlashIndex.from_lists([[columns] * 2], [[distances] * 2], seq_len=512, block_size=64)
    torch.save((*index.tensors, 64), tmp_path / "4x512.pt")
    layout = SequenceLayout(config.layout, seq_len=512, cp_size=4, node_size=2)
    ring = RingShape(kind=config.schedule, cp_size=4, node_size=2)
    work = work_of_pairs(*rank_pairs(index, layout), ring.source_ranks())
    steps = {}
    # Keys travel beside these steps, and in a backward, where they are float32 as the keys are, gradients.
    transfers = TRANSFERS[config.schedule]
    for direction, seconds_per_slash, seconds_per_vertical, empty, beside in (
        ("forward", 4e-3 / 4e6, 1e-3 / 1e6, 1e-3, 0.25e-3 * torch.tensor(transfers["forward"])),
        ("backward", 10e-3 / 4e6, 3e-3 / 1e6, 3e-3, 0.5e-3 * torch.tensor(transfers["backward"])),
    ):
        order = ring.schedule.backward_order if direction == "backward" else range(ring.num_steps)
        seconds = work.slash.double()[:, list(order)] * seconds_per_slash + empty + beside
        seconds[:, 0] += work.vertical.double() * seconds_per_vertical
        steps[direction] = (1e3 * seconds).tolist()
    row = {"ranks": 4, "seq": 512, "method": method, "steps": steps, "index": "4x512.pt", "sm_mhz": 1500.0}
    row |= {"calls": {"forward": 10.0, "backward": 20.0}, "calibration": asdict(CALIBRATION)}
    results = {"node_size": 2, "rows": [row]}
    return list(balances(results, PROBLEM, tmp_path)), work


@pytest.mark.parametrize("method", ["mtraining", "w/ ZigZag", "w/o hierarchical", "node_striped"])
def test_a_machine_that_does_what_was_calibrated_is_predicted(tmp_path, method):
    found, work = of_a_perfect_machine(tmp_path, method)
    assert [each.direction for each in found] == ["forward", "backward"]
    for each in found:
        assert each.rank_error < 1e-6 and each.step_error < 1e-6
        measured, predicted = each.lockstep_imbalance
        assert measured == pytest.approx(predicted)
        assert each.pair_lockstep_imbalance == work.step_imbalance
        compute_ms = max(sum(steps) for steps in each.measured_steps)
        hidden = method == "w/o hierarchical" and each.direction == "backward"  # all of them, under a step or its dQ
        assert hidden or each.predicted_ms > compute_ms, "transfers and waits come on top"
        assert each.predicted_ms >= (1 - 1e-6) * compute_ms
        assert each.sm_mhz == (1500.0, None) and each.beside_ms > 0


def test_errors_and_imbalance_by_hand():
    balance = Balance(
        ranks=2,
        seq=512,
        method="mtraining",
        direction="forward",
        measured_steps=[[2.0, 1.0], [1.0, 2.0]],
        predicted_steps=[[2.0, 1.0], [1.0, 1.0]],
        measured_ms=4.0,
        predicted_ms=3.0,
        pair_worker_imbalance=1.0,
        pair_lockstep_imbalance=1.0,
        beside_ms=0.0,
        sm_mhz=(1410.0, None),
    )
    assert balance.worker_imbalance == (1.0, pytest.approx(1.2))
    assert balance.lockstep_imbalance == (pytest.approx(4 / 3), pytest.approx(1.2))
    assert balance.rank_error == pytest.approx(1 / 3) and balance.step_error == pytest.approx(1 / 1.5)
    assert balance.time_error == -0.25
    (line,) = [line for line in report._balance([balance.numbers()]) if line.startswith("Worst rank")]
    assert "33.3%" in line and "not within the 10%" in line


def test_rates_of_a_calibration():
    forward, backward = (CALIBRATION.profile(name, head_dim=64) for name in ("forward", "backward"))
    assert forward.slash_forward_tflops == pytest.approx(forward_flops(4e6, head_dim=64) / 4e-3 / 1e12)
    assert backward.vertical_backward_tflops == pytest.approx(backward_flops(1e6, head_dim=64) / 3e-3 / 1e12)
    assert (forward.gpu_forward_step_us, backward.gpu_backward_step_us) == (1000.0, 3000.0)
    assert forward.inner_gb_s == forward.outer_gb_s == pytest.approx(100.0)
    hidden = replace(CALIBRATION, forward_ms=5.0).profile("forward", head_dim=64)  # verticals took no time to be seen
    assert hidden.vertical_forward_tflops == pytest.approx(4 * hidden.slash_forward_tflops)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("speed", "--suite must be paper, before any other flag, got speed."),
        ("paper --gpus 2,x", "--gpus must be comma-separated whole numbers, got '2,x'."),
        ("paper --gpus 4 --node 3", "--node must be a divisor of 4 ranks, got 3."),
        ("paper --limit-s nan", "--limit-s must be a number of seconds above 0, got nan."),
        ("paper --methods flash", "--methods must be all, or some of mtraining, w/ ZigZag"),
        ("paper --gpus 2,3 --seqs 384", "--seqs must be multiples of 768 from 256 on for 2 and 3 ranks, got 384."),
        (
            "paper --gpus 2 --simulated-seq 1000",
            "--simulated-seq must be a multiple of the 4096 tokens that were recorded, got 1000.",
        ),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    words = arguments.split()
    with pytest.raises(SystemExit) as refusal:
        main(["--suite", *words, *(["--device", "cpu"] if words[0] == "paper" else [])])
    assert str(refusal.value).startswith(sentence) and "\n" not in str(refusal.value)


def test_a_dry_run_does_what_a_ring_does_on_own_keys(monkeypatch):
    """One rank that emulates two: two steps, a transfer beside the first if asked for; an empty step adds nothing."""
    parallel = ParallelState(rank=0, world_size=2, node_size=2, device=torch.device("cpu"), groups={})
    transport = SimpleNamespace(assemble=lambda pack: pack, exchange=lambda keys: sent.append(keys.shape) or Arrived())
    monkeypatch.setattr(
        ParallelState, "transports", lambda self, schedule: SimpleNamespace(cp=transport, inner=transport)
    )
    monkeypatch.setattr(rank.dist, "barrier", lambda: None)
    sent: list[torch.Size] = []
    layer = RingLayer(METHODS[0], PROBLEM, whole_inputs(PROBLEM), parallel)
    index = VerticalSlashIndex.from_lists([[[0, 1, 70, 300]] * 2], [[[0, 1, 3, 6]] * 2], seq_len=512, block_size=64)
    dry_run = DryRun(layer, index, parallel, Stopwatch(parallel.device))
    alone, beside = dry_run.call(beside=False), dry_run.call(beside=True)
    assert sent == [(2, 1, 256, 1, 16)] * 2
    assert all(len(call.steps[name]) == 2 for call in (alone, beside) for name in call.steps)
    assert all(call.whole[name] >= sum(call.steps[name]) > 0 for call in (alone, beside) for name in call.steps)
    before, after = (dry_run.empty_step("forward")() for _ in range(2))
    assert torch.equal(before.out, after.out) and torch.equal(before.lse, after.lse)
    grad_query, grad_keys, _ = dry_run.empty_step("backward")()
    assert not grad_query.any() and not grad_keys.any()
    assert CallTimes.median([alone, alone, beside]) == alone


class Arrived:
    """A transfer that is done."""

    def wait(self) -> None:
        """Nothing to wait for."""
