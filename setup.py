"""Builds the optional CUDA module megatron_mtraining.backends.cuda._C; everything else is in pyproject.toml.

    python setup.py build_ext --inplace

MTRAINING_CUDA=0 never builds it, 1 insists on it; unset, it is built where nvcc is found (CUDA_HOME or PATH). No GPU
and no torch are needed. Each .cu file is compiled by nvcc on its own, MAX_JOBS (all cores) at a time, and only when it
or a header it includes has changed: once for every Python, since only bindings.cpp depends on Python. The objects are
under build/kernels, and beside them ptxas' reports, which `tools/kernels_report.py` reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = Path("csrc")  # relative, as setuptools requires; build backends start in ROOT
BUILD_COMMAND = "MTRAINING_CUDA=1 python setup.py build_ext --inplace"
HOPPER = ["-gencode", "arch=compute_90a,code=sm_90a"]
# sm_80 code serves 8.x; its PTX every newer GPU; Hopper gets code of its own, where the driver would compile the PTX.
EVERY_GPU = ["-gencode", "arch=compute_80,code=[sm_80,compute_80]", *HOPPER]
TARGETS = "sm_80,compute_80,sm_90a"
COMPILE = ["-std=c++17", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-MD"]


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME, else the one on PATH."""
    home = os.environ.get("CUDA_HOME")
    candidate = Path(home, "bin", "nvcc") if home else None
    return str(candidate) if candidate and candidate.is_file() else shutil.which("nvcc")


def wanted() -> bool:
    """Whether to build the CUDA module. Raises SystemExit where it is insisted on and cannot be."""
    choice = os.environ.get("MTRAINING_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"MTRAINING_CUDA must be 0, 1 or unset, got {choice!r}.")
    if choice == "1" and not find_nvcc():
        raise SystemExit(
            "nvcc must be on PATH or under CUDA_HOME when MTRAINING_CUDA=1, got neither. "
            f"Install the CUDA toolkit (12.4 or newer), then run: {BUILD_COMMAND}"
        )
    return choice != "0" and find_nvcc() is not None


def pybind11_include() -> str:
    """The pybind11 headers: of the pybind11 package, else the copy that torch carries."""
    for package, folder in (("pybind11", "include"), ("torch", "include")):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or []) if spec else []:
            if Path(location, folder, "pybind11", "pybind11.h").is_file():
                return str(Path(location, folder))
    raise SystemExit(f"pybind11 was not found. Run: pip install pybind11 && {BUILD_COMMAND}")


