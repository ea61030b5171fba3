"""Checks of one training step: repeats, recomputation, documents, padding and the selected keys.

Every rank of the job calls each check, and adds the same finding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout, token_positions
from ..megatron.compat import require_symbol
from ..megatron.documents import token_id
from ..megatron.runtime import LayerRecord, current_runtime
from ..metrics import attention_recall, held_out_rows
from ..types import VerticalSlashIndex
from .flags import shortest_length
from .observation import Observation, common_share, densities, is_same
from .report import LIMIT, Report, gather_lists, gather_objects, is_anywhere
from .training import Batch, Step, Training, rank_of

ATTENTION, PARAMETERS, RECOMPUTATION = "attention twice", "all gradients twice", "recomputation"
DOCUMENTS, PADDING, SELECTION = "documents", "padding", "selected keys"
_SEED = 1234
_LEAST_COMMON = 0.9
"""Share of a layer's selected keys that padding must leave: rounding swaps a few near-ties in low precision."""

_ROWS = 64
_NEARLY_ALL = 0.9
"""The density of every layer above which the checks hardly see a selection."""


def mean_density(observed: Observation) -> float:
    """Return the density of all layers of the job. A collective over all ranks."""
    every = gather_lists([float(share.mean()) for share in densities(observed.first).values()])
    return sum(every) / max(1, len(every))


def is_packed(observed: Observation) -> bool:
    """Return whether attention was given bounds of documents anywhere. A collective over all ranks."""
    return is_anywhere(any(call.cu_seqlens is not None for call in observed.first.values()))


def check_attention_repeats(training: Training, observed: Observation, report: Report) -> None:
    """Call every attention layer twice on its recorded inputs and compare outputs and gradients bit for bit."""
    different = []
    for name, module in training.attentions.items():
        runs = [_run_alone(module, *observed.inputs[name]) for _ in range(2)]
        if not all(_same_bits(one, other) for one, other in zip(*runs, strict=True)):
            different.append(name)
    different = sorted(set(gather_lists(different)))
    text = f"outputs and gradients differ in {', '.join(different)}" if different else "the same bits in every layer"
    report.add(ATTENTION, f"{text}, {report.density}", passed=not different)


def check_gradients_repeat(training: Training, one: Step, other: Step, report: Report) -> None:
    """Compare all parameters' gradients of two steps bit for bit; they must be the same under --deterministic-mode."""
    names = [name for name, gradient in one.gradients.items() if not _same_bits(gradient, other.gradients[name])]
    names, total = sorted(set(gather_lists(names))), max(gather_objects(len(one.gradients)))
    text = f"{len(names)} parameters of up to {total} on a rank differ" + (f", {names[0]} first" if names else "")
    if getattr(training.args, "deterministic_mode", False):
        report.add(PARAMETERS, f"{text}, {report.density}", passed=not names)
    else:
        report.add(
            PARAMETERS, f"{text}, {report.density}; only --deterministic-mode promises that none do", passed=None
        )


def check_recomputation(training: Training, observed: Observation, report: Report) -> None:
    """Compare the indices of all calls of a layer in a step, whose micro-batches are all the same.

    Where the flags recompute no attention, each layer is called once more without and once with gradients.
    """
    calls, indices = max((len(each) for each in observed.indices.values()), default=0), observed.indices
    how = f"{calls} calls of a layer in a step"
    if calls <= training.args.pipeline_model_parallel_size:
        how = "these flags recompute no attention; called by hand"
        with Observation(training) as again:
            for name, module in training.attentions.items():
                args, kwargs = observed.inputs[name]
                for with_gradients in (False, True):
                    with torch.set_grad_enabled(with_gradients):
                        module(*args, **kwargs)
        indices = again.indices
    different = [name for name, each in indices.items() if not all(is_same(each[0], other) for other in each[1:])]
    different = sorted(set(gather_lists(different)))
    text = f"other keys in {', '.join(different)}" if different else "the same index"
    report.add(RECOMPUTATION, f"{text}; {how}, {report.density}", passed=not different)


