"""Bytes that a plan takes on its fullest GPU: weights, states, kept activations and the largest working set.

Activations are counted from the tensors that Megatron's TransformerEngine spec saves for a layer in bfloat16, with
sequence parallelism where tensor parallelism is on, as in Table 2 of Korthikanti et al. (arXiv 2205.05198) but for
attention without a score matrix. T tokens of a rank, h hidden, f MLP size, q and k elements of a token's queries and
keys; everything is over ``tp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import ModelShape
from .plan import FULL, NONE, SELECTIVE, TRANSFORMER_ENGINE, Plan

GIB = 2**30
ELEMENT = 2
"""Bytes of bfloat16."""

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes of a parameter: bfloat16; Megatron's float32 gradient buffer; a float32 copy and Adam's two moments. Source:
``num_bytes_per_parameter`` of megatron.training.theoretical_memory_usage: 6 + 12 / shards."""

CONTEXT_BYTES = round(0.75 * GIB)
"""The CUDA context, loaded kernels and libraries. Assumed."""

COMMUNICATOR_BYTES = 128 << 20
"""NCCL's buffers of one communicator. Assumed; it depends on NCCL's version and the number of channels."""

LOGIT_BYTES, FUSED_LOGIT_BYTES = 6, 10
"""Bytes of each logit: bfloat16 from the output layer, which the calling frame holds, and the float32 copy on which
``VocabParallelCrossEntropy`` of megatron.core.tensor_parallel.cross_entropy works in place. Its backward holds as many:
the float32 softmax, and the gradient in bfloat16. The backward of megatron.core.fusions.fused_cross_entropy holds a
second float32 tensor beside the softmax: so torch 2.11 compiles the update of single entries in it."""

