"""Check that padding after a text leaves the text the keys that it gets without padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layout import SequenceLayout
from ..megatron.compat import require_symbol
from ..types import VerticalSlashIndex
from .flags import shortest_length
from .observation import Observation, common_share
from .report import Report, gather_objects
from .selection import in_percent, mean_density
from .training import Batch, Training

PADDING = "padding"
LEAST_COMMON = 0.9
"""Share of a layer's selected keys that padding must leave: rounding swaps a few near-ties in low precision."""


def check_padding(training: Training, batches: list[Batch | None], observed: Observation, report: Report) -> None:
    """End the text early, by padding and by a shorter sequence; both must select the same keys."""
    text_len = _text_length(training)
    reason = _why_no_padding(observed, batches, text_len)
    if reason:
        report.add(PADDING, reason, passed=None)
        return
    padded, text = Observation(training), Observation(training)
    with padded:
        training.step([_padded(batch, text_len) for batch in batches], forward_only=True)
    seq_len, training.args.seq_length = training.args.seq_length, text_len
    try:
        with text:
            training.step([_shortened(batch, text_len) for batch in batches], forward_only=True)
    finally:
        training.args.seq_length = seq_len
    common = [common_share(call.index, padded.first[name].index, seq_len=text_len) for name, call in text.first.items()]
    least = min(sum(gather_objects(common), []))
    result = f"{text_len} tokens of text select {least:.1%} of their keys when {seq_len - text_len} of padding follow"
    result += f" (a fault below {LEAST_COMMON:.0%}), {in_percent(mean_density(text))}"
    report.add(PADDING, result, passed=least >= LEAST_COMMON)


def _text_length(training: Training) -> int:
    least = shortest_length(training.args)
    return max(least, training.args.seq_length * 3 // 4 // _multiple(training) * _multiple(training))


def _multiple(training: Training) -> int:
    args = training.args
    return SequenceLayout.required_multiple(
        args.mtraining_layout, cp_size=args.context_parallel_size, block_size=args.mtraining_block_size
    )


def _why_no_padding(observed: Observation, batches: list[Batch | None], text_len: int) -> str | None:
    calls = list(observed.first.values())
    packed = any(gather_objects(any(call.cu_seqlens is not None for call in calls)))
    lists = any(gather_objects(any(not isinstance(call.index, VerticalSlashIndex) for call in calls)))
    masked = any(gather_objects(any(batch is not None and "loss_mask" in batch for batch in batches)))
    if not masked:
        return "the batch has no loss_mask, which would mark padding"
    if packed:
        return "the batch is packed: its padding belongs to a document"
    if lists:
        return "this pattern selects keys for every block by itself"
    if calls and text_len >= calls[0].layout.seq_len:
        return f"the sequence must be longer than {text_len} tokens to hold text and padding"
    return None


def _padded(batch: Batch | None, text_len: int) -> Batch | None:
    if batch is None:
        return None
    tokenizer = require_symbol("megatron.training.global_vars", "get_tokenizer")()
    changed = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
    pad = _pad_token(tokenizer)
    for name in ("tokens", "labels"):
        if isinstance(changed.get(name), Tensor):
            changed[name][:, text_len:] = pad
    if isinstance(changed.get("loss_mask"), Tensor):
        changed["loss_mask"][:, text_len:] = 0
    return changed


def _pad_token(tokenizer: Any) -> int:
    for name in ("pad", "eod"):
        try:
            token = getattr(tokenizer, name)
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _shortened(batch: Batch | None, text_len: int) -> Batch | None:
    if batch is None:
        return None
    return {
        name: value[:, :text_len].clone() if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in batch.items()
    }
