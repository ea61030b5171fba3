"""What the backward of a ring holds at once, counted on its own code, is what the planner counts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.planner.memory import LayerActivations, attention_bytes
from megatron_mtraining.planner.model import ModelShape
from megatron_mtraining.planner.plan import Plan
from megatron_mtraining.ring import RingContext, post_kv, ring_schedule
from megatron_mtraining.ring.ring import ring_backward, rotate_kv
from megatron_mtraining.transport import RingTransports, SoloTransport
from megatron_mtraining.types import VerticalSlashIndex

LOCAL_LEN, HEAD_DIM, PACK_WIDTH = 256, 64, 32


class Posted:
    """Holds the sent tensor until ``wait``, as what is posted over a process group does."""

    def __init__(self, sent: Tensor, received: Tensor) -> None:
        self.sent: Tensor | None = sent
        self.received = received

    def wait(self) -> Tensor:
        self.sent = None
        return self.received


class Wire:
    """One rank's end of a group whose other ranks do not exist: allocates what NCCL's would."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(self, tensor: Tensor) -> Posted:
        return Posted(tensor, torch.empty_like(tensor))

    def post_all_reduce(self, tensor: Tensor) -> Posted:
        return Posted(tensor, tensor)

    def post_all_gather(self, tensor: Tensor) -> Posted:
        return Posted(tensor, tensor.new_empty((self.size, *tensor.shape)))

    def post_reduce_scatter(self, tensor: Tensor) -> Posted:
        return Posted(tensor, tensor.new_empty(tensor.shape[1:]))


class Allocating:
    """A backend that computes nothing and allocates what the CUDA backend does."""

    def backward(
        self, grad_out, query, key, value, *_, packed, previous, is_last, on_kv_gradients, **__
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if is_last:
            grad_query = torch.empty_like(query)
        else:
            grad_query = torch.empty_like(query, dtype=torch.float32) if previous is None else previous
        grad_kv = key.new_empty((2, *key.shape), dtype=torch.float32)
        grad_packed = None if packed is None else torch.empty_like(packed, dtype=torch.float32)
        if on_kv_gradients is not None:
            on_kv_gradients(grad_kv, grad_packed)
        return grad_query, grad_kv, grad_packed

    def unpack(self, grad_packed, index, geometry, *, grad_kv, dtype) -> Tensor:
        return torch.empty_like(grad_kv, dtype=dtype)


class Peak(TorchDispatchMode):
    """The most bytes of float tensors, made under it, that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.is_floating_point():
                storage = each.untyped_storage()
                if storage._cdata not in given:
                    self._alive[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        self._alive = {key: each for key, each in self._alive.items() if each[0]() is not None}
        self.num_bytes = max(self.num_bytes, sum(each[1] for each in self._alive.values()))
        return result


def peak_of_backward(plan: Plan, model: ModelShape) -> int:
    """Bytes beside the arguments."""
    inner = plan.ring.schedule.inner_size
    outer = plan.cp // inner
    wires = {size: Wire(size) if size > 1 else SoloTransport() for size in (inner, outer, plan.cp)}
    groups = RingTransports(
        cp=wires[plan.cp],
        inner=wires[inner],
        outer=wires[outer],
        inner_gradient=wires[inner],
        outer_gradient=wires[outer],
    )
    context = RingContext(
        layout=SequenceLayout("striped", seq_len=plan.seq_len, cp_size=plan.cp, node_size=plan.ring_node_size),
        documents=None,
        groups=groups,
        schedule=ring_schedule(plan.schedule, cp_rank=0, cp_size=plan.cp, inner_size=inner),
        backend=Allocating(),
        softmax_scale=1.0,
    )
    query = torch.zeros(1, LOCAL_LEN, model.num_heads, HEAD_DIM, dtype=torch.bfloat16)
    key = torch.zeros(1, LOCAL_LEN, model.num_kv_heads, HEAD_DIM, dtype=torch.bfloat16)
    packed = torch.zeros(2, 1, model.num_heads, PACK_WIDTH, HEAD_DIM, dtype=torch.bfloat16)
    lse = torch.zeros(1, model.num_heads, LOCAL_LEN)
    index = VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=plan.seq_len)
    with Peak() as peak:
        ring_backward(query, query, key, key, packed, lse, lse, index, context)
    return peak.num_bytes


@pytest.mark.parametrize("heads", [(16, 2), (32, 2), (4, 4)])
@pytest.mark.parametrize(
    ("schedule", "cp", "node", "spare"),
    [
        ("flat", 1, 8, 0),
        ("flat", 2, 8, 2),
        ("flat", 8, 8, 0),
        ("hierarchical", 8, 2, 2),
        ("hierarchical", 16, 4, 0),
        ("hierarchical", 32, 8, 0),
        ("gather", 4, 4, 0),
        ("gather", 16, 4, 0),
        ("gather", 4, 1, 0),
    ],
)
def test_the_planner_counts_what_a_backward_holds(schedule, cp, node, spare, heads):
    """Never less, and exactly but for ``spare`` sets of keys where rings of two are counted as larger ones."""
    sizes = dict(zip(("num_heads", "num_kv_heads"), heads, strict=True))
    model = ModelShape(
        name="x", num_layers=1, hidden_size=64, ffn_hidden_size=64, head_dim=HEAD_DIM, vocab_size=64, **sizes
    )
    plan = Plan(seq_len=LOCAL_LEN * cp, cp=cp, node_size=node, schedule=schedule, pack_width=PACK_WIDTH)
    layer = LayerActivations.of(model, plan)
    gradients = layer.query + 2 * layer.key
    arguments = layer.lse + (layer.packs if cp == 1 else 0)  # delta, and packs made again
    counted = attention_bytes(layer, plan) - arguments + gradients
    measured = peak_of_backward(plan, model)
    assert 0 <= counted - measured <= spare * 2 * layer.key


def test_a_gathered_batch_is_held_once():
    """With a batch the keys of a node are put in another order: what arrived is not kept beside them."""
    arrived = []

    class Gathering(Wire):
        def post_all_gather(self, tensor: Tensor) -> Posted:
            posted = super().post_all_gather(tensor)
            arrived.append(weakref.ref(posted.received.untyped_storage()))
            return posted

    node, solo = Gathering(2), SoloTransport()
    groups = RingTransports(cp=node, inner=node, outer=solo, inner_gradient=node, outer_gradient=solo)
    schedule = ring_schedule("gather", cp_rank=0, cp_size=2, inner_size=2)
    key, value = torch.zeros(2, 2, 4, 1, 8)
    for _, key_block, _ in rotate_kv(post_kv(key, value, schedule, groups), schedule.steps, schedule, groups):
        assert key_block.shape == (2, 8, 1, 8)
        assert [each() for each in arrived] == [None, None]
