"""What ring attention refuses, in one sentence each and before anything is sent."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining.errors import BackendUnavailableError
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.ring import ring_attention
from megatron_mtraining.testing.simulator import RankSimulator
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
        arguments |= {"index": problem.index, "layout": layout, "cp_group": RecordingTransport("cp", group)}
        for name, change in changes.items():
            arguments[name] = change(group, arguments) if callable(change) else change
        tensors = [arguments.pop(name) for name in ("query", "key", "value", "index")]
        with pytest.raises((ValueError, BackendUnavailableError)) as caught:
            ring_attention(*tensors, **arguments)
        return caught.value, log

    outcomes = RankSimulator(CP_SIZE).run(body)
    assert all(log == ["cp all_gather"] for _, log in outcomes), "only the news of the refusal travels"
    return outcomes[0][0]


def odd_heads(group, arguments):
    return torch.zeros(1, 16, 3, 8, dtype=torch.float64)


def dense_index(**shape):
    return VerticalSlashIndex.dense(**({"rows": 1, "num_heads": 4, "seq_len": 64, "block_size": 4} | shape))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"layout": "striped"},
            "layout must be a SequenceLayout, got 'striped'. SequenceLayout(kind, seq_len=..., cp_size=...) makes one.",
        ),
        ({"schedule": "star"}, "schedule must be one of hierarchical, flat, gather, got 'star'."),
        (
            {"layout": SequenceLayout("striped", seq_len=64, cp_size=2, block_size=4)},
            "layout.cp_size must be the size 4 of cp_group, got 2.",
        ),
        (
            {"layout": SequenceLayout("striped", seq_len=128, cp_size=4, block_size=4)},
            "query.shape[1] must be the layout's local_len 32, got 16. "
            "Give each rank its own part, as shard_sequence cuts it.",
        ),
        ({"index": dense_index(block_size=8)}, "index.block_size must be the layout's block_size 4, got 8."),
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
        ({"backend": "fast"}, "backend must be one of auto, reference, cuda, got 'fast'."),
        (
            {"inner_group": lambda group, _: group.split([[0, 1], [2, 3]])},
            "inner_group and outer_group must be of sizes whose product is the size 4 of cp_group, got 2 and 1. "
            "Create them with megatron_mtraining.transport.create_ring_groups.",
        ),
        (
            {"outer_group": lambda group, _: group.split([[0, 1], [2, 3]])},
            "inner_group and outer_group must be of sizes whose product is the size 4 of cp_group, got 1 and 2. "
            "Create them with megatron_mtraining.transport.create_ring_groups.",
        ),
        (
            {
                "inner_group": lambda group, _: group.split([[0, 2], [1, 3]]),
                "outer_group": lambda group, _: group.split([[0, 1], [2, 3]]),
            },
            "inner_group must be the group of ranks (0, 1) of cp_group, got that of ranks (0, 2).",
        ),
        (
            {
                "inner_group": lambda group, _: group.split([[0, 1], [2, 3]]),
                "outer_group": lambda group, _: group.split([[0, 3], [1, 2]]),
            },
            "outer_group must be the group of ranks (0, 2) of cp_group, got that of ranks (0, 3).",
        ),
        (
            {"inner_gradient_group": lambda group, _: group.split([[0, 1], [2, 3]])},
            "inner_gradient_group must be of the ranks (0, 1, 2, 3) of inner_group, got of ranks (0, 1).",
        ),
    ],
)
def test_one_sentence_each(changes, sentence):
    assert str(refusal(**changes)) == sentence


def test_a_backend_that_cannot_run_here_says_what_would_make_it_run():
    assert isinstance(refusal(backend="cuda"), BackendUnavailableError)


def test_a_group_that_is_none_is_refused():
    problem = random_problem(16, block_size=4)
    layout = SequenceLayout("striped", seq_len=16, cp_size=1, block_size=4)
    with pytest.raises(ValueError, match="group must be a torch process group that this rank belongs to"):
        ring_attention(*problem[:3], problem.index, layout=layout, cp_group=None)