WORKSPACE_BYTES = 64 << 20
"""cuBLAS workspaces of torch and of TransformerEngine: 32 MiB each on Hopper (torch's default there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int
    """Bytes held by the optimizer in the host's memory instead."""

    kept: int
    """Bytes of activations from forward to backward, of all microbatches under way."""

    tables: int
    """Bytes of rotary tables, and of the batch's tokens, labels, positions and mask."""

    working: int
    """Bytes of the largest of the working sets, named by ``moment``."""

    moment: str
    framework: int
    """Bytes of the CUDA context and NCCL, which torch's allocator does not see."""

    @property
    def allocated(self) -> int:
        """Bytes as ``torch.cuda.max_memory_allocated`` counts."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.tables + self.working

    @property
    def total(self) -> int:
        """All that the GPU must have, fragmentation left out."""
        return self.allocated + self.framework


def memory_of(model: ModelShape, plan: Plan) -> Memory:
    """Return the memory of the fullest pipeline stage."""
    return max((stage_memory(model, plan, stage) for stage in range(plan.pp)), key=lambda memory: memory.total)


def stage_memory(model: ModelShape, plan: Plan, stage: int) -> Memory:
    """Return one pipeline stage's memory, under the schedule of one forward and one backward in turn.

    Stage ``s`` of ``pp`` has ``pp - s`` microbatches under way (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    parameters = model.stage_parameters(tp=plan.tp, pp=plan.pp, stage=stage)
    states = -(-OPTIMIZER_BYTES * parameters // plan.optimizer_shards)
    under_way = min(plan.micro_batches, plan.pp - stage)
    sets = working_sets(model, plan, has_loss=stage == plan.pp - 1)
    moment = max(sets, key=sets.__getitem__)
    # A rank's float32 angles; int64 tokens, labels and positions and a float32 mask of the whole sequence.
    tables = 4 * plan.local_tokens * model.head_dim + (3 * 8 + 4) * plan.seq_len
    return Memory(
        weights=WEIGHT_BYTES * parameters,
        gradients=GRADIENT_BYTES * parameters,
        optimizer=0 if plan.offload else states,
        host_optimizer=states + ELEMENT * 2 * parameters // plan.optimizer_shards if plan.offload else 0,
        kept=under_way * model.num_layers // plan.pp * LayerActivations.of(model, plan).kept(plan.recompute),
        tables=tables,
        working=sets[moment],
        moment=moment if plan.recompute != FULL or "backward" not in moment else f"{moment}, its layer recomputed",
        framework=CONTEXT_BYTES + COMMUNICATOR_BYTES * _communicators(plan),
    )


def _communicators(plan: Plan) -> int:
    """Count groups that send by NCCL: world, tensor, pipeline, data with context, context, up to four of the ring."""
    inner, outer = plan.hierarchical_sizes
    of_ring = 1 + 2 * (inner > 1) + 2 * (outer > 1) if plan.cp > 1 else 0
    return (plan.gpus > 1) + (plan.tp > 1) + (plan.pp > 1) + (plan.dp * plan.cp > 1) + of_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer for one microbatch on one rank."""

    hidden: int
    """Bytes of a layer's input, 2 T h, or of any tensor like it."""

    query: int
    """Bytes of the queries, 2 T q."""

    key: int
    """Bytes of keys or of values, 2 T k."""

    ffn: int
    """Bytes of the input of the second product of the MLP, 2 T f."""

    ffn_input: int
    """Bytes of the first product's output: twice as wide where it is gated."""

    lse: int
    """Bytes of the log-sum-exp in float32, 4 T heads."""

    packs: int
    saved_packs: int
    """Packs from forward to backward; one rank packs again."""
    """Gathered vertical rows of keys and values, for each list of the index."""

    @classmethod
    def of(cls, model: ModelShape, plan: Plan) -> LayerActivations:
        """Return the bytes of one rank of ``plan``."""
        tokens = plan.local_tokens
        heads, kv_heads = model.heads(plan.tp)
        return cls(
            hidden=ELEMENT * tokens * model.hidden_size // plan.tp,
            query=ELEMENT * tokens * heads * model.head_dim,
            key=ELEMENT * tokens * kv_heads * model.head_dim,
            ffn=ELEMENT * tokens * model.ffn_hidden_size // plan.tp,
            ffn_input=ELEMENT * tokens * model.ffn_input_size // plan.tp,
            lse=4 * tokens * heads,
            packs=(packs := 2 * ELEMENT * plan.pack_width * plan.num_lists(model) * model.head_dim),
            saved_packs=packs if plan.cp > 1 else 0,
        )

    @property
    def attention(self) -> int:
        """The norm's output, queries and keys after the rotation, all three as the product gave them (values are a
        view of that), the output, ``lse``, the packs, and the sum with the residual."""
        return 2 * self.hidden + 3 * self.query + 3 * self.key + self.lse + self.saved_packs

    @property
    def mlp(self) -> int:
        """The norm's output and both products' operands around the activation."""
        return self.hidden + self.ffn_input + self.ffn

    def kept(self, recompute: str) -> int:
        """Return the bytes from forward to backward, the layer's input included."""
        return self.hidden + {NONE: self.attention + self.mlp, SELECTIVE: self.attention, FULL: 0}[recompute]


def working_sets(model: ModelShape, plan: Plan, *, has_loss: bool) -> dict[str, int]:
    """Return bytes on top of the kept activations in each of the moments where memory may be highest.

    Args:
        model: whose layers.
        plan: on which rank.
        has_loss: whether this pipeline stage computes the loss.
    """
    layer = LayerActivations.of(model, plan)
    # Sequence parallelism gathers a layer's input, and the gradient of its output, over the tensor-parallel ranks.
    gathered = layer.hidden * plan.tp if plan.tp > 1 else 0
    vocab = model.padded_vocab(plan.tp) // plan.tp
    weight = model.hidden_size * model.ffn_input_size // plan.tp
    of_mlp = {NONE: 0, SELECTIVE: layer.mlp, FULL: layer.attention + layer.mlp}[plan.recompute]
    of_attention = {NONE: -layer.mlp, SELECTIVE: 0, FULL: layer.attention}[plan.recompute]
    gradients = 2 * (layer.query + layer.key) + attention_bytes(layer, plan)
    sets = {
        "backward of an MLP": of_mlp + layer.hidden + layer.ffn_input + 2 * gathered + ELEMENT * weight,
        "backward of attention": of_attention + 2 * layer.hidden + 2 * gathered + gradients,
    }
    if has_loss:
        # With the final norm's input and output. The gradient of a weight as large as the embedding comes later.
        per_logit = FUSED_LOGIT_BYTES if plan.loss_fusion else LOGIT_BYTES
        sets["the logits"] = per_logit * plan.local_tokens * vocab + 2 * layer.hidden + gathered
    return {name: size + WORKSPACE_BYTES for name, size in sets.items()}


def attention_bytes(layer: LayerActivations, plan: Plan) -> int:
    """Return a backward's own memory, beside its inputs, saved tensors and gradients in bfloat16.

    With E and K bytes of a rank's query and of its key and value in bfloat16: gradients of packs, whose lists are those
    of the index, in float32, and ``delta``; on one rank 2 K, dK and dV in float32, and the packs, made again. The
    backward at 131072 tokens in docs/benchmarks/RESULTS.md takes as much, with its packs and the 128 MiB that
    docs/benchmarks/README.md says are missing there: 163 + 128 = 9 + 18 + 8 + 256 MiB.

    In a ring, beside a rank's own keys, which are saved inputs: the stacked copy in hand and the keys that arrive, 2 K
    for each ring; dQ between steps in float32, 2 E; and sums of dK and dV in float32, 2 K each: the one computed and
    those of :func:`_sums_under_way`. The last step has one set of keys, and dQ in bfloat16 too. Counted, not measured
    on GPUs: tests/ring/test_backward_memory.py runs the ring's own code.
    """
    query, keys = layer.query, 2 * layer.key
    if plan.attention == TRANSFORMER_ENGINE:
        # Source: AttnFuncWithCPAndKVP2P, and cuDNN's workspace, as docs/benchmarks/README.md counts them.
        own = 4 * keys + query + keys if plan.cp > 1 else 0
        return own + 4 * query
    beside = 2 * layer.packs + layer.lse
    if plan.cp == 1:
        return 2 * keys + beside + layer.packs
    inner, outer = plan.schedule_sizes
    if plan.schedule == "gather" and inner > 1:
        return _gathered_bytes(query, keys, inner, outer) + beside
    sums = 1 + _sums_under_way(inner) + _sums_under_way(outer)
    earlier = 2 * query + 2 * keys * ((inner > 1) + (outer > 1))
    last = 3 * query + keys
    return max(earlier, last) + 2 * keys * sums - (query + keys) + beside


def _gathered_bytes(query: int, keys: int, inner: int, outer: int) -> int:
    """Return the bytes of a node's gathered keys, their gradients in float32, and these once more in the order to send.

    Over several nodes the last step has neither a rank's own stacked keys nor arriving ones, but dQ in both dtypes.
    """
    if outer == 1:
        return 5 * keys * inner + keys
    sending = 2 * query + keys * (5 * inner + 2) + max(query, 2 * keys)
    return sending + 2 * keys * _sums_under_way(outer) - (query + keys)


def _sums_under_way(ranks: int) -> int:
    """Count sums of gradients that a ring holds beside the computed one: the rank's own, one arriving, one leaving;
    in a ring of two the last two are one."""
    return min(ranks, 3) if ranks > 1 else 0
