"""Check what `make wheels` built: tags, contents, and that the compiled module needs neither torch nor a CUDA library.

    python -m tools.check_wheels dist

A module is loaded by the Python that its wheel is for, without any installed package, where that Python is found.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEM_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0", "libdl.so.2"}
SYSTEM_LIBRARIES |= {"librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
ARCHITECTURES = {("code", 80), ("ptx", 80), ("code", 90)}
"""Machine code for 8.x, PTX for what comes after, and Hopper's own."""

_MODULE = re.compile(r"megatron_mtraining/backends/cuda/_C\.cpython-3\d+-.*\.so")
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes of entries
_FATBIN_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")  # kind, version, header bytes, payload bytes; the architecture stands at byte 28
_KINDS = {1: "ptx", 2: "code"}
_LOAD = """
import importlib.util, os, sys
sys.setdlopenflags(os.RTLD_NOW)  # every symbol, now
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert hasattr(module, "sm80_launch") and hasattr(module, "sm90_launch") and "torch" not in sys.modules
"""


def architectures(module: bytes) -> set[tuple[str, int]]:
    """Return ``(code or ptx, compute capability times ten)`` of every entry of a compiled module's fat binaries."""
    found: set[tuple[str, int]] = set()
    position = module.find(_FATBIN_MAGIC.to_bytes(4, "little"))
    while 0 <= position <= len(module) - _FATBIN.size:
        _, _, header, length = _FATBIN.unpack_from(module, position)
        entry, end = position + header, position + header + length
        while entry + 32 <= min(end, len(module)):
            kind, _, entry_header, payload = _ENTRY.unpack_from(module, entry)
            found.add((_KINDS.get(kind, "other"), struct.unpack_from("<I", module, entry + 28)[0]))
            entry += entry_header + payload
        position = module.find(_FATBIN_MAGIC.to_bytes(4, "little"), max(end, position + 4))
    return found


def needed_libraries(module: Path) -> set[str]:
    """Return the shared libraries that a module asks the loader for, as ``readelf -d`` lists them."""
    report = subprocess.run(["readelf", "-d", str(module)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", report))


def module_faults(module: Path) -> list[str]:
    """Return the faults of a compiled module, whatever Python it is for."""
    faults = []
    if foreign := needed_libraries(module) - SYSTEM_LIBRARIES:
        faults.append(f"{module.name} must need system libraries only, got {', '.join(sorted(foreign))}.")
    if missing := ARCHITECTURES - architectures(module.read_bytes()):
        faults.append(f"{module.name} must hold code for every architecture, got none of {sorted(missing)}.")
    return faults


def load_fault(module: Path, version: str) -> str | None:
    """Load ``module`` in Python ``version`` without site-packages; None if it loads or there is no such Python."""
    search = subprocess.run([ROOT / "tools" / "find_python.sh", version], capture_output=True, text=True)
    if search.returncode:
        print(f"{module.name}: not loaded, no Python {version} here")
        return None
    command = [search.stdout.strip(), "-I", "-S", "-c", _LOAD, str(module)]
    run = subprocess.run(command, capture_output=True, text=True)
    return f"{module.name} must load alone, got: {run.stderr.strip()}" if run.returncode else None


def wheel_faults(wheel: Path) -> list[str]:
    """Return the faults of a wheel."""
    if wheel.stem.count("-") < 4 or not zipfile.is_zipfile(wheel):
        return [f"{wheel.name} must be a wheel, got another file."]
    *_, python, _, platform = wheel.stem.split("-")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
        if platform == "any":
            return [f"{wheel.name} must hold no compiled module, got {compiled}."] if compiled else []
        wanted = f"megatron_mtraining/backends/cuda/_C.cpython-{python.removeprefix('cp')}-"
        if len(compiled) != 1 or not (_MODULE.fullmatch(compiled[0]) and compiled[0].startswith(wanted)):
            return [f"{wheel.name} must hold one module {wanted}*.so, got {compiled}."]
        module = Path(archive.extract(compiled[0], folder))
        fault = load_fault(module, f"3.{python.removeprefix('cp3')}")
        return module_faults(module) + ([fault] if fault else [])


def main(folder: Path) -> int:
    """Print a line for each wheel; return 1 when something is wrong or missing."""
    wheels = sorted(folder.glob("*.whl"))
    faults = [fault for wheel in wheels for fault in wheel_faults(wheel)]
    if not any(wheel.stem.endswith("-py3-none-any") for wheel in wheels):
        faults.append(f"{folder} must hold a wheel without kernels, tagged py3-none-any, got none.")
    if all(wheel.stem.endswith("-any") for wheel in wheels):
        faults.append(f"{folder} must hold a wheel with kernels, got none. Run: make wheels")
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print("\n".join(faults) or "Every wheel is right.")
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.check_wheels FOLDER")
    sys.exit(main(Path(sys.argv[1])))
