"""The example scripts and run files: flags that Megatron and this package know, and shell that survives a check."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.arguments import add_arguments, config_from_args
from megatron_mtraining.launch_config import read_launch_config
from megatron_mtraining.metrics import density
from megatron_mtraining.planner.attention_clock import load_of_density
from megatron_mtraining.planner.model import PRESETS
from megatron_mtraining.planner.plan import Plan
from megatron_mtraining.planner.report import model_flags, plan_flags

from .sources import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))
LAUNCH_CONFIGS = sorted(EXAMPLES.glob("*/*.yaml"))
LAUNCHERS_OWN = {
    "--standalone",
    "--nproc-per-node",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--config",
}
OTHERS = {"--kill-after", "--kill-on-bad-exit", "--density", "--max-vertical", "--warm-up"}
"""Of timeout, srun and comparison.py."""

by_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
by_launch_config = pytest.mark.parametrize(
    "launch_config", LAUNCH_CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}"
)

spec = importlib.util.spec_from_file_location("comparison", EXAMPLES / "compare_with_te" / "comparison.py")
comparison = importlib.util.module_from_spec(spec)
sys.modules["comparison"] = comparison
spec.loader.exec_module(comparison)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with this package's flags, as the launcher makes it."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        pytest.skip("needs megatron.training, which the wheels of megatron-core hold from 0.19 on")
    from megatron.training.arguments import add_megatron_arguments

    from megatron_mtraining.megatron.hooks import extend_attention_backend

    extend_attention_backend()
    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@by_launch_config
def test_launch_configs_are_command_lines_of_megatron(launch_config, parser):
    args, unknown = parser.parse_known_args(read_launch_config(launch_config).arguments([]))
    assert not unknown
    assert args.attention_backend.name == "mtraining"
    sizes = args.hierarchical_context_parallel_sizes
    assert [int(size) for size in sizes] == [8, 4]
    assert args.context_parallel_size == 32
    assert args.seq_length % (args.context_parallel_size * args.mtraining_block_size) == 0


def test_the_model_is_qwen(parser):
    """Against the published configuration of Qwen2.5-3B."""
    args = parser.parse_args(read_launch_config(EXAMPLES / "qwen2.5-3b-512k" / "run.yaml").arguments([]))
    published = {
        "num_layers": 36,
        "hidden_size": 2048,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 16,
        "num_query_groups": 2,
        "kv_channels": 128,
        "rotary_base": 1000000,
        "layernorm_epsilon": 1e-6,
        "padded_vocab_size": 151936,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": False,
    }
    assert {name: getattr(args, name) for name in published} == published
    yarn = (args.position_embedding_type, args.rotary_scaling_factor, args.yarn_original_max_position_embeddings)
    assert yarn == ("yarn", 32.0, 32768)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_planned_flags_are_megatrons(recompute, parser):
    plan = Plan(seq_len=131072, tp=2, cp=4, dp=2, global_batch=8, recompute=recompute, offload=True)
    args = parser.parse_args([*plan_flags(plan, load_of_density(131072, 0.05)), *model_flags(PRESETS["qwen2.5-3b"])])
    assert args.hierarchical_context_parallel_sizes == [4, 1]
    assert config_from_args(args).layout == plan.layout
    assert args.optimizer_cpu_offload


@by_script
def test_scripts_pass_flags_that_exist(script, parser):
    known = {flag for action in parser._actions for flag in action.option_strings} | LAUNCHERS_OWN | OTHERS
    code = "\n".join(line for line in script.read_text().splitlines() if not line.lstrip().startswith("#"))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code)) <= known


def test_scripts_are_sound_shell():
    """They stop at the first error, name a missing variable, and name the fusion that needs apex."""
    for script in SCRIPTS:
        assert script.stat().st_mode & 0o111
        assert "\nset -euo pipefail\n" in script.read_text()
        assert "--no-gradient-accumulation-fusion" in script.read_text()
        subprocess.run(["bash", "-n", str(script)], check=True)
        if shutil.which("shellcheck") is not None:
            subprocess.run(["shellcheck", str(script)], check=True)
        run = subprocess.run(["bash", str(script)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        assert run.returncode != 0
        assert "MEGATRON_LM: must be the folder of a Megatron-LM tree, got nothing." in run.stderr


@pytest.mark.parametrize("apex", [True, False])
@pytest.mark.parametrize("name", ["smoke.sh", "slurm_4x8.sh"])
def test_fused_gradient_accumulation_is_off_without_apex(name, apex, tmp_path):
    """A python without apex fails at the import that the scripts try; Megatron's default would then end the run."""
    stubs = {
        "python": f'[ "$1" != -c ] || exit {0 if apex else 1}; echo "$@"',
        "srun": 'shift; exec "$@"',
        "scontrol": "echo here",
    }
    for program, body in stubs.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / program).chmod(0o755)
    names = "MEGATRON_LM EXTEND SLURM_JOB_NODELIST SLURM_NNODES SLURM_JOB_ID".split()
    environment = {name: "1" for name in names} | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "python"}
    command = ["bash", EXAMPLES / "qwen2.5-3b-512k" / name, "--seed", "7"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ("--no-gradient-accumulation-fusion" in run.stdout.split()) != apex
    assert run.stdout.split()[-2:] == ["--seed", "7"]


def test_counts_make_the_density():
    """The index that a run of such counts would make, drawn here, has that density."""
    seq_length, target, max_vertical, num_heads = 16384, 0.2, 256, 64
    max_slash = comparison.max_slash_for(seq_length, target_density=target, max_vertical=max_vertical)
    config, draw = MTrainingConfig.algorithm_1(), random.Random(1)
    vertical, slash = (
        [[*range(always), *sorted(draw.sample(range(always, count), most))] for _ in range(num_heads)]
        for always, count, most in (
            (config.sink_tokens, seq_length, max_vertical),
            (config.local_blocks, seq_length // config.block_size, max_slash),
        )
    )
    index = VerticalSlashIndex.from_lists([vertical], [slash], seq_len=seq_length)
    assert density(index, seq_len=seq_length).mean().item() == pytest.approx(target, rel=0.03)
    with pytest.raises(ValueError, match="density must be at least"):
        comparison.max_slash_for(seq_length, target_density=0.01, max_vertical=max_vertical)


LOG = """\
 [2026-11-30 03:56:16] iteration        1/       4 | elapsed time per iteration (ms): 900.0 | lm loss: 1.040000E+01 |
 mtraining iteration        1 | executed throughput per GPU (TFLOP/s/GPU): 0.1 | density (%): 5.10 (5.00 to 5.20) |
 [Rank 0] (after 1 iterations) memory (MB) | allocated: 100.00 | max allocated: 1200.10 | reserved: 1300.00 |
 [Rank 0] (after 2 iterations) memory (MB) | allocated: 100.00 | max allocated: 1234.20 | reserved: 1300.00 |
 [2026-11-30 03:56:17] iteration        2/       4 | elapsed time per iteration (ms): 200.0 | lm loss: 1.030000E+01 |
 [2026-11-30 03:56:18] iteration        3/       4 | elapsed time per iteration (ms): 100.0 | lm loss: 1.020000E+01 |
 mtraining iteration        3 | executed throughput per GPU (TFLOP/s/GPU): 0.1 | density (%): 4.90 (4.80 to 5.00) |
"""


def write_run(folder: Path, name: str, log: str, status: int) -> None:
    (folder / f"{name}.log").write_text(log)
    (folder / f"{name}.status").write_text(f"{status}\n")


def test_table_of_logs(tmp_path, capsys):
    write_run(
        tmp_path, "transformer_engine_512", LOG.replace("mtraining iter", "other").replace(": 100.0", ": 500.0"), 0
    )
    write_run(tmp_path, "mtraining_512", LOG, 0)
    (tmp_path / "mtraining_512.flags").write_text("--num-layers\n4\n--bf16\n")
    assert comparison.main(["table", str(tmp_path), "--warm-up", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["512", "transformer_engine", "350.0", "1.00", "100.00%", "1234", "10.40000", "10.20000"]
    assert rows[2] == ["512", "mtraining", "150.0", "2.33", "4.90%", "1234", "10.40000", "10.20000"]
    written = json.loads((tmp_path / "results.json").read_text())
    assert [run["iteration_ms"] for run in written] == [150.0, 350.0]
    assert [run["flags"] for run in written] == [["--num-layers", "4", "--bf16"], []]


def test_table_has_the_error_of_a_failed_run(tmp_path, capsys):
    log = "starting\nRuntimeError: a port is taken\ntorch.distributed.elastic ChildFailedError:\n"
    write_run(tmp_path, "mtraining_512", log, 124)
    assert comparison.main(["table", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "mtraining at 512 tokens ended with status 124:\n  RuntimeError: a port is taken" in printed
    assert "ChildFailedError" not in printed
