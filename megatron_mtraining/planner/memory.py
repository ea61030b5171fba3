"""Bytes that a plan takes on its fullest GPU: weights, states, saved activations and the largest working set.

Activations are counted from the tensors that Megatron's TransformerEngine spec saves for a layer in bfloat16, with
sequence parallelism where tensor parallelism is on, as in Table 2 of Korthikanti et al. (arXiv 2205.05198) but for
attention without a score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ring.memory import backward_bytes
from .model import ModelShape
from .plan import FULL, NONE, SELECTIVE, TRANSFORMER_ENGINE, Plan

GIB = 2**30
ELEMENT = 2  # bytes of bfloat16

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes of a parameter: bfloat16; Megatron's float32 gradient buffer; a float32 copy and Adam's two moments, as in
megatron.training.theoretical_memory_usage."""

CONTEXT_BYTES, COMMUNICATOR_BYTES = round(0.75 * GIB), 128 << 20
"""The CUDA context with kernels and libraries; NCCL's buffers of one communicator. Assumed."""

LOGIT_BYTES = 6
"""Bytes of each logit: bfloat16 from the output layer, which the calling frame holds, and the float32 copy on which
megatron.core.tensor_parallel.cross_entropy works in place. Its backward: a float32 softmax, a bfloat16 gradient."""

