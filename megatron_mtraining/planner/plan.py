"""Parallel sizes and memory savers of a training run, and the check that they divide."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import invalid
from ..layout import SequenceLayout
from ..ring import RingShape
from .model import ModelShape

NONE, SELECTIVE, FULL = RECOMPUTE = ("none", "selective", "full")  # of nothing, of MLPs, of layers
MTRAINING, TRANSFORMER_ENGINE = "mtraining", "transformer_engine"  # the latter: dense, over its p2p ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parallel sizes and everything else that memory and time of a training step depend on, beside the model."""

    seq_len: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    node_size: int = 8  # GPUs in a node
    global_batch: int = 1  # sequences in a step; a microbatch is one
    pack_width: int = 0  # vertical rows of each list, which every rank gathers once a layer; 0 for dense attention
    index_sharing: str = "head"  # as in MTrainingConfig
    layout: str = "striped"
    schedule: str = "hierarchical"
    attention: str = MTRAINING
    recompute: str = NONE
    offload: bool = False  # optimizer states are in the host's memory, where Adam then runs
    overlap: bool = True  # gradients and parameters travel while layers compute

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def local_tokens(self) -> int:
        """Tokens of one context-parallel rank."""
        return self.seq_len // self.cp

    @property
    def micro_batches(self) -> int:
        """Microbatches of every pipeline in a step."""
        return self.global_batch // self.dp

    @property
    def ring_node_size(self) -> int:
        """Context-parallel ranks of one group in a node: tensor-parallel ranks are nearer neighbours."""
        return min(self.cp, max(self.node_size // self.tp, 1))

    @property
    def hierarchical_sizes(self) -> tuple[int, int]:
        """Ranks of the inner and of the outer ring."""
        return self.ring_node_size, self.cp // self.ring_node_size

    @property
    def ring(self) -> RingShape:
        """The schedule over the ranks."""
        return RingShape(kind=self.schedule, cp_size=self.cp, node_size=self.ring_node_size)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share the optimizer's states: Megatron's data-parallel group with context parallelism."""
        return self.dp * self.cp

    def num_lists(self, model: ModelShape) -> int:
        """Count lists of the index on a rank."""
        heads, kv_heads = model.heads(self.tp)
        return kv_heads if self.index_sharing == "kv_group" else heads

    def token_layout(self) -> SequenceLayout:
        """Return the owner of each block of tokens; ValueError where the sequence does not divide."""
        return SequenceLayout(self.layout, seq_len=self.seq_len, cp_size=self.cp, node_size=self.ring_node_size)

    def sizes_text(self) -> str:
        """Return ``tp=2 cp=16 pp=1 dp=1``."""
        return f"tp={self.tp} cp={self.cp} pp={self.pp} dp={self.dp}"


def check_plan(model: ModelShape, plan: Plan) -> None:
    """Raise ValueError where sizes do not divide as Megatron and this package need it."""
    tp, cp, kv_heads = plan.tp, plan.cp, model.num_kv_heads
    if tp > plan.node_size or plan.node_size % tp:
        raise invalid("tp", f"a divisor of the {plan.node_size} GPUs of a node", tp)
    in_node = plan.node_size // tp
    if kv_heads % tp and tp % kv_heads:
        raise invalid("tp", f"a divisor or a multiple of {kv_heads} key/value heads", tp)
    if tp > kv_heads and plan.index_sharing == "kv_group":
        raise invalid("tp", f"at most the {kv_heads} key/value heads with index sharing kv_group", tp)
    if cp % in_node if cp > in_node else in_node % cp:
        raise invalid("cp", f"a divisor or a multiple of the {in_node} ranks that tp {tp} leaves in a node", cp)
    for name, value, divisor, size in (
        ("num_heads", model.num_heads, "tp", tp),
        ("ffn_hidden_size", model.ffn_hidden_size, "tp", tp),
        ("hidden_size", model.hidden_size, "tp", tp),
        ("num_layers", model.num_layers, "pp", plan.pp),
        ("global_batch", plan.global_batch, "dp", plan.dp),
        ("seq_len / cp", plan.seq_len // cp, "tp", tp),
    ):
        if value % size:
            raise invalid(name, f"a multiple of {divisor} {size}", value)
    plan.token_layout()
