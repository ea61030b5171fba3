"""The selection that a configuration names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import MTrainingConfig
from ..layout import SequenceLayout
from ..transport import Group
from ..types import AttentionIndex, VerticalSlashIndex
from .moba import select_moba
from .opening import open_selection
from .selection import select_vertical_slash
from .xattention import select_xattention


@torch.no_grad()
def select_dense(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    cp_group: Group | None = None,
    cu_seqlens: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> VerticalSlashIndex:
    """The index of every causal pair inside each document, in the form of the other selections.

    Arguments, errors and the agreement of ranks are those of :func:`megatron_mtraining.select_vertical_slash`.
    """
    call, _ = open_selection(
        "select_dense",
        query,
        key,
        config,
        softmax_scale=softmax_scale,
        layout=layout,
        cp_group=cp_group,
        cu_seqlens=cu_seqlens,
        meanwhile=meanwhile,
        plan=lambda _: None,
    )
    return call.dense_index()


SELECTIONS = {
    "vertical_slash": select_vertical_slash,
    "dense": select_dense,
    "moba": select_moba,
    "xattention": select_xattention,
}
"""The selection of each ``config.pattern``."""


def select_index(
    query: Tensor,
    key: Tensor,
    config: MTrainingConfig,
    *,
    softmax_scale: float | None = None,
    layout: SequenceLayout | None = None,
    cp_group: Group | None = None,
    cu_seqlens: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> AttentionIndex:
    """Which keys each query keeps, by the selection that ``config.pattern`` names; all of them take these arguments."""
    select = SELECTIONS[config.pattern]
    return select(
        query,
        key,
        config,
        softmax_scale=softmax_scale,
        layout=layout,
        cp_group=cp_group,
        cu_seqlens=cu_seqlens,
        meanwhile=meanwhile,
    )
