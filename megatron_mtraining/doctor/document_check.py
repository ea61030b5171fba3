"""Check that another text in some documents of a pack changes nothing in the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout, token_positions
from ..megatron.runtime import current_runtime
from ..types import VerticalSlashIndex
from .observation import Observation, is_same
from .report import LIMIT, Report, gather_objects
from .training import Batch, Training, rank_of

DOCUMENTS = "documents"


def check_documents(
    training: Training, batches: list[Batch | None], observed: Observation, report: Report, density: str
) -> None:
    """Put another text into every other document of the pack; no logit and no key of the rest may change."""
    given, seen = _of_replica(_given_bounds(batches)), _of_replica(_seen_bounds(observed))
    bounds = given or seen
    reason, unaware = _why_nothing(bounds), sum(gather_objects(bool(given and len(given) > 2 and seen is None)))
    if reason or unaware:
        text = f"the batch has documents, and attention on {unaware} ranks was given no bounds" if unaware else reason
        report.add(DOCUMENTS, text, passed=False if unaware else None)
        return
    bounds, seen = bounds or [0, training.args.seq_length], seen or []
    exact = not getattr(training.args, "num_experts", None)
    first = _observed(training, batches)
    changes, keys = [], set()
    for half in (0, 1):
        rewritten = [span for span in zip(bounds[:-1], bounds[1:], strict=True) if span[0] < span[1]][half::2]
        second = _observed(training, [_rewritten(batch, rewritten) for batch in batches])
        changes += _most_changed(training, first, second, outside=rewritten)
        keys |= _changed_keys(first, second, seen, outside=rewritten) if exact else set()
    table = gather_objects([changes, sorted(keys)])
    changes, keys = (sum((row[column] for row in table), []) for column in (0, 1))
    if not changes:
        report.add(DOCUMENTS, "the model returns no loss for each token to this script", passed=None)
        return
    worst = max(changes)
    text = f"another text in every other one of {len(bounds) - 1} documents changes the rest by {worst:.2g}"
    text += f", keys in {', '.join(sorted(set(keys)))}" if keys else ""
    if not exact:
        text += f" (experts share their work, which may round otherwise: a fault above {LIMIT:g} times rounding)"
    allowed = 0.0 if exact else LIMIT * torch.finfo(next(iter(training.parameters().values())).dtype).eps
    report.add(DOCUMENTS, f"{text}, {density}", passed=worst <= allowed and not keys)


def _given_bounds(batches: list[Batch | None]) -> list[int] | None:
    """Return the bounds of documents in the batch as the data set gave it."""
    for batch in batches:
        for name in ("cu_seqlens_padded", "cu_seqlens"):
            value = batch.get(name) if batch is not None else None
            # One row: several are joined later, and only attention is given their bounds.
            if isinstance(value, Tensor) and value.dim() and value.shape[-1] == value.numel():
                return sorted({int(bound) for bound in value.flatten().tolist() if bound >= 0})
    return None


def _seen_bounds(observed: Observation) -> list[int] | None:
    """Return the bounds of documents that attention was given."""
    for call in observed.first.values():
        if call.cu_seqlens is not None:
            return [int(bound) for bound in call.cu_seqlens.tolist()]
    return None


def _of_replica(value: Any) -> Any:
    """Return the first value that is not None of this rank's replica, whose ranks share a micro-batch. A collective."""
    replica = rank_of("data_parallel")
    return next((each for number, each in gather_objects([replica, value]) if number == replica and each), None)


def _why_nothing(bounds: list[int] | None) -> str | None:
    """Return a sentence where no replica has several documents. A collective."""
    counts = [len(each) - 1 for each in gather_objects(bounds) if each]
    if not counts:
        return "each row is one document: nothing to separate"
    return None if max(counts) > 1 else "the pack that was read holds a single document: nothing to separate"


class _Observed:
    """Logits' digests or losses of every token of this rank, and what was selected."""

    def __init__(self, observed: Observation) -> None:
        self.observed = observed
        self.logits: Tensor | None = None
        self.losses: Tensor | None = None


def _observed(training: Training, batches: list[Batch | None]) -> _Observed:
    seen = _Observed(Observation(training))
    layer = training.output_layer

    def record_logits(_module: Any, _args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        seen.logits = _digest_of_rows(logits.detach())

    def record_losses(losses: Tensor) -> None:
        seen.losses = losses.double().cpu()

    handle = layer.register_forward_hook(record_logits) if layer is not None else None
    try:
        with seen.observed:
            training.step(batches, forward_only=True, loss_hook=record_losses)
    finally:
        if handle is not None:
            handle.remove()
    return seen


def _digest_of_rows(logits: Tensor) -> Tensor:
    """Return an int64 digest for each token: a weighted sum of the bits of its logits ``[local_len, batch, vocab]``."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    bits = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    weights = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device) * -0x61C8864680B583EB
    return torch.cat([(part.long() * weights).sum(1) for part in bits.split(1024)]).cpu()


def _most_changed(
    training: Training, first: _Observed, second: _Observed, *, outside: list[tuple[int, int]]
) -> list[float]:
    """Return the largest change of a token's loss over the largest loss; tiny where bits of logits alone differ.

    Nothing on a rank that makes no losses.
    """
    if first.losses is None or first.losses.dim() < 2:
        return []
    local = _local_positions(first.losses.shape[-1])
    other = torch.ones_like(local, dtype=torch.bool)
    for start, stop in outside:
        other &= (local < start) | (local >= stop)
    change = (first.losses - second.losses).abs()[:, other]
    relative = float(change.max() / first.losses.abs().max().clamp(min=1e-30)) if change.numel() else 0.0
    if getattr(training.args, "num_experts", None) or first.logits is None or len(first.logits) != len(other):
        return [relative]
    same = torch.equal(first.logits[other], second.logits[other])
    return [relative if same else max(relative, torch.finfo(torch.float32).tiny)]


def _local_positions(local_len: int) -> Tensor:
    """Return the global positions of this rank's tokens."""
    runtime = current_runtime()
    size, config = runtime.cp_group.size(), runtime.config
    sizes = {"cp_size": size, "block_size": config.block_size, "node_size": runtime.inner_size}
    layout = SequenceLayout(config.layout, seq_len=local_len * size, **sizes)
    return token_positions(layout, cp_rank=runtime.cp_group.rank())


def _changed_keys(
    first: _Observed, second: _Observed, bounds: list[int], *, outside: list[tuple[int, int]]
) -> set[str]:
    """Return the layers in which the index of another document has changed."""
    rows = [row for row, at in enumerate(bounds[:-1]) if not any(start <= at < stop for start, stop in outside)]
    changed = set()
    for name, call in first.observed.first.items():
        one, other = call.index, second.observed.first[name].index
        if isinstance(one, VerticalSlashIndex) and one.rows == len(bounds) - 1:
            parts = [index.rebuild(*(tensor[rows] for tensor in index.tensors)) for index in (one, other)]
            if not is_same(*parts):
                changed.add(name)
    return changed


def _rewritten(batch: Batch | None, spans: list[tuple[int, int]]) -> Batch | None:
    if batch is None:
        return None
    tokens = batch["tokens"].clone()
    flat, vocab = tokens.view(-1), int(tokens.max()) + 1
    for start, stop in spans:
        steps = torch.randint(
            1, max(2, vocab), (stop - start,), device="cpu", generator=torch.Generator().manual_seed(1)
        )
        flat[start:stop] = (flat[start:stop] + steps) % max(2, vocab)
    return batch | {"tokens": tokens}
