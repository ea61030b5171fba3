"""The container image: a Dockerfile that its linter passes, and a workflow that builds it and runs what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .sources import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
WORKFLOW = ROOT / ".github" / "workflows" / "gpu.yml"


def default_of(argument: str) -> str:
    (value,) = re.findall(rf"^ARG {argument}=(.+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return value


def test_hadolint():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint, which the extra dev installs on x86_64")
    run = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")


def test_versions_are_named_once_and_as_the_workflow_and_the_test_have_them():
    inputs = yaml.safe_load(WORKFLOW.read_text())[True]["workflow_dispatch"]["inputs"]  # YAML reads `on` as true
    assert inputs["image"]["default"] == default_of("IMAGE")
    assert inputs["megatron_lm"]["default"] == default_of("MEGATRON_LM_TAG")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", default_of("IMAGE"))
    assert f"{default_of('IMAGE')}\n" in (ROOT / ".ci" / "ngc_like").read_text()
    assert WORKFLOW.read_text().count(default_of("IMAGE")) == 2


def test_the_workflow_runs_what_exists():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (job,) = workflow["jobs"].values()
    assert "schedule" in workflow[True] and "vars.GPU_RUNNER != ''" in job["if"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[0].startswith(f"docker build --file {DOCKERFILE.relative_to(ROOT)} ")
    targets = {target for command in commands for target in re.findall(r"\bmake (\w+)", command)}
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony and {"kernels", "test", "sanitize", "demo"} <= targets <= set(phony.group(1).split())
    (script,) = {script for command in commands for script in re.findall(r"\S+\.sh", command)}
    assert (ROOT / script).is_file() and "compare_with_te" in script


def test_the_image_leaves_out_what_git_ignores():
    """Environments, builds and compiled modules of the host would otherwise be copied into it."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", ".mtraining-ready", "build", "outputs", "**/*.so"} <= set(ignored)
