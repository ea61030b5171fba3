"""Common parts of both scores of antidiagonals: groups of tokens, rotating keys, chunks selected by their mass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..request import AttentionRequest
from ..transport import Transport
from .block_lists import are_short, documents_of, ends_of_text, first_tokens


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of ``stride`` neighbouring tokens."""

    values: Tensor
    """``[..., groups, stride, head_dim]``; flattened or rounded further."""

    number: Tensor
    """int64 ``[groups]``, global."""

    document: Tensor
    """int64 ``[groups]``: document that each counts for."""


def groups_of_block(request: AttentionRequest) -> int:
    """Groups in a block of the layout."""
    return request.config.block_size // request.config.xattention_stride


def num_chunks(request: AttentionRequest) -> int:
    """Chunks of ``xattention_block`` keys in the whole sequence."""
    return -(-request.shards.layout.seq_len // request.config.xattention_block)


def grouped(tokens: Tensor, blocks: Tensor, request: AttentionRequest, *, speaker: int) -> Groups:
    """Cut the tokens of some blocks into groups; what lies behind the last token is zero.

    Args:
        tokens: ``[..., tokens, head_dim]``.
        blocks: int64: their blocks, on the same device.
        request: the selection.
        speaker: the position in a group of the token whose document counts; tokens of another one become zeros.
    """
    size, stride = request.config.block_size, request.config.xattention_stride
    tokens = pad(tokens, (0, 0, 0, len(blocks) * size - tokens.shape[-2])).unflatten(-2, (-1, stride))
    number = numbers_of(blocks, request)
    of_token = documents_of_tokens(number, request)
    if request.documents is not None:
        tokens = tokens.masked_fill((of_token != of_token[:, speaker, None]).unsqueeze(-1), 0.0)
    return Groups(tokens, number, of_token[:, speaker])


def numbers_of(blocks: Tensor, request: AttentionRequest) -> Tensor:
    """Return the global group numbers of int64 blocks, int64 ``[groups]``."""
    per_block = groups_of_block(request)
    return (blocks.unsqueeze(-1) * per_block + torch.arange(per_block, device=blocks.device)).flatten()


def documents_of_tokens(number: Tensor, request: AttentionRequest) -> Tensor:
    """int64 ``[groups, stride]``: the document of each token of some groups."""
    stride = request.config.xattention_stride
    return documents_of(number.unsqueeze(-1) * stride + torch.arange(stride, device=number.device), request)


def rotating_keys(key: Tensor, transport: Transport) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number and keys, this rank's first; the next ones are transferred meanwhile."""
    for step in range(transport.size):
        transfer = transport.exchange(key) if step + 1 < transport.size else None
        yield (transport.rank - step) % transport.size, key
        if transfer is not None:
            key = transfer.wait()


def chunks_of_mass(mass: Tensor, blocks: Tensor, queries: Groups, request: AttentionRequest) -> Tensor:
    """Return the chunks that some query blocks select, bool ``[..., blocks, chunks]``.

    Args:
        mass: integers ``[..., groups, chunks]``: each query group's, in one unit.
        blocks: int64 ``[blocks]``: the query blocks.
        queries: their groups.
        request: the selection.
    """
    config, per_block = request.config, groups_of_block(request)
    document = documents_of(blocks * config.block_size, request)
    is_text = queries.number * config.xattention_stride < ends_of_text(request, mass.device)[queries.document]
    counts = (queries.document == document.repeat_interleave(per_block, output_size=len(is_text))) & is_text
    own = (blocks // (config.xattention_block // config.block_size)).unsqueeze(-1)
    mass = mass.masked_fill(~counts.unsqueeze(-1), 0).unflatten(-2, (-1, per_block)).sum(-2, dtype=mass.dtype)
    selected = select_until(mass, own.expand(*mass.shape[:-1], 1), threshold=config.xattention_threshold)
    chunk = torch.arange(selected.shape[-1], device=selected.device)
    first = (first_tokens(request, selected.device)[document] // config.xattention_block).unsqueeze(-1)
    selects_all = are_short(request, selected.device)[document].unsqueeze(-1)
    return selected | selects_all & (chunk >= first) & (chunk <= own)


def select_until(mass: Tensor, own: Tensor, *, threshold: float) -> Tensor:
    """Select the own chunk, then others from the greatest on until their mass reaches the share of all.

    Args:
        mass: integers ``[..., blocks, chunks]``; a chunk without mass is not selected. Ties break by the lower chunk.
        own: int64 ``[..., blocks, 1]``: the chunk that is selected whatever its mass, and first.
        threshold: of the whole mass; what crosses it is selected too.
    """
    needed = mass.sum(-1, keepdim=True).double() * threshold
    others = mass.scatter(-1, own, 0)
    value, chunk = others.sort(dim=-1, descending=True, stable=True)
    before = mass.gather(-1, own) + value.cumsum(-1) - value
    selected = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, chunk, (before < needed) & (value > 0))
    return selected.scatter_(-1, own, True)
