"""What the meter prints and writes is what was computed; Megatron's training loop needs only the functions it names."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
from typing import Any

import pytest
import torch

from megatron_mtraining.config import MTrainingConfig

from . import tiny_gpt
from .ranks import run_on_ranks

DENSE_FLOPS = 1e9
SECONDS = 0.5
HEADS, HEAD_DIM, LAYERS = 4, 8, 2
SCALE = 0.7
"""Of the softmax, the model's own."""


class Recorded:
    """A stand-in for ``megatron.training.training``: the loop's functions, and what reached the log."""

    def __init__(self, log_interval: int, tp_size: int = 1) -> None:
        self.lines: list[str] = []
        self.scalars: list[tuple[str, float, int]] = []
        self.to_wandb: list[tuple[str, float, int]] = []
        args = types.SimpleNamespace(log_interval=log_interval, world_size=2, tp_size=tp_size)
        module = types.ModuleType("megatron.training.training")
        module.get_args = lambda: args
        module.get_timers = lambda: lambda name: types.SimpleNamespace(elapsed=self.elapsed)
        module.print_rank_last = self.lines.append
        module.get_tensorboard_writer = lambda: types.SimpleNamespace(
            add_scalar=lambda *entry: self.scalars.append(entry)
        )
        module.get_wandb_writer = lambda: types.SimpleNamespace(log=self.log_to_wandb)
        module.num_floating_point_operations = num_floating_point_operations
        module.training_log = training_log
        self.module = module
        self.args = args
        package = types.ModuleType("megatron.training")
        package.training = module
        sys.modules.update({"megatron.training": package, "megatron.training.training": module})

    def log_to_wandb(self, scalars: dict[str, float], step: int) -> None:
        """What Weights & Biases is given, as TensorBoard is."""
        self.to_wandb += [(name, value, step) for name, value in scalars.items()]

    def elapsed(self, *, reset: bool, barrier: bool) -> float:
        """Of the steps since Megatron's last line."""
        assert not reset and barrier
        return SECONDS * self.steps


def num_floating_point_operations(args: Any, batch_size: int, seqlen_squared_sum_in_batch: Any = None) -> float:
    return DENSE_FLOPS


def training_log(loss: Any, iteration: int, is_first_iteration: bool = False) -> bool:
    training = sys.modules["megatron.training.training"]
    training.num_floating_point_operations(training.get_args(), 1)
    return True


def metered_steps(
    config: MTrainingConfig,
    cp_size: int,
    tp_size: int = 1,
    log_interval: int = 2,
    steps: int = 4,
    recompute: bool = False,
    sample_steps: int = 1,
) -> tuple[list[str], list[tuple[str, float, int]], dict[int, Any]]:
    """Trains the tiny model; what was printed, written, and the last index of each layer."""
    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining.megatron import meter
    from megatron_mtraining.megatron.meter import RECALL_ROWS
    from megatron_mtraining.megatron.runtime import process
    from megatron_mtraining.metrics import attention_recall, held_out_rows

    recorded = Recorded(log_interval, tp_size=tp_size)
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with tiny_gpt.parallel_job(config, cp_size=cp_size, tp_size=tp_size, inner_size=1) as runtime:
        meter.install()
        meter.install()
        meter.SAMPLE_STEPS = sample_steps
        try:
            model_config = tiny_gpt.transformer_config(softmax_scale=SCALE, **(options if recompute else {}))
            model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=model_config).train()
            recorded.steps = 0
            for iteration in range(1, steps + 1):
                with mtraining.record_attention(capture_query_key=True) as recorder:
                    tiny_gpt.mean_loss(model, tiny_gpt.batch(), config).backward()
                with torch.no_grad():  # an evaluation does not count
                    tiny_gpt.mean_loss(model, tiny_gpt.batch(seed=1), config)
                recorded.steps += 1
                recorded.module.training_log(None, iteration, is_first_iteration=iteration == 1)
                if iteration % log_interval == 0:
                    recorded.steps = 0
        finally:
            meter.uninstall()
        assert recorded.module.training_log is training_log
        assert process().observers == []
        assert recorded.to_wandb == recorded.scalars
        rows = held_out_rows(config, seq_len=tiny_gpt.SEQ_LEN, count=RECALL_ROWS)
        where = {"layout": recorder.layers[LAYERS].layout, "groups": runtime.cp_group}
        heads = {}
        for number, call in sorted(recorder.layers.items()):
            recall = attention_recall(call.query, call.key, call.index, rows=rows, softmax_scale=SCALE, **where)
            heads[number] = recall.mean(dim=(0, 2)).double()
        assert_recall(recorded, heads, steps)
    return recorded.lines, recorded.scalars, {number: call.index for number, call in recorder.layers.items()}


