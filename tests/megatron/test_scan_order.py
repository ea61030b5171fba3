"""Layers that scan a sequence from left to right see it in its order, and hand it back in that of the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from megatron.core.ssm import mamba_context_parallel
from torch import Tensor

from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.megatron import packed_seq_params
from megatron_mtraining.megatron.compat import has_module
from tests.layouts import node_size_of

from . import tiny_gpt
from .ranks import run_on_ranks
from .split import PATCHES, follow

GATED_DELTA = "megatron.core.ssm.gated_delta_net.common"


@pytest.fixture(autouse=True)
def megatron_as_it_was() -> Iterator[None]:
    yield
    PATCHES.undo()


def by_rank(whole: Tensor, layout: str, cp_size: int) -> Tensor:
    """The sequence as it lies after an all-to-all: each rank's part, one after the other."""
    sequence = SequenceLayout(
        layout, seq_len=whole.shape[0], cp_size=cp_size, block_size=8, node_size=node_size_of(cp_size)
    )
    return torch.cat([shard_sequence(whole, sequence, cp_rank=rank, dim=0) for rank in range(cp_size)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "rotated", "node_striped"])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_mamba_sees_the_order_of_the_sequence(layout: str, cp_size: int, packed: bool):
    follow(layout, block_size=8, node_size=node_size_of(cp_size))
    whole = torch.randn(192, 2, 5)
    params = packed_seq_params(torch.tensor([0, 50, 192], dtype=torch.int32)) if packed and layout != "zigzag" else None
    ranks = by_rank(whole, layout, cp_size)
    assert torch.equal(mamba_context_parallel._undo_attention_load_balancing(ranks, cp_size, params), whole)
    assert torch.equal(mamba_context_parallel._redo_attention_load_balancing(whole, cp_size, params), ranks)


def test_tables_of_an_evaluation_serve_the_training_after_it():
    """What inference mode makes, no backward could save."""
    follow("striped", block_size=3)
    with torch.inference_mode():
        mamba_context_parallel._undo_attention_load_balancing(torch.randn(12, 1, 1), 2, None)
    tokens = torch.randn(12, 1, 1, requires_grad=True)
    mamba_context_parallel._undo_attention_load_balancing(tokens, 2, None).sum().backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))


@pytest.mark.skipif(not has_module(GATED_DELTA), reason="this release does not split gated delta layers over ranks")
def test_gated_delta_layers_see_the_order_of_the_sequence():
    from megatron.core.ssm.gated_delta_net import common

    follow("rotated", block_size=8)
    assert common._undo_attention_load_balancing is mamba_context_parallel._undo_attention_load_balancing
    whole = torch.randn(192, 2, 5)
    ranks = by_rank(whole, "rotated", 3)
    rows, back = common._build_thd_cp_a2a_perm(torch.tensor([0, 50, 192], dtype=torch.int32), 3, 192)
    assert torch.equal(ranks[rows], whole)
    assert torch.equal(whole[back], ranks)


def around_a_scan() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Without and with documents: a rank's tokens, what Megatron's class for Mamba scans of them, and the way back.

    Every channel of a token holds its position.
    """
    from megatron.core import parallel_state

    whole = torch.arange(192.0).view(-1, 1, 1).expand(-1, 1, 36).contiguous()
    seen = []
    with tiny_gpt.parallel_job(cp_size=2, inner_size=1):
        group = parallel_state.get_context_parallel_group()
        names = inspect.signature(mamba_context_parallel.MambaContextParallel).parameters
        sizes = {"d_inner_local_tp": 8, "nheads_local_tp": 4, "ngroups_local_tp": 2, "d_state": 4}
        weights = dict.fromkeys(names)  # of the convolution and the scan, which are left out here
        mamba = mamba_context_parallel.MambaContextParallel(**(weights | sizes | {"cp_group": group}))
        sequence = SequenceLayout("striped", seq_len=192, cp_size=2, block_size=8)
        part = shard_sequence(whole, sequence, cp_rank=group.rank(), dim=0).to(tiny_gpt.device())
        for params in (None, packed_seq_params(torch.tensor([0, 50, 192], dtype=torch.int32))):
            scanned = mamba.pre_conv_ssm(part, params)
            back = mamba.post_conv_ssm(scanned[..., :4].contiguous(), params)
            seen.append((part.cpu(), scanned.cpu(), back.cpu()))
    return seen


def test_the_all_to_alls_of_mamba_follow_the_layout():
    for seen in run_on_ranks(around_a_scan, 2):
        for part, scanned, back in seen:
            assert torch.equal(scanned, torch.arange(192.0).view(-1, 1, 1).expand(-1, 1, 18))
            assert torch.equal(back, part[..., :8])
