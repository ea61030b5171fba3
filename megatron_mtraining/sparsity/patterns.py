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
    num_valid: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> VerticalSlashIndex:
    """The index of every causal pair inside each document, in the form of the other selections.

    Arguments are those of :func:`megatron_mtraining.select_index`; of ``config`` it reads the block size and who has
    a list. ``query`` and ``key`` give shapes and the device, their values are not read.

    Returns:
        All distances, no vertical: one list in memory for all rows and heads.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
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
        num_valid=num_valid,
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
    num_valid: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> AttentionIndex:
    """Which keys each query keeps, by the selection that ``config.pattern`` names.

    Args:
        query: ``[batch, seq, num_heads, head_dim]``; this rank's tokens when ``layout`` is given.
        key: ``[batch, seq, num_kv_heads, head_dim]``, likewise.
        config: the pattern, and what its selection reads.
        softmax_scale: the attention's own; default ``head_dim ** -0.5``.
        layout: which rank holds which tokens; given together with ``cp_group``.
        cp_group: the context-parallel process group, or any :class:`~megatron_mtraining.transport.base.Transport`.
        cu_seqlens: int32 ``[documents + 1]`` over the global sequence, for packed documents; ``batch`` is then 1.
        num_valid: int32 or int64 ``[batch]``, or with ``cu_seqlens`` ``[documents]``: tokens of each before padding.
            Padding stands at the end and chooses no key: what the others keep is what they would keep without it. A row
            of padding alone keeps distance 0. Default: nothing is padded. Reading it off a device waits for it.
        meanwhile: called once, after ranks have agreed on the plan: what depends on no index may set off there.

    Returns:
        A ``VerticalSlashIndex`` over the global sequence, the same on every rank; or of ``moba`` and ``xattention``
        a ``BlockListIndex`` with the lists of this rank's query blocks.

    Raises:
        ValueError: an argument does not fit; the sentence names it and the rule.
        RankMismatchError: ranks called with different arguments, or not all of them select.
    """
    # What is no configuration has no pattern: any selection refuses it, and other ranks learn of that.
    select = SELECTIONS.get(getattr(config, "pattern", None), select_dense)
    return select(
        query,
        key,
        config,
        softmax_scale=softmax_scale,
        layout=layout,
        cp_group=cp_group,
        cu_seqlens=cu_seqlens,
        num_valid=num_valid,
        meanwhile=meanwhile,
    )
