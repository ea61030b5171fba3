"""Bytes that a plan takes on its fullest GPU."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ELEMENT, LayerActivations, working_sets
from .model_shape import ModelShape
from .plan import FULL, Plan

GIB = 2**30

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of a parameter: bfloat16; Megatron's float32 gradient buffer; a float32 copy and Adam's two moments. Source:
``num_bytes_per_parameter`` of megatron.training.theoretical_memory_usage: 6 + 12 / shards."""

CONTEXT_BYTES = round(0.75 * GIB)
"""The CUDA context, loaded kernels and libraries. Assumed."""

COMMUNICATOR_BYTES = 128 << 20
"""NCCL's buffers of one communicator. Assumed; it depends on NCCL's version and the number of channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int
    """What the optimizer holds in the host's memory instead."""

    kept: int
    """Activations from forward to backward, of all microbatches under way."""

    tables: int
    """Rotary tables, and the batch's tokens, labels, positions and mask."""

    working: int
    """The largest of the working sets."""

    moment: str
    """Which one that is."""

    framework: int
    """What torch's allocator does not see: CUDA context and NCCL."""

    @property
    def allocated(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` would say."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.tables + self.working

    @property
    def total(self) -> int:
        """What the GPU must have, fragmentation left out."""
        return self.allocated + self.framework


def memory_of(model: ModelShape, plan: Plan) -> Memory:
    """The fullest pipeline stage's."""
    return max((stage_memory(model, plan, stage) for stage in range(plan.pp)), key=lambda memory: memory.total)


def stage_memory(model: ModelShape, plan: Plan, stage: int) -> Memory:
    """One pipeline stage's, under the schedule of one forward and one backward in turn.

    Stage ``s`` of ``pp`` has ``pp - s`` microbatches under way (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    parameters = model.stage_parameters(tp=plan.tp, pp=plan.pp, stage=stage)
    states = -(-OPTIMIZER_BYTES * parameters // plan.optimizer_shards)
    layer = LayerActivations.of(model, plan)
    under_way = min(plan.micro_batches, plan.pp - stage)
    sets = working_sets(model, plan, has_loss=stage == plan.pp - 1)
    moment = max(sets, key=sets.__getitem__)
    return Memory(
        weights=WEIGHT_BYTES * parameters,
        gradients=GRADIENT_BYTES * parameters,
        optimizer=0 if plan.offload else states,
        host_optimizer=states + ELEMENT * 2 * parameters // plan.optimizer_shards if plan.offload else 0,
        kept=under_way * model.num_layers // plan.pp * layer.kept(plan.recompute),
        tables=_table_bytes(model, plan),
        working=sets[moment],
        moment=moment if plan.recompute != FULL or "backward" not in moment else f"{moment}, its layer recomputed",
        framework=CONTEXT_BYTES + COMMUNICATOR_BYTES * _communicators(plan),
    )


def _table_bytes(model: ModelShape, plan: Plan) -> int:
    """A rank's float32 angles, and int64 tokens, labels and positions and a float32 mask of the whole sequence."""
    return 4 * plan.local_tokens * model.head_dim + (3 * 8 + 4) * plan.seq_len


def _communicators(plan: Plan) -> int:
    """Groups that send by NCCL: tensor, pipeline, data with context, context, and up to four of the rings."""
    inner, outer = plan.hierarchical_sizes
    rings = (2 if inner > 1 else 0) + (2 if outer > 1 else 0)
    return (
        (plan.tp > 1)
        + (plan.pp > 1)
        + (plan.dp * plan.cp > 1)
        + (1 + rings if plan.cp > 1 else 0)
        + (plan.gpus > 1)  # the world's own
    )
