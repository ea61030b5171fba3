"""Documents and padding of a batch: read off Megatron's PackedSeqParams, tokens and loss mask, and made for a script.

Padding is the trailing run of a row or document that is masked and holds one token (docs/decisions/0019). It is counted
in the whole batch, before that is split over the context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..errors import invalid
from ..tensors import to_device
from ..types import Documents
from .compat import global_of_training

_CACHE = "_mtraining_documents"
_MADE_BY = "Use megatron_mtraining.megatron.packed_seq_params."
_ZERO = 0
"""The token that Megatron's datasets write for padding, whatever the tokenizer's pad token is."""


def documents_of(params: PackedSeqParams | None, *, seq_len: int) -> Tensor:
    """Return the bounds of the documents, padding between them as documents of its own.

    Reading them off a device waits for it, so they are cached on ``params`` for the next layers, until one of the
    tensors is another one or was written to. On the CPU reading costs nothing, and they are read at every call: a
    loader may fill them through memory whose version torch does not count.

    Args:
        params: ``cu_seqlens_q`` and, where documents are padded, ``cu_seqlens_q_padded``, over the whole pack.
        seq_len: tokens in the whole pack.

    Returns:
        int32 ``[documents + 1]``, on the CPU, sharing no memory with ``params``.

    Raises:
        ValueError: no bounds, bounds that do not cover the pack, or other bounds for keys than for queries.
    """
    if params is None or params.cu_seqlens_q is None:
        raise invalid("packed_seq_params", "given with cu_seqlens for packed input", params, _MADE_BY)
    if params.qkv_format != "thd":
        raise invalid("packed_seq_params.qkv_format", "'thd'", repr(params.qkv_format), _MADE_BY)
    sources = (params.cu_seqlens_q, params.cu_seqlens_kv, params.cu_seqlens_q_padded)
    # torch counts every writing to a tensor of a device, but for those of inference mode.
    is_counted = all(each is None or (each.device.type != "cpu" and not each.is_inference()) for each in sources)
    if not is_counted:
        return _read(params, seq_len)
    state = (seq_len, *((id(each), None if each is None else each._version) for each in sources))
    cached = getattr(params, _CACHE, None)
    if cached is None or cached[0] != state:
        cached = state, _read(params, seq_len), sources  # which are held so that no id becomes another tensor's
        setattr(params, _CACHE, cached)
    return cached[1]


def _read(params: PackedSeqParams, seq_len: int) -> Tensor:
    bounds, keys = params.cu_seqlens_q.cpu(), params.cu_seqlens_kv
    if keys is not None and keys is not params.cu_seqlens_q and not torch.equal(keys.cpu(), bounds):
        raise invalid("cu_seqlens_kv", "equal to cu_seqlens_q", keys.tolist(), "Attention is to itself.")
    if params.cu_seqlens_q_padded is None:
        bounds = bounds.clone()
    else:
        starts = params.cu_seqlens_q_padded.cpu()
        ends_of_tokens = starts[:-1] + bounds.diff()
        bounds = torch.cat([torch.stack([starts[:-1], ends_of_tokens], dim=1).flatten(), starts[-1:]]).contiguous()
    Documents.from_cu_seqlens(bounds, seq_len=seq_len)  # checks them
    return bounds


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of one whole micro batch, as host integers."""

    runs: tuple[tuple[int, int, int], ...]
    """Batch row, first token and one past the last of every run; ascending, each at the end of its row or document."""

    rows: int
    """Batch rows."""

    seq_len: int
    """Tokens in each, on all context-parallel ranks."""

    def num_valid(self, cu_seqlens: Tensor | None, *, rows: int, seq_len: int) -> Tensor:
        """Return int32 on the CPU: tokens before the padding of every batch row, or every document of ``cu_seqlens``.

        Raises:
            ValueError: the attention has another batch than the one that was counted.
        """
        if (self.rows, self.seq_len) != (rows, seq_len):
            raise invalid(
                "the batch of an attention layer",
                f"the {self.rows} rows of {self.seq_len} tokens that were split",
                f"{rows} rows of {seq_len}",
                "Pass the model the tokens that were split.",
            )
        row, first, stop = torch.tensor(self.runs, device="cpu").view(-1, 3).unbind(1)
        if cu_seqlens is None:
            counts = torch.full((rows,), seq_len, dtype=torch.int32, device="cpu")
            counts[row] = first.int()
            return counts
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        run = torch.searchsorted(stop, ends).clamp_(max=len(stop) - 1)
        is_padded = (first[run] < ends) & (ends <= stop[run])
        return (torch.maximum(first[run], starts).where(is_padded, ends) - starts).int()

    def as_integers(self) -> list[int]:
        """Return the integers of which :meth:`from_integers` makes the same padding again."""
        return [self.rows, self.seq_len, *sum(self.runs, ())]

    @classmethod
    def from_integers(cls, numbers: list[int]) -> Padding:
        """Return the padding that :meth:`as_integers` described."""
        rows, seq_len, *runs = numbers
        return cls(tuple(zip(runs[::3], runs[1::3], runs[2::3], strict=True)), rows, seq_len)


