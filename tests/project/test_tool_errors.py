"""Unusable files end tools with a sentence, not with a traceback."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_mtraining.launch.cli import main
from tests.programs import ROOT
from tools import check_wheels


@pytest.mark.parametrize("text", ["", '{"traceEvents": 3}', '{"traceEvents": [3]}', "[" * 100_000])
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, capsys):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(path)])
    assert f"error: {path} must be a readable Chrome trace, got " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.whl", "megatron_mtraining-0-cp311-cp311-linux.whl"])
def test_a_file_that_is_no_wheel(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"PK")
    assert check_wheels.wheel_faults(tmp_path / name) == [f"{name} must be a wheel, got another file."]


@pytest.mark.parametrize("text", [None, "3", '{"losses": [1], "dense_steps": 0, "final": null}'])
def test_a_file_that_is_no_journal(tmp_path: Path, text: str | None, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from compare_runs import main as compare

    path = tmp_path / "journal.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        compare([str(path), str(path)])
    assert f"error: {path} must be the journal.json of a finished run, got " in capsys.readouterr().err


def test_every_program_has_a_name_that_can_be_copied():
    for path in [*(ROOT / "tools").rglob("*.py"), *(ROOT / "megatron_mtraining").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "CommandParser":
                (prog,) = [ast.unparse(each.value) for each in call.keywords if each.arg == "prog"]
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
                names = {f"'python -m {module}'", "'python -m tools.bench.run --suite paper'", "PROGRAM"}
                assert prog in names or prog.startswith("'mtraining "), f"{path}: {prog}"
