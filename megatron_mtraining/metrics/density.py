"""Count of the (query, key) pairs that an index selects, exact from its lists, and the FLOPs that they take.

No tensor of blocks x blocks or seq x seq is made. Entries behind the counts of a list are not read, as no backend reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import invalid
from ..request import checked_counts, valid_spans
from ..tensors import to_device
from ..types import Documents, VerticalSlashIndex


def causal_pairs(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """int64 ``[rows]``: pairs that dense causal attention computes for one head; those inside each document."""
    lengths = [stop - start for start, stop in row_spans(index, seq_len=seq_len, cu_seqlens=cu_seqlens)]
    return to_device(triangle(torch.tensor(lengths, dtype=torch.int64, device="cpu")), index.vertical.device)


def computed_pairs(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """int64 ``[rows, num_lists]``: pairs that a head computes by each list; one that is vertical and slash counts once.

    Args:
        index: the keys of each head.
        seq_len: tokens in the global sequence.
        cu_seqlens: int32 ``[documents + 1]``, for packed documents.
    """
    return computed_pairs_of_spans(index, row_spans(index, seq_len=seq_len, cu_seqlens=cu_seqlens), seq_len=seq_len)


def computed_pairs_of_spans(index: VerticalSlashIndex, spans: Sequence[tuple[int, int]], *, seq_len: int) -> Tensor:
    """Count as :func:`computed_pairs` where the rows of ``index`` are of ``spans``, first token and one past the last.

    The host does not wait for the device.
    """
    table = to_device(torch.tensor(spans, dtype=torch.int64, device="cpu"), index.vertical.device)
    start, stop = table[:, :, None, None].unbind(1)
    vertical, slash = counted_verticals(index, seq_len=seq_len), counted_slashes(index, seq_len=seq_len)
    only_vertical = _vertical_only_pairs(vertical, slash, index.block_size, start, stop)
    return _slash_pairs(slash, index.block_size, start, stop).sum(-1) + only_vertical.sum(-1)


def density(index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """float64 ``[num_lists]``: computed pairs over causal pairs, all rows together. Their mean is that of all heads."""
    computed = computed_pairs(index, seq_len=seq_len, cu_seqlens=cu_seqlens).sum(0)
    return computed.double() / causal_pairs(index, seq_len=seq_len, cu_seqlens=cu_seqlens).sum()


def triangle(length: int | Tensor) -> int | Tensor:
    """Causal pairs of ``length`` tokens."""
    return length * (length + 1) // 2


def _slash_pairs(distance: Tensor, size: int, start: Tensor, stop: Tensor) -> Tensor:
    """int64 ``[rows, num_lists, max_s]``: pairs at each distance; only a row's first and last block may be short."""
    first_block, last_block = start // size, (stop - 1) // size
    blocks = last_block - first_block + 1
    in_first, in_last = (first_block + 1) * size - start, stop - last_block * size
    diagonal = triangle(in_first) + triangle(in_last) + (blocks - 2) * triangle(torch.tensor(size, device="cpu"))
    diagonal = torch.where(blocks == 1, triangle(stop - start), diagonal)
    farthest = in_first * in_last
    between = (in_first + in_last + (blocks - 2 - distance) * size) * size
    pairs = torch.where(distance == 0, diagonal, torch.where(distance == blocks - 1, farthest, between))
    # Padding is farther than any block; an empty row has no pair even at distance 0.
    return pairs.masked_fill((distance >= blocks) | (stop == start), 0)


def _vertical_only_pairs(position: Tensor, slash: Tensor, size: int, start: Tensor, stop: Tensor) -> Tensor:
    """int64 ``[rows, num_lists, max_v]``: the queries of each vertical in whose block row no slash covers it."""
    block, last_block = position // size, (stop - 1) // size
    reach = last_block - block
    nearer = torch.searchsorted(slash, reach.contiguous())
    at_reach = slash.gather(2, nearer.clamp(max=slash.shape[2] - 1)) == reach
    # Of the block rows after the vertical's own, which distance 0 covers, all are whole but the last.
    covered = (nearer - 1) * size + at_reach * (stop - last_block * size)
    after_own_block = stop - (block + 1) * size
    is_in_row = (position >= start) & (position < stop) & (reach > 0)
    return (after_own_block - covered).masked_fill(~is_in_row, 0)


