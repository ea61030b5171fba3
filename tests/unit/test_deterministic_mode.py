"""Nothing that torch refuses on a GPU in deterministic mode, which Megatron's ``--deterministic-mode`` turns on.

On a CPU torch has an order for every operation, so those that it has none for on CUDA are refused here instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtraining import MTrainingConfig, select, sparse_attention
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import attention_recall, computed_pairs_of_lists, kept_pairs, pairs_by_owner, ring_work
from megatron_mtraining.types import BlockListIndex

from .attention_inputs import as_cu_seqlens, random_inputs

SEQ, BLOCK = 96, 8
CONFIGS = {
    "last_window": {"num_probe_rows": 16, "max_vertical": 8, "max_slash": 2},
    "probe_windows": {
        "estimator": "probe_windows",
        "num_probe_rows": 16,
        "num_probe_windows": 8,
        "max_vertical": 8,
        "max_slash": 2,
    },
    "cost": {"budget": "cost", "estimator": "probe_windows", "num_probe_rows": 16, "num_probe_windows": 8},
    "cost with a bound": {"budget": "cost", "num_probe_rows": 16, "max_density": 0.4},
    "kv_group in runs": {"index_sharing": "kv_group", "slash_run_length": 2, "num_probe_rows": 16, "max_slash": 4},
    "moba": {"pattern": "moba", "moba_chunk": 16, "moba_top_k": 3},
    "xattention": {"pattern": "xattention", "xattention_block": 16, "xattention_stride": 4},
}
REFUSED = {
    torch.ops.aten.histc,
    torch.ops.aten.kthvalue,
    torch.ops.aten.median,
    torch.ops.aten.put_,
    torch.ops.aten.put,
}
OF_FLOATS = {torch.ops.aten.cumsum, torch.ops.aten.cumsum_, torch.ops.aten.cumprod, torch.ops.aten.logcumsumexp}
"""Refused for floats only. Both as in ``torch.use_deterministic_algorithms``, of what this package might use."""


class AsOnCuda(TorchDispatchMode):
    """Refuses what has no deterministic algorithm on CUDA."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket
        if name in REFUSED or (name in OF_FLOATS and args[0].is_floating_point()):
            raise RuntimeError(f"{name} has no deterministic algorithm on CUDA")
        return function(*args, **(kwargs or {}))


def test_what_torch_refuses_is_refused():
    with AsOnCuda(), pytest.raises(RuntimeError, match="cumsum has no deterministic algorithm"):
        torch.ones(2).cumsum(0)


@pytest.mark.parametrize("bounds", [None, [0, 3, 40, 96]])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_and_its_figures(name: str, bounds: list[int] | None):
    config = MTrainingConfig.algorithm_1(
        block_size=BLOCK, dense_below=0, sink_tokens=2, local_blocks=1, **CONFIGS[name]
    )
    query, key, value = (each.requires_grad_() for each in random_inputs(1, SEQ, 4, 2, 8, dtype=torch.float32))
    cu_seqlens = as_cu_seqlens(bounds)
    with AsOnCuda():
        index = select(query, key, config, cu_seqlens=cu_seqlens)
        out, _ = sparse_attention(query, key, value, index=index, cu_seqlens=cu_seqlens)
        torch.autograd.grad(out.sum(), (query, key, value))
        attention_recall(query, key, index, rows=(5, SEQ - 1), cu_seqlens=cu_seqlens)
        if isinstance(index, BlockListIndex):
            layout = SequenceLayout("striped", seq_len=SEQ, cp_size=1, block_size=BLOCK)
            computed_pairs_of_lists(index, layout, cp_rank=0, cu_seqlens=cu_seqlens)
            pairs_by_owner(index, layout, cp_rank=0, cu_seqlens=cu_seqlens)
        else:
            kept_pairs(index, seq_len=SEQ, cu_seqlens=cu_seqlens)
            layout = SequenceLayout("striped", seq_len=SEQ, cp_size=2, block_size=BLOCK)
            ring_work(index, layout, [[(0,), (1,)], [(1,), (0,)]], cu_seqlens=cu_seqlens)
