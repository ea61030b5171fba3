"""The bench on a CPU: it checks before it times, gives a wrong baseline no speed, and stamps what it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from tools.bench.clock import BATCH_CALLS, FEWEST_CALLS, WARM_UP_CALLS, Sample, Timing, interleaved, storage_bytes
from tools.bench.problem import Problem
from tools.bench.registry import REGISTRY, Baseline
from tools.bench.report import default_path
from tools.bench.run import main

SIZES = "--device cpu --seq 192 --heads 4 --kv-heads 2 --head-dim 16 --dtype fp32 --repeats 2"
LISTS = "--distances 2 --local 1 --verticals 24 --sinks 4"


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command line and returns the exit status, what was printed and what was written."""

    def run(arguments: str = "") -> tuple[int, str, dict]:
        path = tmp_path / "result.json"
        status = main([*f"{SIZES} {LISTS} {arguments}".split(), "--output", str(path)])
        return status, capsys.readouterr().out, json.loads(path.read_text())

    return run


def table(text: str, operation: str) -> dict[str, dict[str, float]]:
    """Numbers by baseline and column of the first table of ``operation``."""
    block = re.search(rf"^{operation} .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)[0].splitlines()
    columns = re.split(r"\s{2,}", block[0])[1:]
    cells = {line.split()[0]: line.split()[1:] for line in block[1:]}
    return {name: dict(zip(columns, map(float, row), strict=False)) for name, row in cells.items()}


def wrong_by(change) -> Baseline:
    """The reference, with ``change`` made to its output."""
    right = REGISTRY["mtraining-reference"]

    def bind(problem, inputs, index):
        bound = right.bind(problem, inputs, index)
        return replace(bound, attend=lambda *leaves: change(bound.attend(*leaves)))

    return replace(right, name="wrong", bind=bind)


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is one thousandth too large."""

    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * 1.001


def drop_one_row(out: torch.Tensor) -> torch.Tensor:
    """Zeros where the last query's result should be, in long problems only: gradients are checked on short ones."""
    factor = torch.ones(out.shape[1], 1, 1, dtype=out.dtype)
    factor[-1] = 0.0 if out.shape[1] > 256 else 1.0
    return out * factor


@pytest.mark.parametrize("arguments", ["", "--index-sharing kv_group"])
def test_every_operation_has_its_table(bench, arguments):
    status, text, written = bench(arguments)
    assert status == 0
    forward, backward = table(text, "forward"), table(text, "backward")
    assert set(forward) == set(backward) == {"mtraining-reference", "flash-attention-2"}
    assert set(table(text, "selection")) == {"torch"}
    assert set(table(text, "packing")) == {"torch"}
    for rows in (forward, backward):
        ours, dense = rows["mtraining-reference"], rows["flash-attention-2"]
        assert dense["density %"] == 100 and 0 < ours["density %"] < 100
        assert ours["efficiency"] == pytest.approx(dense["ms"] * ours["density %"] / 100 / ours["ms"], abs=0.011)
    assert "cudnn: not measured. It needs a GPU." in text
    assert written["cases"][0]["rows"]["forward"][0]["extra_mib"] is None and "MiB" not in text.split("\nms:")[0]


@pytest.mark.parametrize("index_sharing", ["head", "kv_group"])
def test_useful_flops_count_the_computed_pairs(bench, index_sharing):
    """Every distance, no verticals: 192 * 193 / 2 pairs for each of 4 heads, whoever shares a list."""
    every_distance = f"--distances 3 --local 3 --verticals 0 --sinks 0 --index-sharing {index_sharing}"
    _, _, written = bench(f"{every_distance} --baselines mtraining-reference --op forward")
    (case,) = written["cases"]
    (row,) = case["rows"]["forward"]
    assert case["density"] == 1.0
    assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(4 * 16 * 4 * 192 * 193 // 2)


def test_the_file_is_stamped(bench):
    _, _, written = bench("--op packing --commit abc123")
    assert written["commit"] == "abc123" and written["torch"] == torch.__version__
    assert written["gpu"] is None and written["repeats"] == 2
    assert written["command"].startswith("python -m tools.bench.run --device cpu --seq 192")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\+00:00", written["date"])
    assert written["problem"]["dtype"] == "fp32" and written["problem"]["num_kv_heads"] == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out * 1.001, r"out: .* error .* is over its budget"),
        (WrongGradient.apply, r"grad_\w+: .* error .* is over its budget"),
        (drop_one_row, r"out: largest error .* is over its budget"),
        (lambda out: out.masked_fill(out > 1.0, torch.nan), r"out has \d+ values that are NaN"),
        (lambda out: out.transpose(1, 2), r"out must have shape|RuntimeError"),
    ],
    ids=["value", "gradient", "one row of a long problem", "nan", "shape"],
)
def test_a_wrong_baseline_gets_no_speed(bench, monkeypatch, change, reason):
    monkeypatch.setitem(REGISTRY, "wrong", wrong_by(change))
    status, text, written = bench("--seq 320 --op forward --baselines wrong,mtraining-reference")
    assert status == 1
    assert set(table(text, "forward")) == {"mtraining-reference"}
    assert re.search(rf"^wrong: FAILED its check, no speed is given\. .*({reason})", text, re.MULTILINE)
    (case,) = written["cases"]
    assert [row["baseline"] for row in case["rows"]["forward"]] == ["mtraining-reference"]
    assert list(case["failed"]) == ["wrong"]