def find_padding(
    tokens: Tensor | None,
    loss_mask: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
) -> Padding | None:
    """Return the padding of a whole batch; None where there is none, or no loss mask to find it by.

    A run is padding when it ends a row or document, its loss mask is 0 and its tokens are all the same one: 0 or the
    tokenizer's pad token; its end-of-document token, or without a tokenizer any token, where there are two or more.
    A prompt whose labels are masked is text. What lies behind ``cu_seqlens`` in ``cu_seqlens_padded`` is padding too.
    The host waits for the device once, and once more where anything is masked.

    Args:
        tokens: int64 ``[batch, seq_len]``, of the whole sequence.
        loss_mask: of as many elements.
        cu_seqlens: int32 ``[documents + 1]`` or ``[1, documents + 1]``, for packed documents.
        cu_seqlens_padded: likewise, where documents are padded to other bounds.
    """
    if tokens is None or loss_mask is None or loss_mask.numel() != tokens.numel():
        return None
    flat, masked = tokens.flatten(), loss_mask.flatten() == 0
    if cu_seqlens_padded is None and not masked.any():
        return None
    rows, seq_len = tokens.shape
    starts, ends, valid = _spans(rows, seq_len, cu_seqlens, cu_seqlens_padded, tokens.device)
    if cu_seqlens is not None:
        masked = _without_next_document(flat, masked, ends)
    for _ in range(2):  # a loader's padding, and behind it that of pad_batch
        valid = _before_the_run(flat, masked, starts, ends, valid)
    table = torch.stack((starts, ends, valid), dim=1).cpu()
    runs = [(start // seq_len, stop, end) for start, end, stop in table.tolist() if stop < end]
    shifted = tuple((row, first - row * seq_len, stop - row * seq_len) for row, first, stop in runs)
    return Padding(shifted, rows, seq_len) if shifted else None


def _spans(
    rows: int, seq_len: int, cu_seqlens: Tensor | None, padded: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return int64 start and end of every row or document that holds a token, and the end of its text by its bounds."""
    if cu_seqlens is None:
        starts = torch.arange(rows, device=device) * seq_len
        return starts, starts + seq_len, starts + seq_len
    lengths = cu_seqlens.flatten().to(device).long().diff()
    bounds = (cu_seqlens if padded is None else padded).flatten().to(device).long()
    starts, ends = bounds[:-1], bounds[1:]
    return starts, ends, torch.minimum(starts + lengths, ends)


def _before_the_run(tokens: Tensor, masked: Tensor, starts: Tensor, ends: Tensor, stops: Tensor) -> Tensor:
    """Return the int64 start of the padding that ends at ``stops``; ``stops`` where there is none."""
    position = torch.arange(len(tokens), device=tokens.device)
    owner = torch.searchsorted(ends, position, right=True).clamp_(max=len(ends) - 1)
    last = tokens[(stops - 1).clamp(min=0)]
    is_pad = masked & (tokens == last[owner])
    is_text = ~is_pad & (position < stops[owner])
    behind_text = starts.scatter_reduce(0, owner, (position + 1) * is_text, "amax").minimum(stops)
    return behind_text.where(_are_pad_tokens(last, stops - behind_text), stops)


def _without_next_document(tokens: Tensor, masked: Tensor, ends: Tensor) -> Tensor:
    """Return ``masked``, a document's last token like the same token before it: its label is the next document's."""
    is_last = torch.zeros_like(masked).index_fill_(0, (ends - 1).clamp(min=0), True)
    return masked | is_last & masked.roll(1) & (tokens == tokens.roll(1))


def _are_pad_tokens(tokens: Tensor, run_lengths: Tensor) -> Tensor:
    """Return bool: whether runs of these tokens are padding."""
    tokenizer = global_of_training("get_tokenizer")
    pad, end = token_id(tokenizer, "pad"), token_id(tokenizer, "eod")
    is_pad = tokens == _ZERO
    if pad is not None:
        is_pad |= tokens == pad
    if pad is None and end is None:
        return is_pad | (run_lengths > 1)
    return is_pad | (run_lengths > 1) & (tokens == end) if end is not None else is_pad


def token_id(tokenizer: Any, name: str) -> int | None:
    """Return the ``pad`` or ``eod`` (end of document) token of Megatron's tokenizer; None where it has none."""
    try:
        token = getattr(tokenizer, name)
    except (AttributeError, NotImplementedError):
        return None
    return token if isinstance(token, int) and token >= 0 else None


def positions_in_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return int64, shaped as ``positions``: each global position counted from the start of its document."""
    on_host = cu_seqlens.device.type == "cpu"
    bounds = to_device(cu_seqlens, positions.device) if on_host else cu_seqlens.to(positions.device)
    bounds = bounds.to(positions.dtype)
    # right=True with empty documents: the last of several equal bounds is the start of the one that has tokens.
    document = torch.searchsorted(bounds, positions, right=True) - 1
    return positions - bounds[document]


def pad_batch(batch: Mapping[str, Any], multiple: int, *, pad_token: int = 0) -> dict[str, Any]:
    """Lengthen a batch to a multiple of ``multiple`` tokens that count for no loss.

    In a packed batch the padding becomes a document of its own. In any other it follows the tokens, which causal
    attention hides. Either way it selects no key.

    Args:
        batch: as for :func:`megatron_mtraining.megatron.shard_batch`; ``cu_seqlens`` may be given,
            ``packed_seq_params`` is made afterwards.
        multiple: :meth:`megatron_mtraining.SequenceLayout.required_multiple`.
        pad_token: the token that fills ``tokens`` and ``labels``.

    Raises:
        ValueError: no ``loss_mask`` to mark the padding in, or ``packed_seq_params`` made already.
    """
    if batch.get("packed_seq_params") is not None:
        raise invalid(
            "packed_seq_params", "made after padding", "one before", "Pass cu_seqlens, then packed_seq_params()."
        )
    seq_len = batch["tokens"].shape[1]
    padding = -seq_len % multiple
    if not padding:
        return dict(batch)
    if batch.get("loss_mask") is None:
        raise invalid("loss_mask", "given for a batch that is padded", None, "Pass one; padding must not count.")
    padded = dict(batch)
    for name, fill in (("tokens", pad_token), ("labels", pad_token), ("loss_mask", 0)):
        if batch.get(name) is not None:
            padded[name] = F.pad(batch[name], (0, padding), value=fill)
    if batch.get("position_ids") is not None:
        ids = batch["position_ids"]
        tail = torch.arange(padding, dtype=ids.dtype, device=ids.device).expand(ids.shape[0], -1)
        start = 0 if batch.get("cu_seqlens") is not None else seq_len
        padded["position_ids"] = torch.cat([ids, tail + start], dim=1)
    if batch.get("cu_seqlens") is not None:
        padded["cu_seqlens"] = torch.cat([batch["cu_seqlens"], batch["cu_seqlens"].new_tensor([seq_len + padding])])
    return padded


def document_position_ids(cu_seqlens: Tensor) -> Tensor:
    """Return int64 ``[1, tokens]`` positions that restart per document of ``cu_seqlens``, int32 ``[documents + 1]``."""
    positions = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    return positions_in_documents(positions, cu_seqlens)[None]


def packed_seq_params(
    cu_seqlens: Tensor, *, cu_seqlens_padded: Tensor | None = None, max_seqlen: int | None = None
) -> PackedSeqParams:
    """Return Megatron's description of a pack of documents, for ``GPTModel.forward``.

    Args:
        cu_seqlens: int32 ``[documents + 1]``, over the whole pack: from 0 to the number of its tokens.
        cu_seqlens_padded: likewise, where documents are padded to other bounds.
        max_seqlen: tokens of the longest document. Default: read off ``cu_seqlens``, for which the host waits.
    """
    longest = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
    bounds = {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
    both = {f"{name}_{of}": value for name, value in bounds.items() for of in ("q", "kv")}
    padded = {f"cu_seqlens_{of}_padded": cu_seqlens_padded for of in ("q", "kv")}
    return PackedSeqParams(qkv_format="thd", **both, **padded)
