"""The planner: counts worked by hand, limits of more GPUs, output and errors of the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_mtraining.launch.cli import main
from megatron_mtraining.planner.attention_clock import AttentionClock, load_of_density
from megatron_mtraining.planner.memory import GIB, LayerActivations, memory_of
from megatron_mtraining.planner.model import PRESETS
from megatron_mtraining.planner.plan import Plan, check_plan
from megatron_mtraining.planner.profile import PROFILES
from megatron_mtraining.planner.step_time import step_time

QWEN = PRESETS["qwen2.5-3b"]
PLAN = Plan(seq_len=65536, tp=2, cp=2, pp=2, dp=2, node_size=4, global_batch=16, pack_width=1152)
SMALL = ["--model", "qwen2.5-1.5b", "--seq", "64K", "--gpus", "8", "--node", "4"]
TINY = ["--model", "qwen2.5-1.5b", "--seq", "8K", "--gpus", "1"]


def plan(capsys, *arguments):
    """Output and exit status of the command."""
    status = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        status = stop.code
    return *capsys.readouterr(), status


def test_parameters_are_the_published_ones():
    """Of the weights that their publishers released, counted by their own tools."""
    counted = {name: shape.stage_parameters() for name, shape in PRESETS.items()}
    assert counted == {
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-3b": 3_085_938_688,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-14b": 14_770_033_664,
        "qwen3-8b": 8_190_735_360,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
    }


def test_weights_of_a_stage_by_hand():
    """Two stages of two ranks: 18 layers each, and the tied embedding on both, padded to 152064 rows."""
    layer = (
        2048 * (16 + 2 * 2) * 128 // 2 + 2048 * 16 * 128 // 2 + (16 + 4) * 128 // 2 + 3 * 2048 * 11008 // 2 + 2 * 2048
    )
    last = 18 * layer + 2048 + 152064 // 2 * 2048
    memory = memory_of(QWEN, replace(PLAN, global_batch=2))
    assert memory.weights == 2 * last
    assert memory.gradients == 4 * last
    assert memory.optimizer == 12 * last // 4  # shared by dp 2 x cp 2
    assert memory_of(QWEN, replace(PLAN, global_batch=2, offload=True)).optimizer == 0


def test_activations_by_hand():
    layer = LayerActivations.of(QWEN, replace(PLAN, tp=1))
    tokens = 32768
    assert layer.saved("full") == 2 * tokens * 2048
    assert layer.packs == 2 * 2 * 1152 * 16 * 128
    attention = 2 * (2 * 2048 + 3 * 2048 + 3 * 256) * tokens + 4 * 16 * tokens + layer.packs
    assert layer.saved("selective") == layer.hidden + attention
    assert layer.saved("none") == layer.saved("selective") + 2 * (2048 + 3 * 11008) * tokens
    shared = LayerActivations.of(QWEN, replace(PLAN, tp=1, index_sharing="kv_group"))
    assert shared.packs * 8 == layer.packs
    logits = memory_of(QWEN, replace(PLAN, tp=1, pp=1, recompute="full"))
    assert logits.moment == "the logits"
    assert logits.working == 6 * tokens * 151936 + 2 * layer.hidden + (64 << 20)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("size", ["tp", "cp", "pp", "dp"])
def test_more_gpus_never_take_more_memory(recompute, size):
    """Twice as many, along any of the sizes; without what NCCL takes."""
    for attention, pack_width in (("mtraining", 1152), ("transformer_engine", 0)):
        plan = replace(PLAN, recompute=recompute, attention=attention, pack_width=pack_width, node_size=16)
        allocated = [memory_of(QWEN, replace(plan, **{size: count}, global_batch=32)).allocated for count in (1, 2, 4)]
        assert allocated == sorted(allocated, reverse=True)


def test_a_pipeline_has_as_many_microbatches_in_flight_as_it_is_long():
    long, short = (memory_of(QWEN, replace(PLAN, dp=1, global_batch=count)) for count in (16, 1))
    assert long.saved == 2 * short.saved == 2 * 18 * LayerActivations.of(QWEN, PLAN).saved("none")


def test_time_follows_work():
    clock = AttentionClock(model=QWEN, load=load_of_density(65536, 0.1), profile=PROFILES["h200"])
    alone = replace(PLAN, tp=1, pp=1, dp=1)
    one = step_time(QWEN, alone, clock)
    more_batches = step_time(QWEN, replace(alone, global_batch=32), clock)
    assert more_batches.attention == pytest.approx(2 * one.attention)
    assert more_batches.optimizer == one.optimizer
    full = step_time(QWEN, replace(alone, recompute="full"), clock)
    layers = 36 * QWEN.layer_weights * 32768 * 2 / 575e12 * 16
    assert full.products - one.products == pytest.approx(layers)
    dense = step_time(QWEN, replace(alone, attention="transformer_engine", layout="zigzag", schedule="flat"), clock)
    assert dense.attention > 5 * one.attention


def test_a_slow_host_makes_nodes_gather():
    """Of 32 ranks a gathered node's keys take one step where the ring takes eight; that costs memory."""
    load = load_of_density(524288, 0.05)
    seconds, lag = {}, {}
    for step_us in (0, 500):
        profile = replace(PROFILES["h200"], host_forward_step_us=step_us, host_backward_step_us=2 * step_us)
        clock = AttentionClock(model=QWEN, load=load, profile=profile)
        for schedule in ("hierarchical", "gather"):
            plan = Plan(seq_len=524288, cp=32, node_size=8, pack_width=1152, recompute="full", schedule=schedule)
            time = step_time(QWEN, plan, clock)
            seconds[step_us, schedule], lag[step_us, schedule] = time.total, time.host
    assert seconds[500, "gather"] < seconds[500, "hierarchical"]
    assert seconds[0, "hierarchical"] < seconds[500, "hierarchical"]
    assert lag[0, "gather"] == lag[0, "hierarchical"] == 0 < lag[500, "hierarchical"]