WORKSPACE_BYTES = 64 << 20
"""cuBLAS workspaces of torch and of TransformerEngine: 32 MiB each on Hopper (torch's default there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int  # held by the optimizer in the host's memory instead
    saved: int  # activations from forward to backward, of all microbatches in flight
    tables: int  # rotary tables; tokens, labels, positions and mask of the batch
    working: int  # the largest of the working sets, named by ``moment``
    moment: str
    framework: int  # CUDA context and NCCL, which torch's allocator does not see

    @property
    def allocated(self) -> int:
        """Bytes as ``torch.cuda.max_memory_allocated`` counts."""
        return self.weights + self.gradients + self.optimizer + self.saved + self.tables + self.working

    @property
    def total(self) -> int:
        """All that the GPU must have, without fragmentation."""
        return self.allocated + self.framework


def memory_of(model: ModelShape, plan: Plan) -> Memory:
    """Return the memory of the fullest pipeline stage."""
    return max((stage_memory(model, plan, stage) for stage in range(plan.pp)), key=lambda memory: memory.total)


def stage_memory(model: ModelShape, plan: Plan, stage: int) -> Memory:
    """Return one pipeline stage's memory, under the schedule of one forward and one backward in turn.

    Stage ``s`` of ``pp`` has ``pp - s`` microbatches in flight (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    parameters = model.stage_parameters(tp=plan.tp, pp=plan.pp, stage=stage)
    states = -(-OPTIMIZER_BYTES * parameters // plan.optimizer_shards)
    in_flight = min(plan.micro_batches, plan.pp - stage)
    sets = working_sets(model, plan, has_loss=stage == plan.pp - 1)
    moment = max(sets, key=sets.__getitem__)
    # Groups that send by NCCL: world, tensor, pipeline, data with context, context, up to four of the ring.
    inner, outer = plan.hierarchical_sizes
    of_ring = 1 + 2 * (inner > 1) + 2 * (outer > 1) if plan.cp > 1 else 0
    communicators = (plan.gpus > 1) + (plan.tp > 1) + (plan.pp > 1) + (plan.dp * plan.cp > 1) + of_ring
    return Memory(
        weights=WEIGHT_BYTES * parameters,
        gradients=GRADIENT_BYTES * parameters,
        optimizer=0 if plan.offload else states,
        host_optimizer=states + ELEMENT * 2 * parameters // plan.optimizer_shards if plan.offload else 0,
        saved=in_flight * model.num_layers // plan.pp * LayerActivations.of(model, plan).saved(plan.recompute),
        # A rank's float32 angles; int64 tokens, labels and positions and a float32 mask of the whole sequence.
        tables=4 * plan.local_tokens * model.head_dim + (3 * 8 + 4) * plan.seq_len,
        working=sets[moment],
        moment=moment if plan.recompute != FULL or "backward" not in moment else f"{moment}, its layer recomputed",
        framework=CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer for one microbatch on one rank: T tokens, h hidden, f MLP, q and k elements of a token."""

    hidden: int  # a layer's input, 2 T h, or any tensor like it
    query: int  # 2 T q
    key: int  # or values, 2 T k
    ffn: int  # input of the second product of the MLP, 2 T f
    ffn_input: int  # the first product's output: twice as wide where it is gated
    lse: int  # log-sum-exp in float32, 4 T heads
    packs: int  # gathered vertical rows of keys and values, for each list of the index
    saved_packs: int  # packs from forward to backward; one rank packs again

    @classmethod
    def of(cls, model: ModelShape, plan: Plan) -> LayerActivations:
        """Return the bytes of one rank of ``plan``."""
        tokens, (heads, kv_heads) = plan.local_tokens, model.heads(plan.tp)
        packs = 2 * ELEMENT * plan.pack_width * plan.num_lists(model) * model.head_dim
        return cls(
            hidden=ELEMENT * tokens * model.hidden_size // plan.tp,
            query=ELEMENT * tokens * heads * model.head_dim,
            key=ELEMENT * tokens * kv_heads * model.head_dim,
            ffn=ELEMENT * tokens * model.ffn_hidden_size // plan.tp,
            ffn_input=ELEMENT * tokens * model.ffn_input_size // plan.tp,
            lse=4 * tokens * heads,
            packs=packs,
            saved_packs=packs if plan.cp > 1 else 0,
        )

    @property
    def attention(self) -> int:
        """The norm's output; queries and keys after the rotation; queries, keys and values as the product wrote them;
        the output, ``lse``, the packs, and the sum with the residual."""
        return 2 * self.hidden + 3 * self.query + 3 * self.key + self.lse + self.saved_packs

    @property
    def mlp(self) -> int:
        """The norm's output and both products' operands around the activation."""
        return self.hidden + self.ffn_input + self.ffn

    def saved(self, recompute: str) -> int:
        """Return the bytes from forward to backward, the layer's input included."""
        return self.hidden + {NONE: self.attention + self.mlp, SELECTIVE: self.attention, FULL: 0}[recompute]


def working_sets(model: ModelShape, plan: Plan, *, has_loss: bool) -> dict[str, int]:
    """Return bytes on top of the saved activations when memory may be highest; ``has_loss``: in the last stage."""
    layer = LayerActivations.of(model, plan)
    # Sequence parallelism gathers a layer's input, and the gradient of its output, over the tensor-parallel ranks.
    gathered = layer.hidden * plan.tp if plan.tp > 1 else 0
    weight = ELEMENT * model.hidden_size * model.ffn_input_size // plan.tp
    of_mlp = {NONE: 0, SELECTIVE: layer.mlp, FULL: layer.attention + layer.mlp}[plan.recompute]
    of_attention = {NONE: -layer.mlp, SELECTIVE: 0, FULL: layer.attention}[plan.recompute]
    gradients = 2 * (layer.query + layer.key) + attention_bytes(layer, plan)
    sets = {"backward of an MLP": of_mlp + layer.hidden + layer.ffn_input + 2 * gathered + weight}
    sets["backward of attention"] = of_attention + 2 * layer.hidden + 2 * gathered + gradients
    if has_loss:
        # With the final norm's input and output. The gradient of a weight as large as the embedding comes later.
        logits = plan.local_tokens * model.padded_vocab(plan.tp) // plan.tp
        sets["the logits"] = LOGIT_BYTES * logits + 2 * layer.hidden + gathered
    return {name: size + WORKSPACE_BYTES for name, size in sets.items()}


def attention_bytes(layer: LayerActivations, plan: Plan) -> int:
    """Return a backward's own memory, beside its inputs, saved tensors and gradients in bfloat16.

    Gradients of packs, whose lists are those of the index, in float32, and ``delta``; on one rank dK and dV in float32,
    and the packs, made again. The backward at 131072 tokens in docs/benchmarks/RESULTS.md takes as much, with its packs
    and the 128 MiB that docs/benchmarks/README.md says are missing there: 163 + 128 = 9 + 18 + 8 + 256 MiB.
    """
    query, kv = layer.query, 2 * layer.key
    if plan.attention == TRANSFORMER_ENGINE:
        # Source: AttnFuncWithCPAndKVP2P, and cuDNN's workspace, as docs/benchmarks/README.md counts them.
        return 4 * query + (5 * kv + query if plan.cp > 1 else 0)
    beside = 2 * layer.packs + layer.lse
    return beside + (2 * kv + layer.packs if plan.cp == 1 else backward_bytes(plan.ring, query=query, kv=kv))
