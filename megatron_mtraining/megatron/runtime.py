"""State that all attention layers of a process share: configuration, groups, training step and recorder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

from ..config import MTrainingConfig
from ..errors import as_integer, invalid
from ..selection import get_estimator
from ..transport import RingGroups, as_transport, create_ring_groups, destroy_ring_groups
from ..transport.placement import gather_placement
from . import micro_batch, overrides
from .compat import hierarchical_sizes
from .recorder import AttentionRecorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOG = logging.getLogger(__name__)

_BETWEEN_HOSTS = (
    "Inner rings of %d ranks go from host to host, and every step waits for that link: no more than %d neighbours of "
    "each context-parallel group share a host. Pass that as inner_size, or as the first of "
    "--hierarchical-context-parallel-sizes."
)


@dataclass(slots=True, kw_only=True)
class Runtime:
    """State behind the attention layers of this process."""

    config: MTrainingConfig
    """Configuration that :func:`initialize` was given."""

    cp_group: ProcessGroup
    """Megatron's context-parallel group of this rank."""

    ring_groups: RingGroups
    """Groups of the ring."""

    inner_size: int
    """Context-parallel ranks in an inner ring."""

    training_step: int | None = None
    """Training steps done so far, as :func:`set_training_step` last said."""

    forced_dense: bool = False
    """True while :func:`dense_evaluation` is under way."""

    checked_lengths: set[tuple[object, ...]] = field(default_factory=set)
    """Shapes of position ids that were found to be those of the layout."""

    recorder: AttentionRecorder | None = None
    """Recorder of the layers, while :func:`record_attention` is under way."""

    def config_of(self, layer_number: int) -> MTrainingConfig:
        """Return the configuration of a layer in the present step: that of every layer, or its dense counterpart.

        Raises:
            ValueError: there is a dense warm-up and nobody counts the steps.
        """
        return _dense(self.config) if self.attends_densely(layer_number) else self.config

    def attends_densely(self, layer_number: int) -> bool:
        """Return whether a layer keeps every causal pair in the present step.

        Raises:
            ValueError: there is a dense warm-up and nobody counts the steps.
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


_runtime: Runtime | None = None


def initialize(config: MTrainingConfig, *, inner_size: int | None = None) -> Runtime:
    """Prepare this process for models with sparse attention. A collective over all ranks of the job.

    Call it once, after Megatron's ``initialize_model_parallel`` and before a model is built. It creates the ring's
    process groups for every context-parallel group and makes Megatron's batch split, rotary embeddings, multi-token
    prediction and Mamba layers follow the layout. A second call with the same arguments returns the same runtime.

    Args:
        config: how attention, layout and ring work; the same on every rank.
        inner_size: context-parallel ranks in one node, neighbours in their group. Default: the first of Megatron's
            ``hierarchical_context_parallel_sizes`` where it was started with them, else found from the host names.
            A given one may let inner rings go from host to host, which a warning says.

    Raises:
        ValueError: sizes that disagree with each other, or with an earlier call; an estimator that nobody registered.
        RankMismatchError: ranks called with different arguments.
        MissingSymbolError: this Megatron-Core lacks something that is replaced.
    """
    global _runtime
    get_estimator(config.estimator)
    inner_size = None if inner_size is None else as_integer("inner_size", inner_size, least=1)
    cp_group = parallel_state.get_context_parallel_group()
    if _runtime is not None:
        _check_same(_runtime, config, cp_group, inner_size)
        return _runtime
    cp_size = cp_group.size()
    sizes = hierarchical_sizes(cp_size)
    if sizes is not None and inner_size not in (None, sizes[0]):
        raise invalid("inner_size", f"{sizes[0]}, the first of hierarchical_context_parallel_sizes", inner_size)
    placement = gather_placement(cp_group, plan=f"{config} with inner_size {inner_size}")
    inner_size = inner_size if inner_size is not None else (sizes[0] if sizes is not None else placement.inner_size())
    groups = RingGroups(cp=cp_group)
    if cp_size > 1:
        groups = create_ring_groups(placement.rank_lists, cp_group=cp_group, inner_size=inner_size)
    if cp_size > 1:
        leaves_hosts = config.schedule != "flat" and placement.inner_size() % inner_size
        if leaves_hosts and as_transport(cp_group).global_ranks[cp_group.rank()] == 0:
            _LOG.warning(_BETWEEN_HOSTS, inner_size, placement.inner_size())
        overrides.install(layout=config.layout, block_size=config.block_size, node_size=inner_size)
    _runtime = Runtime(config=config, cp_group=cp_group, ring_groups=groups, inner_size=inner_size)
    micro_batch.install(_runtime)
    return _runtime


def destroy() -> None:
    """Undo :func:`initialize`: put Megatron's functions back and end the ring's groups.

    Every rank calls it when its models are gone; without a call of :func:`initialize` it does nothing.
    """
    global _runtime
    ended, _runtime = _runtime, None
    micro_batch.uninstall()
    overrides.uninstall()
    if ended is not None:
        destroy_ring_groups(ended.ring_groups)


def is_initialized() -> bool:
    """Return whether :func:`initialize` was called and :func:`destroy` was not."""
    return _runtime is not None


def current_runtime() -> Runtime:
    """Return the runtime that :func:`initialize` made.

    Raises:
        RuntimeError: it was not called.
    """
    if _runtime is None:
        raise RuntimeError(
            "initialize must be called before a model is built, got no call. "
            "Call megatron_mtraining.megatron.initialize(config) after initialize_model_parallel."
        )
    return _runtime


def set_training_step(step: int) -> None:
    """Record how many training steps are done; call it before each step when ``dense_warmup_steps`` is not 0.

    Steps count from 0, so that steps 0 to ``dense_warmup_steps - 1`` are dense; a resumed run goes on at its iteration.
    """
    current_runtime().training_step = step


@contextlib.contextmanager
def dense_evaluation() -> Iterator[None]:
    """Attend densely in every layer inside the ``with`` block, without gradients: tells what sparsity costs."""
    runtime = current_runtime()
    before, runtime.forced_dense = runtime.forced_dense, True
    try:
        with torch.no_grad():
            yield
    finally:
        runtime.forced_dense = before


@contextlib.contextmanager
def record_attention(*, capture_query_key: bool = False) -> Iterator[AttentionRecorder]:
    """Record the last attention call of each layer inside the ``with`` block; see :class:`AttentionRecorder`."""
    runtime = current_runtime()
    recorder = AttentionRecorder(capture_query_key=capture_query_key)
    before, runtime.recorder = runtime.recorder, recorder
    try:
        yield recorder
    finally:
        runtime.recorder = before


def _check_same(runtime: Runtime, config: MTrainingConfig, cp_group: ProcessGroup, inner_size: int | None) -> None:
    remedy = "Call megatron_mtraining.megatron.destroy first."
    if runtime.config != config:
        raise invalid("config", f"that of the earlier call, {runtime.config}", config, remedy)
    if runtime.cp_group is not cp_group:
        raise invalid(
            "the context-parallel group", "that of the earlier call", f"one of {cp_group.size()} ranks", remedy
        )
    if inner_size not in (None, runtime.inner_size):
        raise invalid("inner_size", f"{runtime.inner_size} as in the earlier call", inner_size, remedy)
