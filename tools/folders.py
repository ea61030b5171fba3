"""Check of the folder that a tool writes to, before it measures for minutes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron_mtraining.errors import invalid


def check_folder(flag: str, folder: Path) -> None:
    """Make ``folder`` where it is not there, and write into it.

    Raises:
        ValueError: naming ``flag``, where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise invalid(flag, "a folder that can be written", f"{folder}: {error.strerror}") from None


def check_file(flag: str, path: Path) -> None:
    """Make the folder of ``path`` where it is not there, and write into it.

    Raises:
        ValueError: naming ``flag``, where that cannot be done or ``path`` is a folder itself.
    """
    if path.is_dir():
        raise invalid(flag, "a file", f"the folder {path}")
    check_folder(flag, path.parent)
