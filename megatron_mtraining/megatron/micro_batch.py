"""Micro batch of a model's forward pass: its length is checked, and its padding reaches every attention layer.

One wrapper around the forward pass of Megatron's models does both (docs/decisions/0019). Layers that a backward pass
recomputes find the padding of the micro batch that this backward pass is of: it is noted again as soon as the gradient
of the model's output exists, before any layer runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..errors import invalid
from ..layout import token_positions
from ..ranks import is_first_rank
from ..tensors import to_device
from ..transport.host_messages import HostMessages
from .compat import Patches, arguments_of, global_of_training, models, require_symbol
from .documents import Padding, find_padding

if TYPE_CHECKING:
    from .runtime import Runtime

_UTILS = "megatron.core.utils"
_MOST_SPLITS = 64
"""Number of split batches whose padding is stored: those that a script splits before training starts."""

_LOG = logging.getLogger(__name__)
_SPLIT_ONCE = "Split every batch once, with get_batch_on_this_cp_rank or megatron_mtraining.megatron.shard_batch."
_VARIABLE = "Pass --variable-seq-lengths (variable_seq_lengths=True) where lengths are meant to change."


@dataclass(slots=True)
class _Split:
    """A batch with padding that was split."""

    tokens: Tensor
    """Tokens of this rank."""

    padding: Padding
    times_used: int = 0


class MicroBatches:
    """Padding of the micro batches of this process, and the wrappers that find it."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._runtime: Runtime | None = None
        self._stages: StagePadding | None = None
        self._splits: deque[_Split] = deque(maxlen=_MOST_SPLITS)
        self._last_split: Callable[[], Tensor | None] = lambda: None
        self._loss_mask: Tensor | None = None
        self._depth = 0
        self._forward: Padding | None = None
        self._backward: Padding | None = None

    def start(self, runtime: Runtime) -> None:
        """Wrap the models' forward passes and Megatron's functions that read and split batches. A collective."""
        self._runtime, wrap = runtime, self._patches.wrap
        for module_name, name, _ in models():
            wrap(module_name, f"{name}.forward", self._run_forward, parameters=("input_ids", "labels"))
        wrap(_UTILS, "get_batch_on_this_cp_rank", self._split, parameters=("batch",))
        utils = require_symbol("megatron.core", "utils")
        if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
            wrap(_UTILS, "get_thd_batch_on_this_cp_rank", self._split_pack, parameters=("batch", "cu_seqlens"))
        if hasattr(utils, "get_batch_on_this_tp_rank"):  # before, batches and masks are read in megatron.training
            wrap(_UTILS, "get_batch_on_this_tp_rank", self._read, parameters=("batch",))
        self._stages = StagePadding.create()

    def stop(self) -> None:
        """Remove the wrappers and drop all batches."""
        self._patches.undo()
        if self._stages is not None:
            self._stages.destroy()
        self.__init__()

    def note_split(self, batch: Mapping[str, Any], part: Mapping[str, Any]) -> None:
        """Count the padding of a whole ``batch`` for the model that will be given this rank's ``part`` of it."""
        loss_mask, self._loss_mask = batch.get("loss_mask"), None
        bounds = _bounds_of(batch) or {name: batch.get(name) for name in ("cu_seqlens", "cu_seqlens_padded")}
        padding, tokens = find_padding(batch.get("tokens"), loss_mask, **bounds), part.get("tokens")
        if tokens is not None:
            self._last_split = ref(tokens)
            if padding is not None:
                self._splits.append(_Split(tokens, padding))

    def current_padding(self) -> Padding | None:
        """Return the padding of the micro batch that the calling layer is run for; None where none was found."""
        if self._depth:
            return self._forward
        is_in_backward = torch._C._current_autograd_node() is not None
        return self._backward if is_in_backward else None

    def known_padding(self, given: Mapping[str, Any]) -> Padding | None:
        """Return the padding of the tokens that a model is called with: counted before the split, or in them now."""
        tokens = given.get("input_ids")
        is_last_split = tokens is not None and tokens is self._last_split()
        if tokens is None or is_last_split and not any(split.tokens is tokens for split in self._splits):
            return None
        found = self._find_split(tokens)
        if found is not None:
            found.times_used += 1
            return found.padding
        if is_last_split or parallel_state.get_context_parallel_world_size() > 1:
            return None
        return find_padding(tokens, given.get("loss_mask"), **_bounds_of(given))

    def _find_split(self, tokens: Tensor) -> _Split | None:
        """Return the split that made ``tokens``, or a copy of them on another device; the least used one of several."""
        own = [split for split in self._splits if split.tokens is tokens]
        if not own:
            on_host = tokens.cpu() if any(split.tokens.device.type == "cpu" for split in self._splits) else tokens
            own = [split for split in self._splits if _is_same(split.tokens, on_host)]
        return min(own, key=lambda split: split.times_used, default=None)

    def _read(self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Store the loss mask, which the first of several pipeline stages drops, until the batch is split."""
        batch = arguments_of(original, args, kwargs).get("batch")
        self._loss_mask = batch.get("loss_mask") if batch else None
        return original(*args, **kwargs)

    def _split(self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = dict(arguments_of(original, args, kwargs)["batch"])
        if whole.get("loss_mask") is None:
            whole["loss_mask"] = self._loss_mask
        part = original(*args, **kwargs)
        self.note_split(whole, part)
        return part

    def _split_pack(self, original: Callable[..., tuple[dict[str, Any], Any]], *args: Any, **kwargs: Any) -> Any:
        given = arguments_of(original, args, kwargs)
        whole = given["batch"] | {name: given.get(name) for name in ("cu_seqlens", "cu_seqlens_padded")}
        part, params = original(*args, **kwargs)
        self.note_split(whole, part)
        return part, params

    def _run_forward(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of a model, or of its part on a pipeline stage; text generation is left unchanged."""
        given = arguments_of(original, (model, *args), kwargs)
        if given.get("inference_context") is not None or given.get("inference_params") is not None:
            return original(model, *args, **kwargs)
        check_length(model, given, self._runtime)
        if self._stages is None:
            padding = self.known_padding(given)
        elif self._stages.is_source(model):
            padding = self._stages.send(model, self.known_padding(given))
        else:
            padding = self._stages.receive(model)
        with self._running(padding):
            out = original(model, *args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(functools.partial(self._note_backward, padding))
        return out

    @contextlib.contextmanager
    def _running(self, padding: Padding | None) -> Iterator[None]:
        before, self._forward = self._forward, padding
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._forward = before

    def _note_backward(self, padding: Padding | None, _: Any) -> None:
        self._backward = padding


def _bounds_of(given: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the bounds of packed documents in ``packed_seq_params``; nothing where these describe no pack."""
    params = given.get("packed_seq_params")
    if params is None or params.qkv_format != "thd":
        return {}
    return {"cu_seqlens": params.cu_seqlens_q, "cu_seqlens_padded": params.cu_seqlens_q_padded}


def _is_same(tokens: Tensor, others: Tensor) -> bool:
    return tokens.shape == others.shape and torch.equal(tokens, others.to(tokens.device))


class StagePadding:
    """Padding of each micro batch, from the pipeline stage that reads tokens to all other ranks of one model replica.

    A collective would block the schedule: a stage takes part only once the activations have reached it. So the first
    stage sends a few integers from host to host and continues; the others take them when they run that micro batch.
    Every stage runs its micro batches in the same order, which is all that sender and receivers have in common.
    """

    def __init__(self, messages: HostMessages, num_parts: int) -> None:
        self._messages, self._num_parts = messages, num_parts
        self._known: dict[int, Padding | None] = {}
        self._received = 0
        self._taken: Counter[int | None] = Counter()

    @classmethod
    def create(cls) -> StagePadding | None:
        """Create the group; None where there is one pipeline stage. A collective over all ranks."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return None
        num_parts = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return cls(HostMessages.among(parallel_state.get_model_parallel_group()), num_parts)

    def destroy(self) -> None:
        """End the group, when no message is in flight."""
        self._messages.destroy()

    def is_source(self, model: Any) -> bool:
        """Return whether ``model`` is the part that reads tokens, on the rank that sends their padding."""
        return model.pre_process and self._messages.is_source

    def send(self, model: Any, padding: Padding | None) -> Padding | None:
        """Send the next micro batch's padding to all other ranks, and to this one's other parts of the model."""
        self._store(padding)
        self._messages.send([] if padding is None else padding.as_integers())
        return self.receive(model)

    def receive(self, model: Any) -> Padding | None:
        """Return the padding of the micro batch that ``model`` runs next; wait until the first stage has sent it."""
        part = getattr(model, "vp_stage", None)
        number = self._taken[part]
        self._taken[part] += 1
        while self._received <= number:
            numbers = self._messages.receive()
            self._store(Padding.from_integers(numbers) if numbers else None)
        padding = self._known[number]
        if len(self._taken) == self._num_parts:
            for old in [each for each in self._known if each < min(self._taken.values())]:
                del self._known[old]
        return padding

    def _store(self, padding: Padding | None) -> None:
        self._known[self._received] = padding
        self._received += 1


def check_length(model: Any, given: Mapping[str, Any], runtime: Runtime) -> None:
    """Check that a model on several context-parallel ranks is given this rank's part of a sequence, split once.

    Packed documents are left to their bounds, which end where the pack does.

    Args:
        model: a GPTModel or HybridModel, or its part on a pipeline stage.
        given: the arguments of its forward pass by name.
        runtime: of this process.

    Raises:
        ValueError: a batch that nobody split, one that was split twice, or one of another length than Megatron's.
    """
    cp_size = runtime.cp_group.size()
    tokens = next((given[name] for name in ("input_ids", "labels") if given.get(name) is not None), None)
    if cp_size == 1 or tokens is None or tokens.dim() != 2:
        return
    params = given.get("packed_seq_params")
    if params is None or params.qkv_format != "thd":
        _check_total(model, tokens.shape[1], runtime)
    if given.get("position_ids") is not None and given["position_ids"].shape == tokens.shape:
        _check_positions(given["position_ids"], runtime, cp_size)


def _check_total(model: Any, local_len: int, runtime: Runtime) -> None:
    cp_size = runtime.cp_group.size()
    expected, name = getattr(global_of_training("get_args"), "seq_length", None), "--seq-length"
    if expected is None:
        expected, name = model.max_sequence_length, "max_sequence_length"
    if local_len * cp_size == expected:
        return
    is_training = model.training and torch.is_grad_enabled()
    if local_len * cp_size < expected and (not is_training or model.config.variable_seq_lengths):
        kind = ("evaluation", local_len)
        if not is_training and is_first_rank() and kind not in runtime.checked_lengths:
            seq_len = local_len * cp_size
            _LOG.warning("evaluation of sequences of %d tokens, shorter than %s %d.", seq_len, name, expected)
            runtime.checked_lengths.add(kind)
        return
    causes = {expected: "a batch that nobody split", expected // cp_size**2: "a batch that was split twice"}
    cause = causes.get(local_len, "a sequence of another length")
    raise invalid(
        f"The tokens of a sequence on each of {cp_size} context-parallel ranks",
        f"{expected // cp_size}, of {name} {expected}",
        f"{local_len}: {cause}",
        _SPLIT_ONCE if local_len in causes else f"{_SPLIT_ONCE} {_VARIABLE}",
    )


def _check_positions(position_ids: Tensor, runtime: Runtime, cp_size: int) -> None:
    """Check the first batch of each length; the host waits for it."""
    kind = (tuple(position_ids.shape), runtime.cp_group.rank())
    if kind in runtime.checked_lengths:
        return
    runtime.checked_lengths.add(kind)
    layout = runtime.split.sequence(position_ids.shape[1] * cp_size, cp_size)
    expected = to_device(token_positions(layout, cp_rank=runtime.cp_group.rank()), position_ids.device)
    ahead = position_ids - expected
    # Positions that restart in each document lag behind; a text that is continued is ahead everywhere alike.
    if bool(((ahead > 0).any(1) & (ahead != ahead[:, :1]).any(1)).any()):
        raise invalid(
            "position_ids",
            f"those of this rank's tokens in layout {layout.kind}",
            "others: a batch that was split twice, or by another layout",
            _SPLIT_ONCE,
        )
