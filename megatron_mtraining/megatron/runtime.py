"""State of this package in a process: one :class:`Process`, and in it the :class:`Runtime` of the attention layers."""

from __future__ import annotations

import contextlib
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core import parallel_state
from torch import Tensor

from ..arguments import config_from_args
from ..config import MTrainingConfig
from ..config_file import config_from_environment
from ..errors import as_integer, invalid
from ..layout import SequenceLayout
from ..planner.auto import RingCall, decide
from ..planner.profile import profile_of_machine
from ..transport import RingGroups, as_transport, create_ring_groups, destroy_ring_groups
from ..transport.groups import gather_placement
from ..types import AttentionIndex
from .compat import Patches, global_of_training, hierarchical_sizes
from .micro_batch import MicroBatches
from .split import TokenSplit, follow_layout, split_batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .meter import Meter

_LOG = logging.getLogger(__name__)

_BETWEEN_HOSTS = (
    "Inner rings of %d ranks go from host to host, and every step waits for that link: no more than %d neighbours of "
    "each context-parallel group share a host. Pass that as inner_size, or as the first of "
    "--hierarchical-context-parallel-sizes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One attention call of one layer, as seen by this rank."""

    index: AttentionIndex
    """Index of each of this rank's query heads; the same on every context-parallel rank, except for block lists."""

    layout: SequenceLayout
    """Layout of the sequence."""

    softmax_scale: float
    """Scale of the scores."""

    cu_seqlens: Tensor | None
    """Bounds of the documents of a packed call, int32 ``[documents + 1]``, on the CPU."""

    num_valid: Tensor | None = None
    """Tokens of each row or document before its padding, int32 ``[batch]`` or ``[documents]``, on the CPU, or None."""

    query: Tensor | None = None
    """Query ``[batch, local_len, num_heads, head_dim]``, detached, when capture was asked for."""

    key: Tensor | None = None
    """Key ``[batch, local_len, num_kv_heads, head_dim]``, detached, when capture was asked for."""


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionRecorder:
    """The last call of each layer since recording began; nothing is recorded outside of a recording."""

    capture_query_key: bool = False
    """True if queries and keys are recorded too, which recall is computed from."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    """Records by layer number, counted from 1 as Megatron does."""

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Replace the record of a layer; see :class:`AttentionObserver`."""
        self.layers[layer_number] = call if self.capture_query_key else replace(call, query=None, key=None)


class AttentionObserver(Protocol):
    """Observer of every attention call of this process."""

    def observe(self, layer_number: int, call: LayerRecord) -> None:
        """Take a call, with queries and keys, before its attention is computed."""
        ...


@dataclass(slots=True, kw_only=True)
class Runtime:
    """State behind the attention layers, from :func:`initialize` to :func:`destroy`."""

    config: MTrainingConfig
    """Configuration, with the layout and schedule that were decided."""

    given: MTrainingConfig | None = None
    """Configuration that :func:`initialize` was given, which may leave both to ``auto``."""

    cp_group: ProcessGroup
    """Megatron's context-parallel group of this rank."""

    ring_groups: RingGroups
    """Groups of the ring."""

    inner_size: int
    """Context-parallel ranks in an inner ring."""

    training_step: int | None = None
    """Training steps done so far, as :func:`set_training_step` last set it."""

    forced_dense: bool = False
    """True inside :func:`dense_attention`."""

    checked_lengths: set[tuple[object, ...]] = field(default_factory=set)
    """Shapes of position ids that were found to be those of the layout, and short lengths that were warned of."""

    @property
    def split(self) -> TokenSplit:
        """Split of every sequence over the context-parallel ranks."""
        return TokenSplit(self.config.layout, self.config.block_size, self.inner_size)

    def config_of(self, layer_number: int) -> MTrainingConfig:
        """Return the configuration of a layer in the present step: that of every layer, or its dense counterpart.

        Raises:
            ValueError: there is a dense warm-up and the steps are not counted.
        """
        return _dense(self.config) if self.attends_densely(layer_number) else self.config

    def attends_densely(self, layer_number: int) -> bool:
        """Return whether a layer computes every causal pair in the present step.

        Raises:
            ValueError: there is a dense warm-up and the steps are not counted.
        """
        if self.forced_dense or self.config.pattern == "dense" or layer_number in self.config.dense_layers:
            return True
        if self.config.dense_warmup_steps == 0:
            return False
        if self.training_step is None:
            raise invalid(
                "dense_warmup_steps",
                "0 unless steps are counted",
                self.config.dense_warmup_steps,
                "Call megatron_mtraining.megatron.set_training_step before each training step.",
            )
        return self.training_step < self.config.dense_warmup_steps


@lru_cache(maxsize=8)
def _dense(config: MTrainingConfig) -> MTrainingConfig:
    return replace(config, pattern="dense")


@dataclass(slots=True, kw_only=True)
class Process:
    """State of this package in a process. There is one, which :func:`process` returns."""

    given: MTrainingConfig | None = None
    """Configuration that a program passed to :func:`megatron_mtraining.megatron.install`."""

    args: Namespace | None = None
    """Megatron's arguments, once they are validated and choose this backend."""

    flags: dict[str, str] = field(default_factory=dict)
    """Megatron's flags as they are typed, by the names that their values have in its arguments."""

    model_built: bool = False
    """True if a model with this attention was built, or a pipeline stage of one."""

    printed: set[str] = field(default_factory=set)
    """Sentences that were printed, each once."""

    hooks: Patches = field(default_factory=Patches)
    """Functions wrapped from :func:`megatron_mtraining.megatron.install` to ``uninstall``."""

    layout: Patches = field(default_factory=Patches)
    """Functions replaced from :func:`initialize` to :func:`destroy`, for a layout that is not Megatron's."""

    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    """Padding of each micro batch."""

    runtime: Runtime | None = None
    """State of the attention layers, from :func:`initialize` to :func:`destroy`."""

    meter: Meter | None = None
    """Meter of the training loop, while it is installed."""

    observers: list[AttentionObserver] = field(default_factory=list)
    """Observers of every attention call: the meter, recorders, the doctor."""

    def defaults(self) -> MTrainingConfig:
        """Return the configuration before any flag is read: the given one, else that of ``MTRAINING_CONFIG``."""
        return self.given or config_from_environment()

    def config(self) -> MTrainingConfig:
        """Return the configuration of this run.

        Raises:
            ValueError: a value out of its range.
        """
        return self.defaults() if self.args is None else config_from_args(self.args)


_process = Process()


def process() -> Process:
    """Return the one :class:`Process`."""
    return _process


def current_runtime() -> Runtime:
    """Return the runtime that :func:`initialize` made.

    Raises:
        RuntimeError: it was not called.
    """
    if _process.runtime is None:
        raise RuntimeError(
            "initialize must be called before a model is built, got no call. "
            "Call megatron_mtraining.megatron.initialize(config) after initialize_model_parallel."
        )
    return _process.runtime


def is_initialized() -> bool:
    """Return whether :func:`initialize` was called and :func:`destroy` was not."""
    return _process.runtime is not None


def initialize(config: MTrainingConfig, *, inner_size: int | None = None) -> Runtime:
    """Prepare this process for models with sparse attention. A collective over all ranks.

    Call it once, after Megatron's ``initialize_model_parallel`` and before a model is built. It creates the ring's
    process groups for every context-parallel group and makes Megatron's batch split, rotary embeddings, multi-token
    prediction and Mamba layers follow the layout (:func:`megatron_mtraining.megatron.install` lists the functions). A
    second call with the same arguments returns the same runtime.

    Args:
        config: how attention, layout and ring work; the same on every rank. A layout and schedule that it leaves to
            ``auto`` are decided here, for the length and heads of Megatron's arguments; for a typical call without.
        inner_size: context-parallel ranks in one node, neighbours in their group. Default: the first of Megatron's
            ``hierarchical_context_parallel_sizes`` where it was started with them, else found from the host names.
            A given one may let inner rings go from host to host, with a warning.

    Raises:
        ValueError: sizes that disagree with each other, or with an earlier call.
        RankMismatchError: ranks called with different arguments.
        MissingSymbolError: this Megatron-Core has no function of a name that is replaced.
    """
    inner_size = None if inner_size is None else as_integer("inner_size", inner_size, least=1)
    cp_group = parallel_state.get_context_parallel_group()
    if _process.runtime is not None:
        _check_same(_process.runtime, config, cp_group, inner_size)
        return _process.runtime
    cp_size = cp_group.size()
    sizes = hierarchical_sizes(cp_size)
    if sizes is not None and inner_size not in (None, sizes[0]):
        raise invalid("inner_size", f"{sizes[0]}, the first of hierarchical_context_parallel_sizes", inner_size)
    plan = f"{config} with inner_size {inner_size}"
    if "auto" in (config.layout, config.schedule):  # what decides them must be the same in every pipeline stage too
        plan += " and profile {}, {}".format(*profile_of_machine(config.profile))
    placement = gather_placement(cp_group, plan=plan)
    inner_size = inner_size if inner_size is not None else (sizes[0] if sizes is not None else placement.inner_size())
    groups, given = RingGroups(cp=cp_group), config
    if cp_size > 1:
        groups = create_ring_groups(placement.rank_lists, cp_group=cp_group, inner_size=inner_size)
    config = _decided(config, cp_group, inner_size)
    if cp_size > 1:
        leaves_hosts = config.schedule != "flat" and placement.inner_size() % inner_size
        if leaves_hosts and as_transport(cp_group).global_ranks[cp_group.rank()] == 0:
            _LOG.warning(_BETWEEN_HOSTS, inner_size, placement.inner_size())
        follow_layout(_process.layout, TokenSplit(config.layout, config.block_size, inner_size))
    runtime = Runtime(config=config, given=given, cp_group=cp_group, ring_groups=groups, inner_size=inner_size)
    _process.runtime = runtime
    _process.micro_batches.start(runtime)
    return runtime


def _decided(config: MTrainingConfig, cp_group: ProcessGroup, inner_size: int) -> MTrainingConfig:
    """Return ``config`` with a layout, by which every batch is split, and a schedule; the first rank logs them."""
    if "auto" not in (config.layout, config.schedule):
        return config
    args, sizes = _process.args or global_of_training("get_args"), {}
    if args is not None:
        tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
        kv_heads = args.num_query_groups if args.group_query_attention else heads
        sizes = {"seq_len": args.seq_length, "head_dim": args.kv_channels}
        sizes |= {"num_heads": heads // tp, "num_kv_heads": max(kv_heads // tp, 1)}
    call = RingCall(cp_size=cp_group.size(), node_size=inner_size, **sizes)
    return decide(config, call, log=as_transport(cp_group).global_ranks[cp_group.rank()] == 0)


def destroy() -> None:
    """Undo :func:`initialize`: restore Megatron's functions and end the ring's groups.

    Every rank calls it when its models are gone; without a call of :func:`initialize` it does nothing.
    """
    ended, _process.runtime = _process.runtime, None
    _process.micro_batches.stop()
    _process.layout.undo()
    if ended is not None:
        destroy_ring_groups(ended.ring_groups)


def shard_batch(batch: Mapping[str, Any], layout: SequenceLayout, cp_rank: int) -> dict[str, Any]:
    """Return this rank's part of a batch, whose padding is counted for the model that is given the part's tokens.

    Padding is what ends a row, or a document of ``cu_seqlens``, with loss mask 0 and one and the same token; see
    docs/decisions/0019. It selects no key.

    Args:
        batch: ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each ``[batch, seq_len]``, None or absent;
            ``cu_seqlens``, ``cu_seqlens_padded``, ``max_seqlen`` and ``packed_seq_params`` describe the whole sequence
            and pass unchanged, as does what has one value a row, such as the ``dataset_id`` of a blend.
        layout: where each block lives; labels must have been shifted already.
        cp_rank: this rank within its context-parallel group.

    Returns:
        The same keys, the per-token ones ``[batch, local_len]``.

    Raises:
        ValueError: an ``attention_mask``, a key of unknown shape, or a length other than the layout's.
    """
    part = split_batch(batch, layout, cp_rank)
    _process.micro_batches.note_split(batch, part)
    return part


def set_training_step(step: int) -> None:
    """Record how many training steps are done; call it before each step when ``dense_warmup_steps`` is not 0.

    Steps count from 0, so that steps 0 to ``dense_warmup_steps - 1`` are dense; a resumed run continues at its
    iteration.
    """
    current_runtime().training_step = step


@contextlib.contextmanager
def dense_attention() -> Iterator[None]:
    """Attend densely in every layer inside the ``with`` block."""
    runtime = current_runtime()
    before, runtime.forced_dense = runtime.forced_dense, True
    try:
        yield
    finally:
        runtime.forced_dense = before


@contextlib.contextmanager
def dense_evaluation() -> Iterator[None]:
    """Attend densely in every layer inside the ``with`` block, without gradients: measures the loss by sparsity."""
    with dense_attention(), torch.no_grad():
        yield


@contextlib.contextmanager
def record_attention(*, capture_query_key: bool = False) -> Iterator[AttentionRecorder]:
    """Record the last attention call of each layer inside the ``with`` block; see :class:`AttentionRecorder`.

    A recording inside another one pauses it.
    """
    current_runtime()
    observers, recorder = _process.observers, AttentionRecorder(capture_query_key=capture_query_key)
    paused = [each for each in observers if isinstance(each, AttentionRecorder)]
    for each in paused:
        observers.remove(each)
    observers.append(recorder)
    try:
        yield recorder
    finally:
        observers.remove(recorder)
        observers.extend(paused)


def _check_same(runtime: Runtime, config: MTrainingConfig, cp_group: ProcessGroup, inner_size: int | None) -> None:
    remedy = "Call megatron_mtraining.megatron.destroy first."
    if runtime.given != config:
        raise invalid("config", f"that of the earlier call, {runtime.given}", config, remedy)
    if runtime.cp_group is not cp_group:
        raise invalid(
            "the context-parallel group", "that of the earlier call", f"one of {cp_group.size()} ranks", remedy
        )
    if inner_size not in (None, runtime.inner_size):
        raise invalid("inner_size", f"{runtime.inner_size} as in the earlier call", inner_size, remedy)