def test_a_baseline_that_raises_is_reported_with_its_error(bench, monkeypatch):
    def fail(problem, inputs, index):
        raise RuntimeError("no kernel for this shape\nand more")

    monkeypatch.setitem(REGISTRY, "failing", replace(REGISTRY["mtraining-reference"], name="failing", bind=fail))
    status, text, _ = bench("--op backward --baselines failing")
    assert status == 1
    assert "failing: FAILED its check, no speed is given. RuntimeError: no kernel for this shape\n" in text


def test_a_wrong_selection_and_a_wrong_packing_get_no_speed(bench, monkeypatch):
    from tools.bench import routines

    def other_selection(query, key, config, **options):
        index = select(query, key, config, **options)
        if query.dtype != torch.float64:
            index.vertical[0, 0, 0] += 1
        return index

    select = routines.select
    monkeypatch.setattr(routines, "select", other_selection)
    pack = routines.ReferenceBackend.pack
    monkeypatch.setattr(routines.ReferenceBackend, "pack", lambda *given: tuple(2 * rows for rows in pack(*given)))
    status, text, _ = bench("--baselines mtraining-reference")
    assert status == 1
    assert "selection torch: FAILED its check, no speed is given. index.vertical has 1 entries other" in text
    assert "packing torch: FAILED its check, no speed is given. packed key of list 0 must be the rows" in text


def test_a_selection_by_cost_on_a_planted_layer(bench):
    rows = "--num-probe-rows 64 --num-probe-windows 8"
    status, _, written = bench(f"--op selection --seq 1024 --index planted --budget cost {rows} --max-density 0.5")
    (case,) = written["cases"]
    assert status == 0 and "64 probe rows by cost" in case["label"] and 0.1 < case["density"] <= 0.5


def test_lists_chosen_on_a_planted_layer_have_longer_runs_where_asked(bench):
    lists = "--seq 1024 --distances 7 --local 1 --verticals 24 --sinks 4"
    _, _, written = bench(f"{lists} --op packing --index planted --slash-run-lengths 1,3")
    one, three = written["cases"]
    runs = [float(re.search(r"(\d+\.\d) runs of distances", case["label"])[1]) for case in (one, three)]
    assert one["distances"] == three["distances"] == 7 and one["verticals"] == three["verticals"] == 24
    assert runs[0] > runs[1] <= 3


def test_densities_give_a_case_each(bench):
    _, text, written = bench("--seq 1280 --densities 30,45 --op packing")
    densities = [case["density"] for case in written["cases"]]
    assert densities == pytest.approx([0.3, 0.45], abs=0.06)
    assert densities[0] <= 0.3 and densities[1] <= 0.45
    assert text.count("% wanted") == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--heads 3", "--heads must be a multiple of --kv-heads 2, got 3."),
        ("--repeats 0", "--repeats must be at least 1, got 0."),
        ("--baselines cudnn,mine", "--baselines must be all, or some of mtraining-sm90, .*, got mine."),
        ("--distances 0", "--distances must be at least --local 1, got 0."),
        ("--verticals 150", r"--verticals must be fewer for runs of 1 to fit into 192, got 150\. Lower it, or "),
        ("--densities 1", r"--densities must be between \d+\.\d and \d+\.\d for runs of 1, got 1.0\. Change "),
        ("--rest-ms nan", "--rest-ms must be a number of milliseconds from 0 on, got nan."),
        ("--longest-s 0", "--longest-s must be a number of seconds above 0, got 0.0."),
        ("--seed -1", r"--seed must be from 0 to 2 \*\* 63 - 1, got -1."),
        ("--densities=", "--densities must be comma-separated numbers, got ''."),
        (
            "--index planted --densities 10",
            "--densities must be given with --index random or clustered, got --index planted.",
        ),
        ("--index planted --batch 2", "--batch must be 1 with --index planted, got 2."),
        ("--slash-run-lengths 2", "--slash-run-lengths must be 1 unless --index is planted, by top_p, got 2."),
        (
            "--index planted --slash-run-lengths 0",
            "--slash-run-lengths must be at least 1 and at most [0-9]+, --distances less --local, got 0.",
        ),
        ("--index planted --seq 128", "--seq must be at least 130 with --index planted, got 128."),
        (
            "--index nothing.json",
            "--index must be random, clustered, planted or a file made by tools.bench.record, got nothing",
        ),
        ("--index tools/bench/data/tiny_gpt.json", "seq_len must be a multiple of the 4096 tokens that were recorded"),
    ],
)
def test_bad_input_is_one_sentence(bench, arguments, sentence):
    with pytest.raises(SystemExit, match=sentence):
        bench(arguments)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (".", "--output must be a file, got the folder ."),
        ("pyproject.toml/x.json", "--output must be a folder that can be written, got pyproject.toml: "),
    ],
)
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(path, sentence, monkeypatch):
    monkeypatch.setattr("tools.bench.run.measure_case", None)
    with pytest.raises(SystemExit, match=sentence):
        main(["--device", "cpu", "--repeats", "1", "--output", path])