def test_launches_hide_behind_all_that_the_gpu_does_in_a_layer():
    """Attention alone would wait for its host here, a layer with its products does not; a slower host then adds."""
    plan, load, seconds = Plan(seq_len=8192, cp=4, pack_width=640), load_of_density(8192, None), {}
    nothing_else = dict.fromkeys(("host_forward_step_us", "host_backward_us", "host_backward_step_us"), 0)
    for host_us in (0, 1000, 100_000):
        profile = replace(PROFILES["h200"], host_forward_us=host_us, **nothing_else)
        clock = AttentionClock(model=QWEN, load=load, profile=profile)
        seconds[host_us] = step_time(QWEN, plan, clock)
    assert clock.predict(plan).forward.gpu_ms < 1
    assert seconds[1000] == seconds[0]
    launching = QWEN.num_layers * plan.micro_batches * 0.1
    assert 0.9 * launching < seconds[100_000].host < launching
    assert seconds[100_000].total - seconds[0].total == pytest.approx(seconds[100_000].host)


def test_the_command_plans(capsys, tmp_path):
    """Everything that is proposed fits, divides and is in the command; lists are not shared where a group is split."""
    file = tmp_path / "plans.json"
    given = ("--gpu-memory", "24GB", "--density", "10%", "--index-sharing", "kv_group", "--json", str(file))
    out, error, status = plan(capsys, *SMALL, *given)
    assert (error, status) == ("", 0)
    assert "qwen2.5-1.5b: 1.54 billion parameters\n65536 tokens" in out and "note:" not in out
    written = json.loads(file.read_text())
    assert written["density"] == pytest.approx(0.1, rel=0.05)
    seconds = [each["seconds"]["total"] for each in written["plans"]]
    assert seconds == sorted(seconds)
    names = ("seq_len", "tp", "cp", "pp", "dp", "node_size", "global_batch", "layout", "index_sharing")
    for each in written["plans"]:
        assert each["memory_bytes"]["total"] <= 0.95 * 24 * GIB
        assert each["tp"] * each["cp"] * each["pp"] * each["dp"] == 8
        check_plan(PRESETS["qwen2.5-1.5b"], Plan(**{name: each[name] for name in names}))
    flags, best = written["flags"], written["plans"][0]
    assert " ".join(flags + written["model_flags"]) in " ".join(out.replace("\\", "").split())
    assert flags[flags.index("--context-parallel-size") + 1] == str(best["cp"])
    assert flags[flags.index("--mtraining-layout") + 1] == best["layout"]


