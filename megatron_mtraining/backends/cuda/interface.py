"""Interface stamp of the compiled module and of the sources beside it: a stale build in a checkout is an error.

setup.py loads this file on its own, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "csrc"
"""The sources of a checkout; an installed package has none."""

BUILD_COMMAND = (
    "MTRAINING_CUDA=1 python setup.py build_ext --inplace"
    if SOURCES.is_dir()
    else "MTRAINING_CUDA=1 pip install --no-build-isolation ."
)
"""Command that builds the module for the package that is running: into a checkout, or from one into the environment."""

HOW_TO_BUILD = (
    f"Run `{BUILD_COMMAND}` {'on' if SOURCES.is_dir() else 'in a checkout of this project, on'} a machine with nvcc."
)
"""The same as a sentence."""

_DECLARATIONS = ("*params.h", "*launch.h", "*bindings.*")
"""The files with the names and types that Python and the compiled module must agree on."""


def interface_digest(sources: Path = SOURCES) -> str | None:
    """Return twelve hexadecimal digits of the files that declare the interface, or None where there are no sources."""
    paths = sorted(path for pattern in _DECLARATIONS for path in sources.glob(pattern))
    if not paths:
        return None
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:12]