def assert_recall(recorded: Recorded, heads: dict[int, torch.Tensor], steps: int) -> None:
    """Of every layer and head: this rank's heads are the job's in a run without tensor parallelism."""
    got = scalars_at(recorded.scalars, steps)
    layers = torch.stack(list(heads.values()))
    if "recall" not in got or recorded.args.tp_size > 1:
        return
    assert got["recall"] == pytest.approx(float(layers.mean()), rel=1e-6)
    assert got["recall-worst-layer"] == pytest.approx(float(layers.mean(1).min()), rel=1e-6)
    assert got["recall-worst-head"] == pytest.approx(float(layers.min()), rel=1e-6)
    layer, head = divmod(int(layers.argmin()), layers.shape[1])
    assert f" in layer {layer + 1} head {head})" in recorded.lines[-1]


def scalars_at(scalars: list[tuple[str, float, int]], iteration: int) -> dict[str, float]:
    return {name.removeprefix("mtraining/"): value for name, value, at in scalars if at == iteration}


@pytest.mark.parametrize("recompute", [False, True])
def test_figures_are_those_of_the_indices(recompute):
    from megatron_mtraining.layout import SequenceLayout
    from megatron_mtraining.metrics import causal_pairs, computed_pairs, density, model_flops, ring_work
    from megatron_mtraining.ring import ring_schedule

    config = tiny_gpt.SPARSE
    (lines, scalars, indices), _ = run_on_ranks(metered_steps, 2, config=config, cp_size=2, recompute=recompute)
    assert [line.split("|")[0].split() for line in lines] == [["mtraining", "iteration", str(i)] for i in (1, 2, 4)]
    assert {at for _, _, at in scalars} == {2, 4}
    got = scalars_at(scalars, 4)

    seq_len = tiny_gpt.SEQ_LEN
    shares = torch.cat([density(index, seq_len=seq_len) for index in indices.values()])
    assert got["density"] == pytest.approx(float(shares.mean()))
    assert got["density-least"] == pytest.approx(float(shares.min()))
    assert got["density-most"] == pytest.approx(float(shares.max()))
    kept = sum(int(computed_pairs(index, seq_len=seq_len).sum()) for index in indices.values())
    causal = sum(int(causal_pairs(index, seq_len=seq_len).sum()) * HEADS for index in indices.values())
    saved = model_flops(causal - kept, head_dim=HEAD_DIM)
    to_tera = 1 / (SECONDS * 1e12 * 2)
    assert got["dense-equivalent-throughput"] == pytest.approx(DENSE_FLOPS * to_tera)
    assert got["executed-throughput"] == pytest.approx((DENSE_FLOPS - saved) * to_tera)

    sampled = indices[2]  # the second layer's turn
    assert "worker imbalance in layer 1:" in lines[1] and "worker imbalance in layer 2:" in lines[2]
    layout = SequenceLayout(config.layout, seq_len=seq_len, cp_size=2, block_size=config.block_size)
    sources = [ring_schedule(config.schedule, cp_rank=rank, cp_size=2, inner_size=1).source_ranks for rank in range(2)]
    work = ring_work(sampled, layout, sources)
    assert got["worker-imbalance"] == pytest.approx(work.worker_imbalance)
    assert got["step-imbalance"] == pytest.approx(work.step_imbalance)
    assert 0.0 < got["recall"] < 1.0
    assert got["exposed-communication-ms"] > 0.0
    assert f" of {1000 * SECONDS:.1f} (" in lines[2]


