"""Block lists in a ring: every number of ranks, layout and schedule selects the same chunks and attends to them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megatron_mtraining import BlockListIndex, MTrainingConfig, select
from megatron_mtraining.errors import RankMismatchError
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.testing.simulator import RankSimulator

from .cases import join, random_problem, solve_local_part, solve_on_one_device, worst_error

SEQ_LEN, BLOCK = 192, 4
CONFIGS = {
    "moba": MTrainingConfig(pattern="moba", moba_chunk=16, moba_top_k=3, block_size=BLOCK, dense_below=12),
    "xattention": MTrainingConfig(
        pattern="xattention",
        xattention_block=8,
        xattention_stride=2,
        xattention_threshold=0.5,
        block_size=BLOCK,
        dense_below=12,
    ),
}
BOUNDS = {"one sequence": None, "packed documents": (0, 5, 5, 14, 43, 192)}
RINGS = [
    ("contiguous", "flat", 2, None),
    ("zigzag", "hierarchical", 4, 2),
    ("striped", "gather", 4, 2),
    ("node_striped", "hierarchical", 6, 3),
    ("rotated", "flat", 3, None),
]


@cache
def solved(pattern, rows):
    """A problem whose index is selected on one device, and the oracle's results for it."""
    torch.manual_seed(7)
    problem = random_problem(SEQ_LEN, block_size=BLOCK, bounds=BOUNDS[rows])
    index = select(problem.query, problem.key, CONFIGS[pattern], cu_seqlens=problem.cu_seqlens)
    problem = problem._replace(index=index)
    return problem, solve_on_one_device(problem)


def lists_of(index: BlockListIndex, blocks):
    """What each block keeps: by row, head and global block."""
    found = {}
    for row in range(index.rows):
        for head in range(index.num_lists):
            for slot, block in enumerate(blocks.tolist()):
                entries = slice(*index.starts[row, head, slot : slot + 2].tolist())
                masks = None if index.row_masks is None else index.row_masks[entries].tolist()
                found[row, head, block] = (index.chunks[entries].tolist(), masks)
    return found


CASES = [
    (*ring, pattern, rows)
    for number, ring in enumerate(RINGS)
    for pattern, rows in zip(CONFIGS, BOUNDS if number % 2 else reversed(BOUNDS), strict=True)
]
"""Each ring with each pattern; packs and whole sequences take turns."""


@pytest.mark.parametrize(("kind", "schedule", "cp_size", "inner_size", "pattern", "rows"), CASES)
def test_a_ring_selects_and_attends_as_one_device_does(kind, schedule, cp_size, inner_size, pattern, rows):
    problem, exact = solved(pattern, rows)
    layout = SequenceLayout(kind, seq_len=SEQ_LEN, cp_size=cp_size, block_size=BLOCK, node_size=inner_size)

    def body(group):
        query, key = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:2])
        options = {"layout": layout, "groups": group, "cu_seqlens": problem.cu_seqlens}
        index = select(query, key, CONFIGS[pattern], **options)
        groups = group if inner_size is None else group.ring_groups(inner_size)
        part = solve_local_part(problem, layout, groups, config=CONFIGS[pattern], schedule=schedule)
        return lists_of(index, layout.blocks(group.rank)), part

    lists, parts = zip(*RankSimulator(cp_size).run(body), strict=True)
    merged = {key: value for found in lists for key, value in found.items()}
    assert merged == lists_of(problem.index, torch.arange(layout.num_blocks))
    assert worst_error(join(parts, layout), exact) <= 1e-10


def test_lists_of_another_layout_are_refused():
    problem, _ = solved("moba", "one sequence")
    layouts = [SequenceLayout(kind, seq_len=SEQ_LEN, cp_size=2, block_size=BLOCK) for kind in ("contiguous", "striped")]

    def body(group):
        query, key = (shard_sequence(each, layouts[0], cp_rank=group.rank, dim=1) for each in problem[:2])
        index = select(query, key, CONFIGS["moba"], layout=layouts[0], groups=group)
        sentence = "index.query_blocks\\[.*\\] must be .*, the block of the queries there, got .* Select with"
        with pytest.raises(ValueError, match=sentence):
            solve_local_part(problem._replace(index=index), layouts[1], group)

    RankSimulator(2).run(body)


def test_ranks_with_other_hyperparameters_are_named():
    problem, _ = solved("moba", "one sequence")
    layout = SequenceLayout("striped", seq_len=SEQ_LEN, cp_size=2, block_size=BLOCK)

    def body(group):
        query, key = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:2])
        config = CONFIGS["xattention" if group.rank else "moba"]
        with pytest.raises(RankMismatchError, match="config must be the same on every rank of the group"):
            select(query, key, config, layout=layout, groups=group)

    RankSimulator(2).run(body)
