"""What a layer hands to its selection and to the ring: every group, field and scale that it was made with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.megatron import core_attention, packed_seq_params, runtime
from megatron_mtraining.transport import RingGroups

from .fakes import Group
from .test_refusals import build, transformer_config

GROUPS = RingGroups(inner="inner", outer="outer", inner_gradient="inner gradients", outer_gradient="outer gradients")
CONFIG = MTrainingConfig(
    layout="node_striped", schedule="gather", backend="reference", block_size=8, dense_layers=(2,), deterministic=True
)
SCALE = 0.3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The keywords with which each function was called last; none of them computes."""
    seen: dict[str, dict[str, Any]] = {}

    def stand_in(name: str, result: Any) -> None:
        def call(*tensors: Any, **options: Any) -> Any:
            seen[name] = options
            return result

        monkeypatch.setattr(core_attention, name, call)

    stand_in("start_ring", SimpleNamespace(post="post"))
    stand_in("select_index", "lists")
    stand_in("ring_attention", SimpleNamespace(out=torch.zeros(1, 16, 4, 8)))
    made = runtime.Runtime(config=CONFIG, cp_group=Group(4), ring_groups=GROUPS, inner_size=2)
    monkeypatch.setattr(runtime, "_runtime", made)
    return seen


def attend(layer_number: int) -> None:
    attention = build(transformer_config(cp_size=4), layer_number=layer_number, softmax_scale=SCALE)
    params = packed_seq_params(torch.tensor([0, 20, 64], dtype=torch.int32))
    attention(*(torch.zeros(16, 4, 8) for _ in range(3)), None, packed_seq_params=params)


def test_a_sparse_layer(calls: dict[str, dict[str, Any]]):
    attend(layer_number=1)
    cp_group = runtime.current_runtime().cp_group
    groups = {f"{name}_group": getattr(GROUPS, name) for name in ("inner", "outer", "inner_gradient", "outer_gradient")}
    ring = {"cp_group": cp_group, "schedule": "gather", **groups}
    layout = SequenceLayout("node_striped", seq_len=64, cp_size=4, block_size=8, node_size=2)
    assert calls["start_ring"] == ring
    for name in ("select_index", "ring_attention"):
        assert calls[name].pop("cu_seqlens").tolist() == [0, 20, 64]
        assert (calls[name].pop("layout"), calls[name].pop("softmax_scale")) == (layout, SCALE)
    assert calls["select_index"] == {"cp_group": cp_group, "num_valid": None, "meanwhile": "post"}
    start = calls["ring_attention"].pop("start")
    assert start.post == "post"
    assert calls["ring_attention"] == ring | {"deterministic": True, "backend": "reference"}


def test_a_dense_layer_selects_nothing_and_sends_nothing_before(calls: dict[str, dict[str, Any]]):
    attend(layer_number=2)
    assert calls.keys() == {"ring_attention"}
    assert calls["ring_attention"]["start"] is None
    assert calls["ring_attention"]["softmax_scale"] == SCALE