def _run_alone(module: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return output and gradients of query, key and value for a fixed gradient of the output."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in args[:3]]
    out = module(*inputs, *args[3:], **kwargs)
    generator = torch.Generator(out.device).manual_seed(_SEED)
    grad = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def check_documents(training: Training, batches: list[Batch | None], observed: Observation, report: Report) -> None:
    """Put another text into every other document of the pack; no logit and no key of the rest may change."""
    given, seen = _of_replica(_given_bounds(batches)), _of_replica(_seen_bounds(observed))
    bounds = given or seen
    counts = [len(each) - 1 for each in gather_objects(bounds) if each]
    unaware = sum(gather_objects(bool(given and len(given) > 2 and seen is None)))
    if unaware:
        text = f"the batch has documents, and attention on {unaware} ranks was given no bounds"
        report.add(DOCUMENTS, text, passed=False)
        return
    if max(counts, default=0) <= 1:
        what = "the pack that was read holds a single document" if counts else "each row is one document"
        report.add(DOCUMENTS, f"{what}: nothing to separate", passed=None)
        return
    bounds, seen = bounds or [0, training.args.seq_length], seen or []
    exact = not getattr(training.args, "num_experts", None)
    first = _logits_and_losses(training, batches)
    changes, keys = [], []
    for half in (0, 1):
        rewritten = [span for span in zip(bounds[:-1], bounds[1:], strict=True) if span[0] < span[1]][half::2]
        second = _logits_and_losses(training, [_rewritten(batch, rewritten) for batch in batches])
        changes += _most_changed(first, second, outside=rewritten, exact=exact)
        keys += _changed_keys(first[0], second[0], seen, outside=rewritten) if exact else []
    changes, keys = gather_lists(changes), sorted(set(gather_lists(keys)))
    if not changes:
        report.add(DOCUMENTS, "the model returns no loss for each token to this script", passed=None)
        return
    worst = max(changes)
    text = f"another text in every other one of {len(bounds) - 1} documents changes the rest by {worst:.2g}"
    text += f", keys in {', '.join(keys)}" if keys else ""
    if not exact:
        text += f" (experts share their work, which may round otherwise: a fault above {LIMIT:g} times rounding)"
    allowed = 0.0 if exact else LIMIT * torch.finfo(next(iter(training.parameters().values())).dtype).eps
    report.add(DOCUMENTS, f"{text}, {report.density}", passed=worst <= allowed and not keys)


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
    bounds = (call.cu_seqlens for call in observed.first.values() if call.cu_seqlens is not None)
    return next((each.tolist() for each in bounds), None)


def _of_replica(value: Any) -> Any:
    """Return the first value that is not None of this rank's replica, whose ranks share a micro-batch. A collective."""
    replica = rank_of("data_parallel")
    return next((each for number, each in gather_objects([replica, value]) if number == replica and each), None)


_Seen = tuple[Observation, dict[str, Tensor]]
"""Observation of a forward pass, with a digest of each token's ``logits`` and its ``losses`` where a rank has any."""


def _logits_and_losses(training: Training, batches: list[Batch | None]) -> _Seen:
    seen: dict[str, Tensor] = {}
    layer = training.output_layer

    def record_logits(_module: Any, _args: Any, output: Any) -> None:
        seen["logits"] = _digest_of_rows((output[0] if isinstance(output, tuple) else output).detach())

    def record_losses(losses: Tensor) -> None:
        seen["losses"] = losses.double().cpu()

    handle = layer.register_forward_hook(record_logits) if layer is not None else None
    try:
        with Observation(training) as observed:
            training.step(batches, forward_only=True, loss_hook=record_losses)
    finally:
        if handle is not None:
            handle.remove()
    return observed, seen


def _digest_of_rows(logits: Tensor) -> Tensor:
    """Return an int64 digest for each token: a weighted sum of the bits of its logits ``[local_len, batch, vocab]``."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    bits = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    weights = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device) * -0x61C8864680B583EB
    return torch.cat([(part.long() * weights).sum(1) for part in bits.split(1024)]).cpu()


def _most_changed(first: _Seen, second: _Seen, *, outside: list[tuple[int, int]], exact: bool) -> list[float]:
    """Return the largest change of a token's loss over the largest loss; tiny where bits of logits alone differ.

    Nothing on a rank that makes no losses.
    """
    (_, one), (_, other) = first, second
    losses, logits = one.get("losses"), one.get("logits")
    if losses is None or losses.dim() < 2:
        return []
    group = current_runtime().cp_group
    sequence = current_runtime().split.sequence(losses.shape[-1] * group.size(), group.size())
    local = token_positions(sequence, cp_rank=group.rank())
    unchanged = torch.ones_like(local, dtype=torch.bool)
    for start, stop in outside:
        unchanged &= (local < start) | (local >= stop)
    change = (losses - other["losses"]).abs()[:, unchanged]
    relative = float(change.max() / losses.abs().max().clamp(min=1e-30)) if change.numel() else 0.0
    if not exact or logits is None or len(logits) != len(unchanged):
        return [relative]
    same = torch.equal(logits[unchanged], other["logits"][unchanged])
    return [relative if same else max(relative, torch.finfo(torch.float32).tiny)]


def _changed_keys(
    first: Observation, second: Observation, bounds: list[int], *, outside: list[tuple[int, int]]
) -> list[str]:
    """Return the layers in which the index of another document has changed."""
    rows = [row for row, at in enumerate(bounds[:-1]) if not any(start <= at < stop for start, stop in outside)]
    changed = []
    for name, call in first.first.items():
        one, other = call.index, second.first[name].index
        if isinstance(one, VerticalSlashIndex) and one.rows == len(bounds) - 1:
            parts = [index.rebuild(*(tensor[rows] for tensor in index.tensors)) for index in (one, other)]
            changed += [] if is_same(*parts) else [name]
    return changed


def _rewritten(batch: Batch | None, spans: list[tuple[int, int]]) -> Batch | None:
    if batch is None:
        return None
    tokens = batch["tokens"].clone()
    flat, vocab = tokens.view(-1), max(2, int(tokens.max()) + 1)
    for start, stop in spans:
        generator = torch.Generator().manual_seed(1)
        steps = torch.randint(1, vocab, (stop - start,), device="cpu", generator=generator)
        flat[start:stop] = (flat[start:stop] + steps) % vocab
    return batch | {"tokens": tokens}


def check_padding(training: Training, batches: list[Batch | None], observed: Observation, report: Report) -> None:
    """End the text early, by padding and by a shorter sequence; both must select the same keys."""
    seq_len, text_len = training.args.seq_length, _text_length(training)
    reason = _why_no_padding(observed, batches, text_len)
    if reason:
        report.add(PADDING, reason, passed=None)
        return
    with Observation(training) as padded:
        training.step([_padded(batch, text_len) for batch in batches], forward_only=True)
    training.args.seq_length = text_len
    try:
        with Observation(training) as text:
            training.step([_shortened(batch, text_len) for batch in batches], forward_only=True)
    finally:
        training.args.seq_length = seq_len
    common = [common_share(call.index, padded.first[name].index, seq_len=text_len) for name, call in text.first.items()]
    least = min(gather_lists(common))
    result = f"{text_len} tokens of text select {least:.1%} of their keys when {seq_len - text_len} of padding follow"
    result += f" (a fault below {_LEAST_COMMON:.0%}), density {mean_density(text):.1%}"
    report.add(PADDING, result, passed=least >= _LEAST_COMMON)


def _text_length(training: Training) -> int:
    """Return three quarters of the sequence, or what attends sparsely, as the layout divides it."""
    args = training.args
    sizes = {"cp_size": args.context_parallel_size, "block_size": args.mtraining_block_size}
    multiple = SequenceLayout.required_multiple(args.mtraining_layout, **sizes)
    return max(shortest_length(args), args.seq_length * 3 // 4 // multiple * multiple)


def _why_no_padding(observed: Observation, batches: list[Batch | None], text_len: int) -> str | None:
    """Return why there is nothing to check. A collective over all ranks."""
    calls = list(observed.first.values())
    packed, lists = is_packed(observed), is_anywhere(any(not isinstance(c.index, VerticalSlashIndex) for c in calls))
    if not is_anywhere(any(batch is not None and "loss_mask" in batch for batch in batches)):
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
    known = (token_id(tokenizer, name) for name in ("pad", "eod"))
    pad = next((token for token in known if token is not None), 0)
    changed = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
    for name, fill in (("tokens", pad), ("labels", pad), ("loss_mask", 0)):
        if isinstance(changed.get(name), Tensor):
            changed[name][:, text_len:] = fill
    return changed


def _shortened(batch: Batch | None, text_len: int) -> Batch | None:
    if batch is None:
        return None
    return {
        name: value[:, :text_len].clone() if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in batch.items()
    }


def check_selection(observed: Observation, report: Report) -> None:
    """Measure every layer on rows that no estimator uses. A fault is only a recall that is no number."""
    shares = densities(observed.first)
    own = [_layer(name, call, shares[name]) for name, call in observed.first.items()]
    is_first = current_runtime().cp_group.rank() == 0 and rank_of("data_parallel") == 0
    parts: dict[str, list[dict[str, Any]]] = {}
    for part in gather_lists(own if is_first else []):
        parts.setdefault(part["layer"], []).append(part)
    report.layers = [_of_all_heads(each) for each in parts.values()]
    wrong = [each["layer"] for each in report.layers if not 0.0 <= each["recall"] <= 1.0 + 1e-4]
    worst = min(report.layers, key=lambda layer: layer["worst_recall"])
    text = f"worst {worst['layer']}, head {worst['worst_head']}: recall {worst['worst_recall']:.4f}, {report.density}"
    report.add(SELECTION, f"no number in {', '.join(wrong)}" if wrong else text, passed=not wrong)
    if min(layer["density"] for layer in report.layers) > _NEARLY_ALL:
        report.notes.append("nearly every key is selected: lower --mtraining-target-recall to see more of selection")
    report.notes.append("weights are those of a new model, so recall says little about a trained model's")


def _layer(name: str, call: LayerRecord, density: Tensor) -> dict[str, Any]:
    """Return the metrics of one layer on this rank's heads. A collective over the context-parallel group."""
    runtime = current_runtime()
    text = {"cu_seqlens": call.cu_seqlens, "num_valid": call.num_valid}
    rows = held_out_rows(runtime.config, seq_len=call.layout.seq_len, count=_ROWS, **text)
    of_heads = density.new_full((call.query.shape[2],), math.nan)
    if rows:
        given = {"softmax_scale": call.softmax_scale, "layout": call.layout, "groups": runtime.cp_group}
        recall = attention_recall(call.query, call.key, call.index, rows=rows, cu_seqlens=call.cu_seqlens, **given)
        of_heads = recall.double().mean((0, 2)).cpu()
    worst = int(of_heads.argmin())
    return {
        "layer": name,
        "density": float(density.mean()),
        "recall": float(of_heads.mean()),
        "worst_head": rank_of("tensor_model_parallel") * len(of_heads) + worst,
        "worst_recall": float(of_heads[worst]),
    }


def _of_all_heads(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one layer of all tensor-parallel ranks."""
    worst = min(parts, key=lambda part: part["worst_recall"])
    return worst | {name: sum(part[name] for part in parts) / len(parts) for name in ("density", "recall")}
