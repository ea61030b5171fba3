"""Runs by name: the attention that each trains with."""

from __future__ import annotations

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.errors import invalid


def config_of_run(name: str) -> MTrainingConfig:
    """Return the configuration of a run; texts of every length are estimated.

    Raises:
        ValueError: there is no such run.
    """
    if name not in RUNS:
        raise invalid("--runs", f"some of {', '.join(RUNS)}", repr(name))
    return RUNS[name]()


RUNS = {
    # The weights as they are: measured, not trained.
    "untrained": lambda: MTrainingConfig(pattern="dense"),
    "dense": lambda: MTrainingConfig(pattern="dense"),
    "default": lambda: MTrainingConfig(dense_below=0),
    "cost90": lambda: MTrainingConfig(target_recall=0.90, dense_below=0),
    "cost98": lambda: MTrainingConfig(target_recall=0.98, dense_below=0),
    "algorithm1": lambda: MTrainingConfig.algorithm_1(dense_below=0),
    # 5 % of the pairs of 65536 tokens.
    "fixed5": lambda: MTrainingConfig(budget="fixed", max_vertical=1024, max_slash=12, dense_below=0),
    # 19 % of them: chunks as small beside the text as 4096 tokens are beside 524288.
    "moba": lambda: MTrainingConfig(pattern="moba", moba_chunk=512, moba_top_k=12, dense_below=0),
    "xattention": lambda: MTrainingConfig(pattern="xattention", dense_below=0),
}