def test_block_lists_are_counted_by_every_rank():
    from megatron_mtraining.layout import SequenceLayout
    from megatron_mtraining.metrics import computed_pairs_of_lists, pairs_by_owner, work_of_pairs
    from megatron_mtraining.metrics.density import triangle
    from megatron_mtraining.ring import ring_schedule

    config = dataclasses.replace(tiny_gpt.SPARSE, pattern="moba", moba_chunk=16, moba_top_k=4, dense_layers=(1,))
    (_, scalars, here), (_, _, there) = run_on_ranks(metered_steps, 2, config=config, cp_size=2, log_interval=1)
    got, seq_len = scalars_at(scalars, 3), tiny_gpt.SEQ_LEN  # in which the second layer's work is measured
    layout = SequenceLayout(config.layout, seq_len=seq_len, cp_size=2, block_size=config.block_size)
    lists = [here[2], there[2]]
    kept = sum(computed_pairs_of_lists(lists[rank], layout, cp_rank=rank)[0] for rank in range(2))
    shares = kept.double() / triangle(seq_len)
    assert got["density"] == pytest.approx(float((shares.mean() + 1.0) / 2.0))
    assert (got["density-least"], got["density-most"]) == (pytest.approx(float(shares.min())), 1.0)

    pairs = torch.stack([pairs_by_owner(lists[rank], layout, cp_rank=rank) for rank in range(2)])
    assert int(pairs.sum()) == int(kept.sum())
    sources = [ring_schedule(config.schedule, cp_rank=rank, cp_size=2, inner_size=1).source_ranks for rank in range(2)]
    work = work_of_pairs(pairs, torch.zeros(2, dtype=torch.int64), sources)
    assert got["worker-imbalance"] == pytest.approx(work.worker_imbalance)
    assert got["step-imbalance"] == pytest.approx(work.step_imbalance)
    assert 0.0 < got["recall"] < 1.0


def test_prediction_layers_that_share_a_number_weigh_as_the_stages_that_have_them_apart(monkeypatch):
    from megatron_mtraining.layout import SequenceLayout
    from megatron_mtraining.megatron import meter as module
    from megatron_mtraining.megatron.runtime import LayerRecord
    from megatron_mtraining.types import VerticalSlashIndex

    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    runtime = types.SimpleNamespace(config=MTrainingConfig(), cp_group=group)
    monkeypatch.setattr(module, "current_runtime", lambda: runtime)
    monkeypatch.setattr(module, "gather_numbers", lambda row: torch.tensor([row], dtype=torch.float64))
    whole = VerticalSlashIndex.dense(rows=1, num_heads=2, seq_len=64, block_size=8)
    own = VerticalSlashIndex.from_lists([[[]] * 2], [[[0]] * 2], seq_len=64, block_size=8)
    query = torch.zeros(1, 64, 2, 4)
    layout = SequenceLayout("striped", seq_len=64, cp_size=1, block_size=8)

    meter = module.Meter()
    for layer, index in ((1, whole), (2, own), (1, whole)):
        call = {"index": index, "layout": layout, "query": query, "key": query}
        meter.observe(layer, LayerRecord(**call, softmax_scale=1.0, cu_seqlens=None))
    mean, least, most = meter.metrics().density
    assert (least, most) == (8 * 36 / 2080, 1.0)
    assert mean == pytest.approx((least + 2 * most) / 3)


def test_what_keeps_every_pair_executes_what_megatron_counts():
    config = dataclasses.replace(tiny_gpt.SPARSE, dense_layers=(1, 2))
    options = {"tp_size": 2, "log_interval": 1, "steps": 12, "sample_steps": 10}
    (lines, scalars, _), _ = run_on_ranks(metered_steps, 2, config=config, cp_size=1, **options)
    got = scalars_at(scalars, 11)
    assert got["executed-throughput"] == got["dense-equivalent-throughput"]
    assert got["dense-equivalent-throughput"] == pytest.approx(DENSE_FLOPS / (SECONDS * 2e12)), "of both ranks"
    assert got["density-least"] == got["density-most"] == 1.0
    assert got["recall"] == pytest.approx(1.0)
    assert [number for number, line in enumerate(lines, start=1) if "recall" in line] == [1, 11]
    assert "worker-imbalance" not in got


def interval(**changes: Any) -> Any:
    """An interval of two layers in two pipeline stages."""
    from megatron_mtraining.megatron.meter import IntervalMetrics

    flops = {"computed_flops": 2e8, "causal_flops": 6e8, "whole_flops": 10e8}
    ring = {"worker_imbalance": 1.25, "step_imbalance": 1.5, "exposed_ms": (20.0, 30.0)}
    rest = {"density": (0.3, 0.2, 0.4), "layers": (1, 3)}
    recall = {"recall": 0.75, "worst_layer": (0.36, 3), "worst_head": (0.12, 2, 7)}
    return IntervalMetrics(**(flops | ring | rest | recall | changes))


