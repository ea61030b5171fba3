"""Micro batch that a model is at: its length is checked, and its padding reaches every attention layer.

One wrapper around the forward pass of Megatron's models does both. Layers that a backward pass recomputes find the
padding of the micro batch that this backward pass is of: it is noted again as soon as the gradient of the model's
output is there, before any layer runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from megatron.core import parallel_state
from torch import Tensor

from .compat import has_module, require_symbol
from .padding import Padding, find_padding
from .patching import Patches
from .sequence_length import check_length
from .stage_padding import StagePadding

if TYPE_CHECKING:
    from .runtime import Runtime

_UTILS, _TRAINING_UTILS = "megatron.core.utils", "megatron.training.utils"
_MODELS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel"),
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
    ("megatron.core.models.mamba.mamba_model", "MambaModel"),
)
"""Names of the models; core 0.18 and later call MambaModel HybridModel, and the former is a subclass of it there."""

_MOST_SPLITS = 64
"""Number of split batches with padding that are remembered: those that a script splits before training starts."""


@dataclass(slots=True)
class _Split:
    """A batch with padding that was split."""

    tokens: Tensor
    """Tokens of this rank."""

    padding: Padding
    times_used: int = 0


class _State:
    """Micro batches known to this process."""

    def __init__(self) -> None:
        self.patches = Patches()
        self.splits: deque[_Split] = deque(maxlen=_MOST_SPLITS)
        self.last_split: Callable[[], Tensor | None] = lambda: None
        self.loss_mask: Tensor | None = None
        self.runtime: Runtime | None = None
        self.stages: StagePadding | None = None
        self.depth = 0
        self.forward: Padding | None = None
        self.backward: Padding | None = None


_state = _State()


def install(runtime: Runtime) -> None:
    """Wrap the models' forward passes and the functions of Megatron that read and split batches. A collective."""
    _state.runtime, patches = runtime, _state.patches
    for module_name, name in _MODELS:
        if has_module(module_name) and "forward" in vars(require_symbol(module_name, name)):
            patches.wrap_method(module_name, name, "forward", _forward, parameters=("input_ids", "labels"))
    patches.wrap(_UTILS, "get_batch_on_this_cp_rank", _split, parameters=("batch",))
    utils = require_symbol("megatron.core", "utils")
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
        patches.wrap(_UTILS, "get_thd_batch_on_this_cp_rank", _split_pack, parameters=("batch", "cu_seqlens"))
    if hasattr(
        utils, "get_batch_on_this_tp_rank"
    ):  # earlier releases read batches in megatron.training, masks with them
        patches.wrap(_UTILS, "get_batch_on_this_tp_rank", _read, parameters=("batch",))
    _state.stages = StagePadding.create()


def uninstall() -> None:
    """Take the wrappers off and forget all batches."""
    _state.patches.undo()
    if _state.stages is not None:
        _state.stages.destroy()
    _state.__init__()


def note_split(batch: Mapping[str, Any], part: Mapping[str, Any]) -> None:
    """Count the padding of a whole ``batch`` for the model that will be given this rank's ``part`` of it."""
    loss_mask, _state.loss_mask = batch.get("loss_mask"), None
    bounds = _bounds_of(batch) or {name: batch.get(name) for name in ("cu_seqlens", "cu_seqlens_padded")}
    _remember(part.get("tokens"), find_padding(batch.get("tokens"), loss_mask, **bounds))


def current_padding() -> Padding | None:
    """Return the padding of the micro batch that the calling layer is run for; None if there is none or none known."""
    if _state.depth:
        return _state.forward
    is_in_backward = torch._C._current_graph_task_id() != -1
    return _state.backward if is_in_backward else None


def _remember(tokens: Tensor | None, padding: Padding | None) -> None:
    if tokens is None:
        return
    _state.last_split = ref(tokens)
    if padding is not None:
        _state.splits.append(_Split(tokens, padding))


def _read(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Keep the loss mask, which the first of several pipeline stages drops, until the batch is split."""
    batch = inspect.signature(original).bind(*args, **kwargs).arguments.get("batch")
    _state.loss_mask = batch.get("loss_mask") if batch else None
    return original(*args, **kwargs)


def _split(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    whole = dict(inspect.signature(original).bind(*args, **kwargs).arguments["batch"])
    if whole.get("loss_mask") is None:
        whole["loss_mask"] = _state.loss_mask
    part = original(*args, **kwargs)
    note_split(whole, part)
    return part


def _split_pack(original: Callable[..., tuple[dict[str, Any], Any]], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    whole = given["batch"] | {name: given.get(name) for name in ("cu_seqlens", "cu_seqlens_padded")}
    part, params = original(*args, **kwargs)
    note_split(whole, part)
    return part, params


def _forward(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward pass of a model, or of its part on a pipeline stage; one that generates text is left alone."""
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    if given.get("inference_context") is not None or given.get("inference_params") is not None:
        return original(model, *args, **kwargs)
    check_length(model, given, _state.runtime)
    padding = _padding_of(model, given)
    with _current(padding):
        out = original(model, *args, **kwargs)
    if torch.is_grad_enabled():
        _note_in_backward(out, padding)
    return out


@contextlib.contextmanager
def _current(padding: Padding | None) -> Iterator[None]:
    before, _state.forward = _state.forward, padding
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        _state.forward = before


def _note_in_backward(out: Any, padding: Padding | None) -> None:
    def note(_: Any) -> None:
        _state.backward = padding

    for tensor in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(note)


def _padding_of(model: Any, given: Mapping[str, Any]) -> Padding | None:
    """Return the padding of the micro batch that a model is called with."""
    if _state.stages is None:
        return _known_padding(given)
    if _state.stages.is_source(model):
        return _state.stages.send(model, _known_padding(given))
    return _state.stages.receive(model)


def _known_padding(given: Mapping[str, Any]) -> Padding | None:
    tokens = given.get("input_ids")
    if tokens is None or tokens is _state.last_split() and not _is_padded(tokens):
        return None
    found = _find_split(tokens)
    if found is not None:
        found.times_used += 1
        return found.padding
    if tokens is _state.last_split() or parallel_state.get_context_parallel_world_size() > 1:
        return None
    return find_padding(tokens, given.get("loss_mask"), **_bounds_of(given))


def _bounds_of(given: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the bounds of packed documents in ``packed_seq_params``; nothing where these describe no pack."""
    params = given.get("packed_seq_params")
    if params is None or params.qkv_format != "thd":
        return {}
    return {"cu_seqlens": params.cu_seqlens_q, "cu_seqlens_padded": params.cu_seqlens_q_padded}


def _is_padded(tokens: Tensor) -> bool:
    return any(split.tokens is tokens for split in _state.splits)


def _find_split(tokens: Tensor) -> _Split | None:
    """Return the split that gave ``tokens``, or a copy of them on another device; the least used one of several."""
    own = [split for split in _state.splits if split.tokens is tokens]
    if not own:
        on_host = tokens.cpu() if any(split.tokens.device.type == "cpu" for split in _state.splits) else tokens
        own = [split for split in _state.splits if _is_same(split.tokens, on_host)]
    return min(own, key=lambda split: split.times_used, default=None)


def _is_same(tokens: Tensor, others: Tensor) -> bool:
    return tokens.shape == others.shape and torch.equal(tokens, others.to(tokens.device))
