"""What ring attention refuses, in one sentence each and before anything is sent."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import BackendUnavailableError
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import RingGroups
from megatron_mtraining.types import VerticalSlashIndex

from .cases import random_problem
from .recording import RecordingTransport, start_log

CP_SIZE = 4


def refusal(**changes):
    """The error of a call on four ranks with changed arguments, the same on every rank, and what rank 0 sent before."""
    problem = random_problem(64, block_size=4, heads=(4, 2))
    layout = SequenceLayout("striped", seq_len=64, cp_size=CP_SIZE, block_size=4)

    def body(group):
        log = start_log()
        tensors = [shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:3]]
        arguments = dict(zip(("query", "key", "value"), tensors, strict=True))
        arguments |= {"index": problem.index, "layout": layout, "groups": RecordingTransport("cp", group)}
        for name, change in changes.items():
            arguments[name] = change(group, arguments) if callable(change) else change
        with pytest.raises((ValueError, BackendUnavailableError)) as caught:
            sparse_attention(**arguments)
        return caught.value, log

    outcomes = RankSimulator(CP_SIZE).run(body)
    assert all(log == ["cp all_gather"] for _, log in outcomes), "only the news of the refusal travels"
    return outcomes[0][0]


def odd_heads(group, arguments):
    return torch.zeros(1, 16, 3, 8, dtype=torch.float64)


def groups_of(**levels):
    """The change that gives these levels groups of these ranks."""

    def make(group, _):
        return RingGroups(
            cp=RecordingTransport("cp", group), **{name: group.split(ranks) for name, ranks in levels.items()}
        )

    return {"groups": make}


def dense_index(**shape):
    return VerticalSlashIndex.dense(**({"rows": 1, "num_heads": 4, "seq_len": 64, "block_size": 4} | shape))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"layout": "striped"},
            "layout must be a SequenceLayout, got 'striped'. SequenceLayout(kind, seq_len=..., cp_size=...) makes one.",
        ),
        (
            {"layout": SequenceLayout("striped", seq_len=64, cp_size=2, block_size=4)},
            "layout.cp_size must be the size 4 of the context-parallel group, got 2.",
        ),
        (
            {"layout": SequenceLayout("striped", seq_len=128, cp_size=4, block_size=4)},
            "query.shape[1] must be the layout's local_len 32, got 16. "
            "Give each rank its own part, as shard_sequence cuts it.",
        ),
        (
            {"index": dense_index(block_size=8)},
            "layout.block_size must be the block_size 8 of config and index, got 4.",
        ),
        (
            {"index": dense_index(block_size=8), "config": MTrainingConfig(block_size=4)},
            "index.block_size must be the block_size 4 of config, got 8.",
        ),
        ({"layout": None}, "layout must be given with groups, got None. Pass the layout that the batch was split by."),
        (
            {"index": None},
            "config or index must be given, got neither. Pass an MTrainingConfig, or an index of your own.",
        ),
        ({"index": 7}, "index must be a VerticalSlashIndex or a BlockListIndex, got int. select makes one."),
        (
            {"index": dense_index(num_heads=3)},
            "index.num_lists must be 4 or 2, the heads of query or of key, got 3.",
        ),
        ({"index": dense_index(rows=2)}, "index.rows must be 1, the batch size, got 2."),
        ({"index": dense_index(seq_len=128)}, "index.slash must be in [0, 16), got 0 to 31."),
        ({"key": odd_heads, "value": odd_heads}, "query.shape[2] must be a multiple of the 3 key heads, got 4."),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite and positive, got nan."),
        (
            {"cu_seqlens": torch.tensor([0, 16], dtype=torch.int32)},
            "cu_seqlens[-1] must be the sequence length 64, got 16. "
            "Add the padding at the end as a document of its own.",
        ),
        (
            groups_of(inner=[[0, 1], [2, 3]]),
            "groups.inner and groups.outer must be of sizes whose product is the size 4 of groups.cp, got 2 and 1. "
            "Create them with megatron_mtraining.transport.create_ring_groups.",
        ),
        (
            groups_of(outer=[[0, 1], [2, 3]]),
            "groups.inner and groups.outer must be of sizes whose product is the size 4 of groups.cp, got 1 and 2. "
            "Create them with megatron_mtraining.transport.create_ring_groups.",
        ),
        (
            groups_of(inner=[[0, 2], [1, 3]], outer=[[0, 1], [2, 3]]),
            "groups.inner must be the group of ranks (0, 1) of groups.cp, got that of ranks (0, 2).",
        ),
        (
            groups_of(inner=[[0, 1], [2, 3]], outer=[[0, 3], [1, 2]]),
            "groups.outer must be the group of ranks (0, 2) of groups.cp, got that of ranks (0, 3).",
        ),
        (
            groups_of(inner_gradient=[[0, 1], [2, 3]]),
            "groups.inner_gradient must be of the ranks (0, 1, 2, 3) of groups.inner, got of ranks (0, 1).",
        ),
    ],
)
def test_one_sentence_each(changes, sentence):
    assert str(refusal(**changes)) == sentence


def test_a_backend_that_cannot_run_here_says_what_would_make_it_run():
    assert isinstance(refusal(config=MTrainingConfig(backend="cuda", block_size=4)), BackendUnavailableError)