def test_the_line_and_the_scalars_say_the_same():
    from megatron_mtraining.megatron.meter import report_line, report_scalars

    throughput = (200.04, 600.0)
    assert report_line(20, *throughput, interval(), step_ms=400.0) == (
        " mtraining iteration       20 | executed throughput per GPU (TFLOP/s/GPU): 200.0 "
        "| dense-equivalent throughput per GPU (TFLOP/s/GPU): 600.0 | density (%): 30.00 (20.00 to 40.00) "
        "| recall: 0.7500 (least 0.3600 in layer 3, 0.1200 in layer 2 head 7) "
        "| worker imbalance in layer 1 3: 1.250 | step imbalance: 1.500 "
        "| exposed communication (ms): 20.0 of 400.0 (5.0 %), at most 30.0 |"
    )
    assert list(report_scalars(*throughput, interval()).values()) == [
        200.04,
        600.0,
        0.3,
        0.2,
        0.4,
        0.75,
        0.36,
        0.12,
        1.25,
        1.5,
        20.0,
        30.0,
    ]
    nothing = dict.fromkeys(("recall", "worst_layer", "worst_head", "worker_imbalance", "step_imbalance"))
    alone = interval(**nothing)
    assert list(report_scalars(*throughput, alone).values()) == [200.04, 600.0, 0.3, 0.2, 0.4, 20.0, 30.0]
    assert "imbalance" not in report_line(20, *throughput, alone, step_ms=400.0)


def test_the_line_says_when_the_density_is_limited_and_what_that_costs():
    from megatron_mtraining.megatron.meter import density_bound

    bounded = MTrainingConfig(max_density=0.42, target_recall=0.95)
    assert density_bound(interval(), bounded) == " --mtraining-max-density 0.42 binds: 0.2000 below the target recall |"
    assert density_bound(interval(recall=0.96), bounded).endswith("binds: 0.0000 below the target recall |")
    for config in (MTrainingConfig(max_density=0.5), MTrainingConfig(), MTrainingConfig(pattern="moba")):
        assert density_bound(interval(), config) == ""
    assert density_bound(interval(recall=None), bounded) == " --mtraining-max-density 0.42 binds |"


def test_metrics_of_several_stages_and_ranks_are_put_together():
    """Two stages of two context-parallel ranks and two tensor-parallel ones: every number by its own reduction."""
    from megatron_mtraining.megatron.meter import _reduce

    nan, inf = math.nan, math.inf
    silent = [0.0, 0.0, 0.0, 0.0, 0.0, inf, -inf, 0.0, 0.0, *[nan] * 8]  # ranks of a group beside the first
    rows = [
        [*(2.0, 8.0, 9.0, 3.0, 6.0, 0.3, 0.6), *(1.8, 2.0, 0.7, 2, 0.4, 1, 3), *(2, 1.5, 1.75), 10.0],
        [*silent, 20.0],
        [*(3.0, 8.0, 9.0, 1.0, 6.0, 0.1, 0.2), *(1.0, 2.0, 0.36, 1, 0.3, 2, 5), *(2, 1.25, 1.5), 30.0],
        [*silent, 40.0],
        [*(5.0, 4.0, 7.0, 2.0, 4.0, 0.4, 0.7), *(0.9, 1.0, 0.9, 5, 0.5, 5, 0), *(5, 1.75, 2.5), 5.0],
        [*silent, 75.0],
        [*(1.0, 4.0, 7.0, 2.0, 4.0, 0.5, 0.9), *(0.8, 1.0, 0.8, 5, 0.25, 5, 6), *(5, 1.0, 1.25), 60.0],
        [*silent, 80.0],
    ]
    assert _reduce(torch.tensor(rows, dtype=torch.float64)) == interval(
        computed_flops=11.0,
        causal_flops=24.0,
        whole_flops=32.0,
        density=(8.0 / 20.0, 0.1, 0.9),
        layers=(2, 5),
        recall=4.5 / 6.0,
        worst_layer=(0.36, 1),
        worst_head=(0.25, 5, 6),
        worker_imbalance=1.75,
        step_imbalance=2.5,
        exposed_ms=(40.0, 80.0),
    )
    alone = [[*row[:7], 0.0, 0.0, *[nan] * 8, 0.0] for row in rows[::2]]
    figures = _reduce(torch.tensor(alone, dtype=torch.float64))
    assert (figures.recall, figures.worst_layer, figures.worst_head, figures.worker_imbalance) == (None,) * 4
    assert _reduce(torch.tensor([[*silent, 1.0]])) is None


