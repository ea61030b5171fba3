"""The doctor ends before it begins: one sentence and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_mtraining.megatron.compat import has_module
from tests.programs import run_program

from .jobs import start

needs_training = pytest.mark.skipif(not has_module("megatron.training"), reason="no megatron.training in this wheel")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.py"], "script must be an existing Python file, got 'none.py'. Give its path"),
        (["setup.py"], "torchrun must start the ranks, got no RANK in the environment. Run: torchrun"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], sentence: str):
    ended = run_program("-m", "megatron_mtraining", "doctor", *arguments)
    assert ended.status == 2
    assert sentence in ended.stderr.splitlines()[-1]
    assert ended.stdout == "" and "Traceback" not in ended.stderr


def test_json_tells_what_is_wrong_too():
    ended = run_program("-m", "megatron_mtraining", "doctor", "--json", "setup.py")
    found = json.loads(ended.stdout)
    assert found["exit_code"] == ended.status == 2
    assert found["error"].startswith("torchrun must start the ranks")


@needs_training
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--mtraining-dense-below", 192),
            "--seq-length must be at least 193, longer than --mtraining-dense-below 192 and two blocks on each of 1 "
            "context-parallel ranks, got 192. Raise it, or lower --mtraining-dense-below.",
        ),
        (("--attention-backend", "unfused"), "--attention-backend must be mtraining, got unfused."),
        (("--hidden-size", 34), "--hidden-size and --num-attention-heads must be what Megatron-LM checks"),
    ],
)
def test_flags_that_leave_nothing_to_examine(flags: tuple, sentence: str, tmp_path: Path):
    ended = start(*flags, options=(), folder=tmp_path)
    assert ended.status == 2, ended.stderr[-3000:]
    assert sentence in ended.stderr.rstrip().splitlines()[-1]
    assert ended.stdout == ""
