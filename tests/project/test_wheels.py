"""What is released: a wheel without kernels, a source distribution that can build them, and checks of compiled ones."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from tools.check_wheels import ARCHITECTURES, architectures, load_fault, main, module_faults, wheel_faults

from .sources import PACKAGE, ROOT

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # kept: setuptools puts arguments of its own there
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution and a wheel, built from a copy as on a machine without nvcc."""
    copy, dist = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("csrc", "megatron_mtraining"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, copy)
    environment = os.environ | {"MTRAINING_CUDA": "0"}
    command = [sys.executable, "-c", BUILD, str(dist)]
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return dist


def test_without_nvcc_the_wheel_is_for_every_machine(pure):
    (wheel,) = pure.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel_faults(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("megatron_mtraining/")}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json") and "__pycache__" not in path.parts]
    assert {name for name in packed if name.endswith((".py", ".json"))} == {
        str(path.relative_to(ROOT)) for path in files
    }


def test_the_source_distribution_holds_all_that_is_compiled(pure):
    (archive,) = pure.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {Path(*Path(name).parts[1:]) for name in files.getnames()}
    sources = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert sources | {Path("setup.py"), Path("LICENSE"), Path("NOTICE")} <= names


def test_the_checks_ask_for_wheels_with_kernels(pure, capsys):
    assert main(pure) == 1
    assert "must hold a wheel with kernels, got none. Run: make wheels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tag", "files", "sentence"),
    [
        ("py3-none-any", ["_C.cpython-312-x86_64-linux-gnu.so"], "must hold no compiled module, got"),
        (
            "cp312-cp312-linux_x86_64",
            [],
            "must hold one module megatron_mtraining/backends/cuda/_C.cpython-312-*.so, got",
        ),
        (
            "cp312-cp312-linux_x86_64",
            ["_C.cpython-311-x86_64-linux-gnu.so"],
            "must hold one module megatron_mtraining/",
        ),
    ],
)
def test_a_wheel_that_is_not_what_its_name_says_is_named(tmp_path, tag, files, sentence):
    wheel = tmp_path / f"megatron_mtraining-0.1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ["__init__.py", *files]:
            archive.writestr(f"megatron_mtraining/backends/cuda/{name}", b"")
    (fault,) = wheel_faults(wheel)
    assert fault.startswith(wheel.name) and sentence in fault


def test_architectures_are_read_from_fat_binaries():
    def entry(kind: int, architecture: int, payload: int) -> bytes:
        head = struct.pack("<HHIQ", kind, 0x101, 64, payload) + bytes(12) + struct.pack("<I", architecture)
        return head.ljust(64, b"\0") + bytes(payload)

    def binary(*entries: bytes) -> bytes:
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)

    module = b"ELF...." + binary(entry(2, 80, 24), entry(1, 80, 8)) + bytes(40) + binary(entry(2, 90, 16)) + b"tail"
    assert architectures(module) == ARCHITECTURES
    assert architectures(b"no kernels") == set()


def test_a_module_that_needs_torch_is_named():
    """torch's own extension stands for one that was linked with it."""
    module = Path(torch._C.__file__)
    libraries, architectures_missing = module_faults(module)
    assert libraries.startswith(f"{module.name} must need system libraries only, got ") and "libtorch" in libraries
    assert architectures_missing.startswith(f"{module.name} must hold code for every architecture, got none of ")
    assert load_fault(module, f"3.{sys.version_info.minor}").startswith(f"{module.name} must load alone, got: ")