def test_what_measuring_waits_for_is_not_exposed(monkeypatch: pytest.MonkeyPatch):
    from megatron_mtraining.megatron import meter as module
    from megatron_mtraining.transport import exposure

    now = [0.0]

    def waiting_recall(*_: Any, **__: Any) -> torch.Tensor:
        with exposure.exposed(torch.device("cpu")):
            now[0] += 1.0
        return torch.ones(1, 2, 3)

    call = types.SimpleNamespace(
        query=None,
        key=None,
        index=None,
        softmax_scale=1.0,
        layout=types.SimpleNamespace(seq_len=8),
        cu_seqlens=None,
        num_valid=None,
    )
    monkeypatch.setattr(exposure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "attention_recall", waiting_recall)
    monkeypatch.setattr(module, "held_out_rows", lambda config, **_: (0,))
    monkeypatch.setattr(module, "current_runtime", lambda: types.SimpleNamespace(config=None, cp_group=None))
    meter = module.Meter()
    meter.begin_last_step(measures=True)
    assert meter._recall(call).tolist() == [1.0, 1.0]
    meter.stop()
    assert (now[0], meter._clock.take_ms()) == (1.0, 0.0)


def test_what_megatron_counts_of_packs_is_left_out_by_documents():
    """Releases that are given the documents of a batch count the pairs inside them, the others whole rows."""
    from megatron_mtraining.megatron.meter import Meter

    loop, executed = Meter(), []
    loop._steps = 2
    for documents in ((), (7,)):
        assert loop.count_flops(num_floating_point_operations, None, 1, *documents) == DENSE_FLOPS
        computed, dense = loop.throughput(interval(), SECONDS, world_size=4)
        assert dense == pytest.approx(DENSE_FLOPS / (SECONDS * 4e12))
        executed.append(computed * SECONDS * 4e12)
    assert executed == [pytest.approx(DENSE_FLOPS - saved / 2) for saved in (8e8, 4e8)]


def test_a_training_loop_that_lacks_something_is_named_and_left_alone(monkeypatch: pytest.MonkeyPatch):
    from megatron_mtraining.megatron import MissingSymbolError, meter

    for name in ("megatron.training", "megatron.training.training"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # which is put back
    module = Recorded(log_interval=2).module
    del module.get_wandb_writer
    with pytest.raises(MissingSymbolError, match="megatron.training.training.get_wandb_writer must exist, got"):
        meter.install()
    assert (module.training_log, module.num_floating_point_operations) == (training_log, num_floating_point_operations)


def real_lines() -> list[str]:
    """What Megatron's own ``training_log`` prints in four steps, the meter's lines among them."""
    import contextlib
    import io

    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import global_vars, training
    from megatron.training.arguments import parse_args

    from megatron_mtraining.megatron import meter

    sys.argv = ["train"]
    args = parse_args()
    sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": HEADS, "kv_channels": HEAD_DIM}
    batch = {"micro_batch_size": 1, "global_batch_size": 1, "data_parallel_size": 1, "gtp_weight_remat_size": 1}
    run = {"train_iters": 4, "log_interval": 2, "consumed_train_samples": 0, "skipped_train_samples": 0}
    more = {"seq_length": tiny_gpt.SEQ_LEN, "ffn_hidden_size": 64, "padded_vocab_size": tiny_gpt.VOCAB, "swiglu": True}
    vars(args).update(sizes | batch | run | more, world_size=1, log_throughput=True)
    init_num_microbatches_calculator(0, None, 1, 1, 1)
    global_vars.set_args(args)
    global_vars._set_timers(args)
    global_vars._set_energy_monitor(args)
    output = io.StringIO()
    with tiny_gpt.parallel_job(), contextlib.redirect_stdout(output):
        meter.install()
        model = tiny_gpt.build(tiny_gpt.sparse_spec()).train()
        training.get_timers()("interval-time", log_level=0).start(barrier=True)
        sums: dict[str, Any] = {}
        for iteration in range(1, 5):
            loss = tiny_gpt.mean_loss(model, tiny_gpt.batch())
            loss.backward()
            losses = {"lm loss": loss.detach()[None]}
            rest = (1.0, False, 0, 1.0, None, None, 0.0)
            training.training_log(losses, sums, 1e-3, iteration, *rest, is_first_iteration=iteration == 1)
        meter.uninstall()
    return output.getvalue().splitlines()


def test_megatrons_own_training_log_has_a_line_more():
    pytest.importorskip("megatron.training.training", reason="this Megatron-Core wheel has no megatron.training")
    (lines,) = run_on_ranks(real_lines, 1)
    found = [re.search(r"( mtraining)? iteration +(\d+)", line) for line in lines]
    assert [match.groups() for match in found if match] == [
        (ours, number) for number in "124" for ours in (None, " mtraining")
    ]
