"""``mtraining trace``: time of a training step on a GPU, read from torch profiler traces, or of one layer, measured."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    """Summarise trace files, or with ``layer`` first measure a layer on the GPUs of this machine."""
    if list(argv[:1]) == ["layer"]:
        from .layer_run import main as run_layer

        run_layer(argv[1:])
        return
    from .summary import main as summarise_files

    summarise_files(argv)