def test_few_repeats_on_a_gpu_are_refused(bench):
    with pytest.raises(SystemExit, match="--repeats must be at least 20 on a GPU, got 2."):
        bench("--device cuda")


def test_calls_are_interleaved():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = interleaved(calls, device=torch.device("cpu"), timing=Timing(repeats=43))
    warm_up, timed = order[: 2 * WARM_UP_CALLS], order[2 * WARM_UP_CALLS :]
    assert warm_up == ["a"] * WARM_UP_CALLS + ["b"] * WARM_UP_CALLS
    assert {name: len(times) for name, times in samples.items()} == {"a": 43, "b": 43}
    rounds = ["".join(timed[i : i + 2 * BATCH_CALLS]) for i in range(0, len(timed), 2 * BATCH_CALLS)]
    batches = ("a" * BATCH_CALLS, "b" * BATCH_CALLS)
    assert set(rounds[:-1]) == {batches[0] + batches[1], batches[1] + batches[0]}
    assert sorted(rounds[-1]) == list("aaabbb")


class OnceBackward(torch.autograd.Function):
    """The identity, which forgets at its first backward what it would need for a second."""

    @staticmethod
    def forward(ctx, out):
        ctx.saved = [1.0]
        return out.clone()

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * ctx.saved.pop()


def test_a_backward_that_runs_once_for_each_forward_is_timed(bench, monkeypatch):
    right = REGISTRY["mtraining-reference"]

    def bind(problem, inputs, index):
        bound = right.bind(problem, inputs, index)
        return replace(bound, attend=lambda *leaves: OnceBackward.apply(bound.attend(*leaves)), retains_graph=False)

    monkeypatch.setitem(REGISTRY, "once", replace(right, name="once", bind=bind))
    status, text, _ = bench("--baselines once")
    assert status == 0, text
    assert "once" in table(text, "backward")


def test_long_calls_are_timed_less_often_where_asked():
    timing = Timing(repeats=20, longest_s=2.0)
    samples = [Sample(400.0, None)] * FEWEST_CALLS
    assert timing.is_enough(samples) and not timing.is_enough(samples[1:])
    assert not timing.is_enough([Sample(100.0, None)] * 19)
    assert not Timing(repeats=20).is_enough([Sample(400.0, None)] * 19)
    assert timing.is_enough([Sample(1.0, None)] * 20)


def test_results_are_named_theme_hardware_date():
    sizes = {"seq_len": 64, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    path = default_path(Problem(**sizes, dtype=torch.float32, device=torch.device("cpu")), "forward-random-64")
    assert path.parent.parts[-2:] == ("docs", "benchmarks")
    assert re.fullmatch(r"forward-random-64_cpu_\d{4}-\d\d-\d\d\.json", path.name)


def test_another_cudnn_than_torchs_costs_no_result(bench, monkeypatch):
    def refuse():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    status, _, written = bench("--op packing")
    assert (status, written["cudnn"]) == (0, None)


@pytest.mark.gpu
def test_kernels_and_dense_peers_on_a_gpu(bench):
    sizes = "--device cuda --seq 2048 --head-dim 64 --dtype bf16 --repeats 20 --distances 9 --verticals 200"
    status, text, written = bench(f"{sizes} --baselines mtraining-sm80,cudnn,flash-attention-2")
    (case,) = written["cases"]
    assert status == 0, text
    assert {row["baseline"] for row in case["rows"]["backward"]} >= {"cudnn", "flash-attention-2"}
    assert all(row["extra_mib"] >= 0 for rows in case["rows"].values() for row in rows)
    assert written["gpu"] and written["driver"]


def test_a_shared_storage_counts_once():
    grad_query, grad_keys = torch.zeros(6), torch.zeros(2, 5)
    assert storage_bytes((grad_query, *grad_keys)) == 4 * (6 + 10)