def test_sizes_may_be_fixed_and_attention_dense(capsys, tmp_path):
    """A dense plan is TransformerEngine's: everything is computed, and no flag is this package's."""
    given = ("--density", "100%", "--tp", "2", "--cp", "4", "--json", str(tmp_path / "plans.json"))
    out, _, status = plan(capsys, *SMALL, *given)
    assert status == 0
    assert "65536 tokens, density 100.00 % (dense)" in out
    assert "--cp-comm-type p2p" in out
    assert "--mtraining" not in out
    written = json.loads((tmp_path / "plans.json").read_text())
    chosen = {tuple(each[name] for name in ("tp", "cp", "pack_width", "index_sharing")) for each in written["plans"]}
    assert chosen == {(2, 4, 0, "head")}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--gpu-memory", "2GB"],
            r"--gpu-memory must be at least \d+\.\d GiB per GPU at tp=\d.* with full recomputation.*, got 2 GiB\. "
            r"\d+\.\d GiB are missing; .* take \d+\.\d GiB\.",
        ),
        (["--tp", "3"], r"the fixed sizes must be factors whose product divides 8 GPUs, got tp 3\."),
        (["--tp", "8"], r"tp must be a divisor of the 4 GPUs of a node, got 8\."),
        (["--tp", "4", "--index-sharing", "kv_group"], r"tp must be at most the 2 key/value heads with .*, got 4\."),
        (["--pp", "8"], r"num_layers must be a multiple of pp 8, got 28\."),
        (
            ["--seq", "65537", "--cp", "8"],
            r"seq_len must be a multiple of 512 for the striped layout over 8 ranks.* multiples of 1024 do\.",
        ),
        (["--gpus", "10"], r"--gpus must be a multiple of the 4 GPUs of a node, got 10\."),
        (["--density", "0.1%"], r"density must be at least [\d.]+, the density of 1024 verticals .*, got 0\.001"),
        (["--max-vertical", "8", "--index", "x.json"], r"unsupported: --max-vertical with --index\."),
        (["--density", "100%", "--layout", "rotated"], r"unsupported: --layout with --density 100%"),
        (["--global-batch", "3", "--dp", "2"], r"global_batch must be a multiple of dp 2, got 3\."),
        (["--model", "gpt-5"], r"--model must be one of qwen2\.5-1\.5b, .*, or a file, got 'gpt-5'"),
        (["--index", "none.json"], r"a recorded index must be a readable JSON file, got none\.json"),
        (["--densty", "5%"], r"unrecognized arguments: --densty 5%\. Did you mean --density"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, sentence):
    out, error, status = plan(capsys, *SMALL, *arguments)
    assert (out, status) == ("", 2)
    assert re.match(r"mtraining plan: error: .*" + sentence, error), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "texts"),
    [
        ("gpus", ["0", "1" + 400 * "0", "many"]),
        ("max-vertical", ["-5"]),
        ("margin", ["0.99", "nan"]),
        ("seq", ["0", "1" + 400 * "0", "long"]),
        ("gpu-memory", ["0GB", "much"]),
        ("density", ["0%", "7"]),
    ],
)
def test_numbers_have_ranges(capsys, flag, texts):
    """Each reader of numbers: below its range, above it, and no number at all."""
    for text in texts:
        out, error, status = plan(capsys, *SMALL, f"--{flag}", text)
        assert (out, status) == ("", 2), text
        assert re.fullmatch(rf"mtraining plan: error: --{flag} must be .*, got .{{1,50}}\.\n", error), error


def test_the_end_of_a_reader_is_no_error():
    """``plan ... | head -1``."""
    command = f"set -o pipefail; {sys.executable} -m megatron_mtraining plan {' '.join(TINY)} | true"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")


LAUNCH_CONFIG = """
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --ffn-hidden-size: 128
  --num-attention-heads: 4
  --group-query-attention: true
  --num-query-groups: 2
  --padded-vocab-size: 1024
  --mtraining-index-sharing: kv_group
  --mtraining-max-vertical: 100
  --mtraining-max-slash: 7
  --global-batch-size: {global_batch}
  --micro-batch-size: 2
"""


def test_settings_of_a_launch_config(capsys, tmp_path):
    """Sequences of a step, and what is selected; the command line wins over both."""
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text(LAUNCH_CONFIG.format(global_batch=64))
    given = ("--model", str(file), "--seq", "16K", "--gpus", "2", "--rows", "1")
    out, error, status = plan(capsys, *given)
    assert (error, status) == ("", 0)
    assert "64 sequences a step\n" in out
    assert "note: --micro-batch-size 2 is planned as 1: larger ones are not predicted.\n" in out
    for flag in ("--global-batch-size 64", "index-sharing kv_group", "max-vertical 100", "max-slash 7"):
        assert flag in " ".join(out.replace("\\", "").split())
    out, _, _ = plan(capsys, *given, "--global-batch", "32", "--index-sharing", "head", "--max-vertical", "50")
    assert "32 sequences a step\n" in out and "kv_group" not in out and "100 verticals" not in out
    file.write_text(LAUNCH_CONFIG.format(global_batch="many"))
    _, error, status = plan(capsys, *given)
    assert (status, error.count("\n")) == (2, 1)
    assert "--global-batch must be a whole number" in error


@pytest.mark.parametrize("flag", ["--model", "--profile", "--index"])
@pytest.mark.parametrize("kind", ["folder", "brackets", "bytes", "long"])
def test_unreadable_files_are_one_sentence(capsys, tmp_path, flag, kind):
    path = tmp_path / ("n" * 300 if kind == "long" else "file.json")
    if kind == "folder":
        path.mkdir()
    elif kind != "long":
        path.write_bytes(b"[" * 100_000 if kind == "brackets" else bytes(range(128, 256)))
    _, error, status = plan(capsys, *TINY, flag, str(path))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("mtraining plan: error: ")


def test_the_plain_layout_is_proposed_where_one_rank_has_all(capsys):
    out, _, _ = plan(capsys, *TINY)
    assert "--mtraining-layout striped" in out