def counted_verticals(index: VerticalSlashIndex, *, seq_len: int) -> Tensor:
    """int64 ``[rows, num_lists, max_v]``: the verticals, ascending; ``seq_len`` behind those that count."""
    return _counted(index.vertical, index.num_vertical, seq_len)


def counted_slashes(index: VerticalSlashIndex, *, seq_len: int) -> Tensor:
    """int64 ``[rows, num_lists, max_s]``: the distances, ascending; the number of blocks behind those that count."""
    return _counted(index.slash, index.num_slash, -(-seq_len // index.block_size))


def _counted(entries: Tensor, counts: Tensor, padding: int) -> Tensor:
    position = torch.arange(entries.shape[-1], device=entries.device)
    return entries.long().where(position < counts.unsqueeze(-1), padding)


def row_spans(
    index: VerticalSlashIndex, *, seq_len: int, cu_seqlens: Tensor | None, num_valid: Tensor | None = None
) -> tuple[tuple[int, int], ...]:
    """Return ``(first token, one past the last)`` of each row: the whole sequence, or with ``cu_seqlens`` a document.

    Raises:
        ValueError: ``cu_seqlens`` is not valid, or names other than ``index.rows`` documents.
    """
    spans = spans_of(index.rows, seq_len=seq_len, cu_seqlens=cu_seqlens, num_valid=num_valid)
    if len(spans) != index.rows:
        raise invalid("index.rows", f"the {len(spans)} documents of cu_seqlens", index.rows)
    return spans


def spans_of(
    batch: int, *, seq_len: int, cu_seqlens: Tensor | None, num_valid: Tensor | None = None
) -> tuple[tuple[int, int], ...]:
    """Return the same of ``batch`` rows, or of the documents in ``cu_seqlens``; of each the first ``num_valid``.

    Raises:
        ValueError: ``cu_seqlens`` or ``num_valid`` is not valid.
    """
    whole = ((0, seq_len),) * batch
    if cu_seqlens is not None:
        whole = Documents.from_cu_seqlens(cu_seqlens, seq_len=seq_len).spans
    return valid_spans(whole, checked_counts(num_valid, whole))


def tokens_per_block(start: int, stop: int, *, block_size: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 ``[blocks]`` on ``device``: number of the tokens ``start`` to ``stop - 1`` that lie in each block.

    The blocks are those that the span touches, from ``start // block_size`` on; none where it is empty.
    """
    if start == stop:
        return torch.zeros(0, dtype=torch.int64, device=device)
    edges = torch.arange(start // block_size, (stop - 1) // block_size + 2, device=device) * block_size
    return edges.clamp(start, stop).diff()


def forward_flops(pairs: int | Tensor, *, head_dim: int) -> int | Tensor:
    """``4 * pairs * head_dim``: two products, scores and output, of a multiply and an add each.

    Args:
        pairs: (query, key) pairs, added up over heads and rows; see :func:`megatron_mtraining.metrics.computed_pairs`.
        head_dim: elements in a query.
    """
    return 4 * pairs * head_dim


def backward_flops(pairs: int | Tensor, *, head_dim: int) -> int | Tensor:
    """``10 * pairs * head_dim``: five products; the scores again, and the gradients of p, value, query and key."""
    return 10 * pairs * head_dim


def model_flops(pairs: int | Tensor, *, head_dim: int) -> int | Tensor:
    """``12 * pairs * head_dim``: a training step as Megatron counts it, the forward products once and twice again.

    What a backward computes anew is left out: the scores, and the whole forward where activations are recomputed.
    """
    return 3 * forward_flops(pairs, head_dim=head_dim)
