"""Kinds of inference by name: the configuration of the prefill. Decoding is dense in all."""

from __future__ import annotations

from dataclasses import replace

from ..config import MTrainingConfig

NAMES = ("dense", "mtraining", "algorithm_1", "moba", "xattention")


def config_of(name: str, own: MTrainingConfig, *, length: int) -> MTrainingConfig:
    """Return the configuration of a prefill; texts of every length are estimated.

    Args:
        name: of NAMES; ``algorithm_1`` is the pattern of MInference.
        own: configuration that ``mtraining`` stands for.
        length: tokens; the chunks of MoBA are a 128th of it, as 4096 tokens are of 524288, and 12 are selected.
    """
    if name == "mtraining":
        return replace(own, dense_below=0)
    if name == "algorithm_1":
        return MTrainingConfig.algorithm_1(dense_below=0)
    if name == "moba":
        block = own.block_size
        return MTrainingConfig(pattern="moba", moba_chunk=max(1, length // 128 // block) * block, dense_below=0)
    return MTrainingConfig(pattern=name, dense_below=0)