def interface_digest() -> str:
    """The stamp of megatron_mtraining/backends/cuda/interface.py, loaded as a file: the package itself needs torch."""
    path = ROOT / "megatron_mtraining/backends/cuda/interface.py"
    spec = importlib.util.spec_from_file_location("interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.interface_digest(ROOT / SOURCES)


def build_record(nvcc: str) -> str:
    """The compiler and the architectures, as one string: the module's record of its build."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"\bV([\d.]+)", version)
    return f"nvcc={release[1] if release else 'unknown'};targets={TARGETS}"


def kernel_command(nvcc: str, source: Path, output: Path) -> list[str]:
    """The nvcc call that makes the object of one .cu file."""
    targets = HOPPER if source.name.startswith("sm90_") else EVERY_GPU
    return [nvcc, "-c", str(source), "-o", str(output), *COMPILE, *targets, f"-I{SOURCES}"]


def bindings_command(nvcc: str, source: Path, output: Path, include_dirs: list[str]) -> list[str]:
    """The nvcc call that makes the object of bindings.cpp for one Python."""
    defines = [f'-DMTRAINING_INTERFACE="{interface_digest()}"', f'-DMTRAINING_BUILD="{build_record(nvcc)}"']
    if any(SOURCES.rglob("sm90_*.cu")):
        defines.append("-DMTRAINING_SM90")
    includes = [f"-I{folder}" for folder in (SOURCES, *include_dirs)]
    return [nvcc, "-c", str(source), "-o", str(output), *COMPILE, *defines, *includes]


def is_current(output: Path, command: list[str]) -> bool:
    """Whether an object was made by this command and is newer than all that it was made from."""
    record, dependencies = output.with_suffix(".command"), output.with_suffix(".d")
    if not (output.is_file() and record.is_file() and dependencies.is_file() and record.read_text() == str(command)):
        return False
    names = dependencies.read_text().split(":", 1)[1].replace("\\\n", " ").split()
    made = output.stat().st_mtime
    return all(Path(name).is_file() and Path(name).stat().st_mtime <= made for name in names)


def compile_one(source: Path, output: Path, command: list[str]) -> None:
    """Makes one object unless it is current; leaves the compiler's report in ``<object>.log``."""
    if is_current(output, command):
        return
    output.with_suffix(".command").unlink(missing_ok=True)  # an object of a build that broke off is not current
    print(f"nvcc {source}", flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    output.with_suffix(".log").write_text(result.stderr)
    if result.returncode:
        report = result.stderr or result.stdout
        raise SystemExit(f"nvcc failed on {source.name}:\n{report}\nAfter mending it: {BUILD_COMMAND}")
    output.with_suffix(".command").write_text(str(command))


class BuildKernels(build_ext):
    """Compiles csrc/ with nvcc and links one torch-free module."""

    def build_extension(self, ext: Extension) -> None:
        """What setuptools calls for the module: compiles what is not current, and links."""
        nvcc = find_nvcc()
        kernels = Path(self.get_finalized_command("build").build_base, "kernels")
        for folder in (kernels, Path(self.build_temp)):
            folder.mkdir(parents=True, exist_ok=True)
        jobs = []
        for source in map(Path, ext.sources):
            if source.suffix == ".cu":
                output = (kernels / source.stem).with_suffix(".o")
                command = kernel_command(nvcc, source, output)
            else:
                output = Path(self.build_temp, source.stem).with_suffix(".o")
                command = bindings_command(nvcc, source, output, [pybind11_include(), *self.include_dirs])
            jobs.append((source, output, command))
        for stale in set(kernels.glob("*.log")) - {output.with_suffix(".log") for _, output, _ in jobs}:
            stale.unlink()
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            list(pool.map(lambda job: compile_one(*job), jobs))
        self.link(nvcc, [str(output) for _, output, _ in jobs], Path(self.get_ext_fullpath(ext.name)))

    def link(self, nvcc: str, objects: list[str], target: Path) -> None:
        """Makes the module ``target`` of all objects."""
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [nvcc, "-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL", *objects, "-o", str(target)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"nvcc failed to link {target.name}:\n{result.stderr}\nAfter mending it: {BUILD_COMMAND}")


class CompileCommands(Command):
    """Writes compile_commands.json for clangd. Needs no nvcc."""

    description = "write compile_commands.json for clangd"
    user_options = [("output=", None, "file to write")]

    def initialize_options(self) -> None:
        """Set the default of each option."""
        self.output = "compile_commands.json"

    def finalize_options(self) -> None:
        """Do nothing: no option depends on another."""

    def run(self) -> None:
        """Write the file."""
        commands = [
            {"directory": str(ROOT), "file": str(source), "arguments": clang_command(source)} for source in sources()
        ]
        Path(self.output).write_text(json.dumps(commands, indent=1) + "\n")


def clang_command(source: Path) -> list[str]:
    """The clang call equivalent to the nvcc call of one source; clangd does not parse nvcc's options."""
    command = ["clang++", "-std=c++17", f"-I{SOURCES}"]
    if source.suffix != ".cu":
        return [*command, f"-I{pybind11_include()}", f"-I{sysconfig.get_path('include')}", str(source)]
    architecture = "sm_90a" if source.name.startswith("sm90_") else "sm_80"
    nvcc = find_nvcc()
    toolkit = [f"--cuda-path={Path(nvcc).resolve().parents[1]}"] if nvcc else []
    cuda = ["-x", "cuda", f"--cuda-gpu-arch={architecture}", "-nocudalib", "-Wno-unknown-cuda-version"]
    return [*command, *cuda, *toolkit, str(source)]


def sources() -> list[Path]:
    """The sources of the CUDA module. The longest compilations, the instantiations, start first."""
    return [*sorted(SOURCES.glob("instantiations/*.cu")), *sorted(SOURCES.glob("*.cu")), SOURCES / "bindings.cpp"]


def extensions() -> list[Extension]:
    """The CUDA module, or nothing on a machine without nvcc."""
    if not wanted():
        return []
    return [Extension("megatron_mtraining.backends.cuda._C", [str(source) for source in sources()])]


setup(
    license="Apache-2.0",
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "compile_commands": CompileCommands},
)
