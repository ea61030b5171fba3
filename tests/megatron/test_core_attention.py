"""Arguments that a layer passes to attention: every group, field and scale that it was made with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.megatron import attention, packed_seq_params, runtime
from megatron_mtraining.transport import RingGroups

from .fakes import Group
from .split import fresh_process
from .test_unsupported import build, transformer_config

GROUPS = RingGroups(cp="ranks", inner="inner", outer="outer")
CONFIG = MTrainingConfig(layout="node_striped", schedule="gather", backend="reference", block_size=8, dense_layers=(2,))
SCALE = 0.3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each call of attention, which computes nothing."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def call(*given: Any, **options: Any) -> Any:
        seen.append((given, options))
        return SimpleNamespace(out=torch.zeros(1, 16, 4, 8))

    monkeypatch.setattr(attention, "attend", call)
    made = runtime.Runtime(config=CONFIG, cp_group=Group(4), ring_groups=GROUPS, inner_size=2)
    fresh_process(monkeypatch, runtime=made)
    return seen


def attend(layer_number: int) -> None:
    layer = build(transformer_config(cp_size=4), layer_number=layer_number, softmax_scale=SCALE)
    params = packed_seq_params(torch.tensor([0, 20, 64], dtype=torch.int32))
    layer(*(torch.zeros(16, 4, 8) for _ in range(3)), None, packed_seq_params=params)


@pytest.mark.parametrize(("layer_number", "config"), [(1, CONFIG), (2, replace(CONFIG, pattern="dense"))])
def test_a_layer_passes_all_that_it_was_made_with(calls: list[Any], layer_number: int, config: MTrainingConfig):
    """A dense layer calls the same function, with the pattern that keeps every key."""
    attend(layer_number)
    (((*tensors, given_config), options),) = calls
    assert [tuple(tensor.shape) for tensor in tensors] == [(1, 16, 4, 8)] * 3
    assert given_config == config
    assert options.pop("cu_seqlens").tolist() == [0, 20, 64]
    assert callable(options.pop("on_index"))
    assert options == {
        "index": None,
        "layout": SequenceLayout("node_striped", seq_len=64, cp_size=4, block_size=8, node_size=2),
        "groups": GROUPS,
        "softmax_scale": SCALE,
        "num_valid": None,
    }
