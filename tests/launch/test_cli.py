"""The command line: what it runs, and the one sentence with which it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining.launch import cli, messages
from tests.programs import ROOT, Ended, run_program

SCRIPT = """
import json, os, sys
from megatron.core.transformer.enums import AttnBackend
from beside import NUMBER
print(json.dumps({
    "name": __name__, "argv": sys.argv, "number": NUMBER, "variable": os.environ.get("FROM_THE_FILE"),
    "choices": [member.name for member in AttnBackend],
}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "beside.py").write_text("NUMBER = 7\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def launch(*arguments: object) -> Ended:
    return run_program("-m", "megatron_mtraining", *arguments)


def test_a_script_runs_as_python_runs_it(script: Path):
    run = launch(script, "--flag", "value", "--config", "its.own")
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["name"] == "__main__"
    assert found["argv"] == [str(script), "--flag", "value", "--config", "its.own"]
    assert found["number"] == 7, "what lies beside the script is found"
    assert "mtraining" in found["choices"]


def test_a_run_file_gives_flags_and_environment(script: Path, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("ENV_VARS:\n  FROM_THE_FILE: 3\nMODEL_ARGS:\n  --lr: 1\n  --bf16: true\n")
    found = json.loads(launch("--config", file, script, "--lr", "2").stdout.splitlines()[-1])
    assert found["argv"] == [str(script), "--bf16", "--lr", "2"]
    assert found["variable"] == "3"


def test_help_names_every_flag_without_megatron(tmp_path: Path):
    (tmp_path / "megatron.py").write_text("raise ImportError('Megatron is not needed for help')\n")
    command = [sys.executable, "-m", "megatron_mtraining", "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0
    assert "--attention-backend mtraining" in run.stdout
    assert "--mtraining-dense-warmup-steps" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: script"),
        (["none.py"], "script must be an existing Python file, got 'none.py'. Give its path, from the current folder."),
        (["--config", "none.yaml", "setup.py"], "the YAML file must be readable, got none.yaml"),
        (["--config", "a.yaml", "--config", "b.yaml", "setup.py"], "--config must be given once, got a.yaml, b.yaml."),
        (["--lr", "1", "a.py"], "unrecognized arguments: --lr. Flags of the script come after it."),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(arguments, sentence):
    run = launch(*arguments)
    assert run.status == 2
    assert run.stderr.splitlines()[-1].startswith(f"mtraining: error: {sentence}")
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "similar"),
    [
        (["docter"], "doctor"),
        (["--confg", "a.yaml", "a.py"], "--config"),
        (["doctor", "--jsn"], "--json"),
        (["plan", "--model", "qwen3-8b", "--gpus", "8", "--seq", "1M", "--recomput", "full"], "--recompute"),
    ],
)
def test_a_mistyped_command_or_flag_is_recognized(arguments, similar, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f". Did you mean {similar}?")


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"mtraining (\d+\.\d+\.\S+|\(a source tree, not installed\))\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("environment", "speaks_at_once"),
    [
        ({"RANK": "8", "LOCAL_RANK": "0"}, True),
        ({"RANK": "9", "LOCAL_RANK": "1"}, False),
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
    ],
)
def test_one_rank_speaks_for_its_host_and_the_others_only_where_it_has_not(
    environment, speaks_at_once, monkeypatch, capsys
):
    said = []
    monkeypatch.setattr(messages.time, "sleep", lambda seconds: said.append(capsys.readouterr().err))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["none.py"])
    assert said == ([] if speaks_at_once else [""])
    assert "none.py" in capsys.readouterr().err


def test_a_tree_that_lacks_what_is_wrapped_is_named(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("from megatron_mtraining.megatron.compat import require_symbol\nrequire_symbol('os', 'gone')\n")
    run = launch(script)
    assert run.status == 2
    assert run.stderr.splitlines()[-1].startswith("mtraining: error: os.gone must exist")
    assert run.stderr.rstrip().endswith("Supported are core 0.16, 0.17, 0.18, 0.19 and main of August 2026.")


@pytest.mark.parametrize(
    ("core", "found"),
    [
        (None, "No module named 'megatron.core'"),
        ("", "No module named 'megatron.core.transformer'"),
        ("raise ImportError('libcudart', name='apex')", None),
    ],
)
def test_no_megatron_or_one_of_another_age_is_named(tmp_path: Path, core: str | None, found: str | None):
    """What this package imports at its head is met before any symbol is looked for."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    if core is not None:
        (tmp_path / "megatron" / "core").mkdir()
        (tmp_path / "megatron" / "core" / "__init__.py").write_text(core)
    (tmp_path / "train.py").touch()
    run = launch(tmp_path / "train.py")
    if found is None:
        assert run.status == 1
        assert run.stderr.splitlines()[-1] == "ImportError: libcudart"  # not Megatron's age, so all of it is shown
        return
    assert run.status == 2
    assert run.stderr.splitlines()[-1].startswith(
        f"mtraining: error: Megatron-Core must be a supported release, got {found}"
    )
    assert "Traceback" not in run.stderr
