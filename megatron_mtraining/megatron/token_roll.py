"""Roll of tokens across ranks, which multi-token prediction shifts its inputs and labels with.

Megatron's ``roll_tensor`` takes a rank's tokens for two pieces of the sequence. Under another layout a rank holds many
blocks, and the last token of each needs the first of the block that follows, from whichever rank holds that. Nothing
would fail without it: the model would train on the wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import invalid
from ..tensors import to_device
from ..transport import as_transport
from .compat import require_symbol
from .packing import documents_of
from .token_split import TokenSplit

_MTP = "megatron.core.transformer.multi_token_prediction"


def replacements(split: TokenSplit) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return Megatron's ``roll_tensor`` with the one that follows ``split``.

    Raises:
        MissingSymbolError: this Megatron-Core has no such function.
    """
    original = require_symbol(
        _MTP, "roll_tensor", parameters=("tensor", "shifts", "dims", "cp_group", "packed_seq_params")
    )
    return [(original, _roll(split, original))]


def _roll(split: TokenSplit, original: Callable[..., Any]) -> Callable[..., Any]:
    def roll_tensor(
        tensor: Tensor | None,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        return_sum: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return each token's successor in the sequence or document, zero for the last, and the sum of them here."""
        if tensor is None:
            return None, None
        if cp_group is None or cp_group.size() == 1:
            options = {} if return_sum else {"return_sum": False}  # earlier releases have no such parameter
            return original(tensor, shifts, dims, cp_group, packed_seq_params, **options)
        if shifts != -1:
            raise invalid("shifts", "-1, one token to the left", shifts, "Use --mtraining-layout zigzag.")
        rolled = _Successor.apply(tensor.movedim(dims, 0), split, cp_group).movedim(0, dims)
        if packed_seq_params is not None:
            rolled = _ended_at_documents(rolled, dims, split, cp_group, packed_seq_params)
        return rolled, rolled.sum() if return_sum else None

    return roll_tensor


class _Successor(torch.autograd.Function):
    """Each token's successor in the sequence; the gradient goes back to it from its predecessor."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, split: TokenSplit, cp_group: Any) -> Tensor:
        """Return the successors of ``tokens``, ``[local_len, ...]``, in the rank's order."""
        ctx.split, ctx.cp_group = split, cp_group
        return _neighbours(tokens, split, cp_group, step=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _neighbours(gradient, ctx.split, ctx.cp_group, step=-1), None, None


def _neighbours(tokens: Tensor, split: TokenSplit, cp_group: Any, *, step: int) -> Tensor:
    """Return the token ``step`` (1 or -1) further in the sequence for each of ``[local_len, ...]``; zero at its end."""
    transport = as_transport(cp_group)
    blocks = tokens.reshape(-1, split.block_size, *tokens.shape[1:])
    given, wanted = (0, -1) if step == 1 else (-1, 0)  # which token of a block another needs, which one needs another's
    held = split.blocks_by_rank(tokens.shape[0] * transport.size, transport.size, tokens.device)
    gathered = transport.all_gather(blocks[:, given].contiguous()).flatten(0, 1)
    in_order = torch.empty_like(gathered)
    in_order[held.flatten()] = gathered
    beyond = torch.roll(in_order, -step, dims=0)
    beyond[wanted] = 0
    rolled = torch.roll(blocks, -step, dims=1)
    rolled[:, wanted] = beyond[held[transport.rank]]
    return rolled.reshape(tokens.shape)


def _ended_at_documents(rolled: Tensor, dims: int, split: TokenSplit, cp_group: Any, packed_seq_params: Any) -> Tensor:
    """Return ``rolled`` with zero for the last token of each document, whose successor belongs to the next one."""
    seq_len = rolled.shape[dims] * cp_group.size()
    bounds = to_device(documents_of(packed_seq_params, seq_len=seq_len), rolled.device)
    ends_here = torch.zeros(seq_len + 1, dtype=torch.bool, device=rolled.device)
    ends_here[bounds.long()] = True
    ends = ends_here[split.positions(seq_len, cp_group, rolled.device) + 1]
    shape = [1] * rolled.dim()
    shape[dims] = -1
    return rolled.masked_fill(ends.view(shape), 0)
