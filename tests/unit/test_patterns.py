"""The other patterns: what they select, pair by pair as their papers say, and attention over block lists."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtraining import (
    BlockListIndex,
    MTrainingConfig,
    VerticalSlashIndex,
    select,
    sparse_attention,
)
from megatron_mtraining.errors import BackendUnavailableError
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.metrics import attention_recall, computed_pairs_of_lists, list_pairs, pairs_by_owner
from megatron_mtraining.selection import xattention_tiles
from megatron_mtraining.selection.xattention_groups import select_until
from megatron_mtraining.testing.error_budget import run_with_gradients
from megatron_mtraining.testing.oracle import allowed_mask, oracle_attention

from .attention_inputs import as_cu_seqlens, random_inputs
from .brute_patterns import moba_mask, xattention_blocks

BLOCK = 8
MOBA = MTrainingConfig(pattern="moba", moba_chunk=16, moba_top_k=3, block_size=BLOCK, dense_below=0)
XATTENTION = MTrainingConfig(
    pattern="xattention",
    xattention_block=16,
    xattention_stride=4,
    xattention_threshold=0.6,
    block_size=BLOCK,
    dense_below=24,
)
BOUNDS = (0, 3, 3, 20, 31, 90, 104)


def random_lists(batch: int, num_lists: int, seq_len: int, *, chunk_blocks: int, masks: bool) -> BlockListIndex:
    """Lists of any length, of which some are empty, with any rows."""
    num_blocks = -(-seq_len // BLOCK)
    num_chunks = -(-num_blocks // chunk_blocks)

    def chunks() -> list[int]:
        return sorted(random.sample(range(num_chunks), random.randint(0, num_chunks)))

    lists = [[[chunks() for _ in range(num_blocks)] for _ in range(num_lists)] for _ in range(batch)]
    rows = [[[[random.getrandbits(BLOCK) for _ in each] for each in head] for head in row] for row in lists]
    return BlockListIndex.from_lists(lists, rows if masks else None, chunk_blocks=chunk_blocks, block_size=BLOCK)


@pytest.mark.parametrize(
    ("batch", "lists", "seq_len", "chunk_blocks", "masks", "bounds"),
    [
        (2, 4, 61, 2, True, None),
        (1, 4, 64, 1, False, None),
        (1, 2, 61, 3, True, (0, 3, 3, 30, 61)),
        (1, 4, 61, 4, False, (0, 17, 20, 61)),
        (1, 4, 5, 8, True, None),
    ],
)
def test_attention_over_block_lists_is_the_oracle(batch, lists, seq_len, chunk_blocks, masks, bounds):
    index = random_lists(batch, lists, seq_len, chunk_blocks=chunk_blocks, masks=masks)
    inputs = random_inputs(batch, seq_len, 4, 2, 8)
    options = {"index": index, "cu_seqlens": as_cu_seqlens(bounds)}
    gradients = {"grad_out": torch.randn_like(inputs[0]), "grad_lse": torch.randn(batch, 4, seq_len).double()}
    ours = run_with_gradients(lambda *given: sparse_attention(*given, **options), *inputs, **gradients)
    exact = run_with_gradients(lambda *given: oracle_attention(*given, **options), *inputs, **gradients)
    for name in ours:
        torch.testing.assert_close(ours[name], exact[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("batch", "seq_len", "bounds", "dense_below"),
    [(2, 75, None, 0), (2, 75, None, 24), (1, 104, BOUNDS, 0), (1, 104, BOUNDS, 24), (1, 150, (0, 60, 150), 60)],
)
def test_moba_selects_what_the_paper_says(batch, seq_len, bounds, dense_below):
    query, key, _ = random_inputs(batch, seq_len, 4, 2, 8)
    config = MTrainingConfig(pattern="moba", moba_chunk=16, moba_top_k=3, block_size=BLOCK, dense_below=dense_below)
    index = select(query, key, config, cu_seqlens=as_cu_seqlens(bounds))
    kept = allowed_mask(index, seq_len=seq_len, cu_seqlens=as_cu_seqlens(bounds))
    expected = moba_mask(query, key, config, bounds)
    if bounds is not None:
        document = torch.tensor([sum(token >= bound for bound in bounds) for token in range(seq_len)])
        expected &= document[:, None] == document[None, :]
    assert torch.equal(kept, expected)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_row_masks_trace_under_torch_compile():
    index = BlockListIndex.from_lists([[[[0], [0, 1]]]], [[[[255], [15, 255]]]], block_size=8)
    inputs = random_inputs(1, 16, 1, 1, 4)

    def attend(*tensors):
        return sparse_attention(*tensors, index=index).out

    torch.testing.assert_close(torch.compile(attend, backend="eager")(*inputs), attend(*inputs))


def test_a_block_has_no_more_rows_than_a_row_mask_bits():
    with pytest.raises(ValueError, match="^index.block_size must be at most 64, the bits of a row mask, got 128"):
        BlockListIndex.from_lists([[[[0]]]], [[[[1]]]], block_size=128)


def test_a_backend_that_is_named_never_falls_back_for_lists_either():
    index = random_lists(1, 2, 61, chunk_blocks=2, masks=True)
    inputs = random_inputs(1, 61, 4, 2, 8)
    chosen, named = (
        sparse_attention(*inputs, MTrainingConfig(backend=name, block_size=BLOCK), index=index).out
        for name in ("auto", "reference")
    )
    assert torch.equal(chosen, named)
    with pytest.raises(BackendUnavailableError, match="^The CUDA kernels "):
        sparse_attention(*inputs, MTrainingConfig(backend="cuda", block_size=BLOCK), index=index)


def test_moba_takes_the_earlier_of_equal_chunks_and_all_where_there_are_few():
    query, key = torch.ones(1, 80, 1, 8), torch.ones(1, 80, 1, 8)
    index = select(query, key, MOBA)
    lists = [index.chunks[first:stop].tolist() for first, stop in pairwise(index.starts[0, 0].tolist())]
    assert lists == [[0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 3], [0, 1, 4], [0, 1, 4]]
    assert set(index.row_masks.tolist()) == {(1 << BLOCK) - 1}


@pytest.mark.parametrize(("batch", "seq_len", "bounds"), [(2, 75, None), (1, 104, BOUNDS)])
def test_xattention_selects_what_the_paper_says(batch, seq_len, bounds):
    query, key, _ = random_inputs(batch, seq_len, 4, 2, 8)
    index = select(2.0 * query, key, XATTENTION, cu_seqlens=as_cu_seqlens(bounds))
    expected = xattention_blocks(2.0 * query, key, XATTENTION, bounds)
    lists = [
        index.chunks[index.starts[row, head, block] : index.starts[row, head, block + 1]].tolist()
        for row, head, block in torch.cartesian_prod(*map(torch.arange, expected.shape[:3])).tolist()
    ]
    assert lists == [each.nonzero().flatten().tolist() for each in expected.flatten(0, 2)]
    assert len(set(map(tuple, lists))) > 10


@pytest.mark.parametrize("takes_tiles", [False, True])
def test_xattention_takes_the_callers_scale(takes_tiles, monkeypatch):
    """Four times the default one is what queries four times as large say, bit for bit."""
    monkeypatch.setattr(xattention_tiles, "takes", lambda call: takes_tiles)
    query, key, _ = (tensor.bfloat16() for tensor in random_inputs(1, 104, 4, 2, 8))
    own, larger, default = (
        select(given, key, XATTENTION, softmax_scale=scale).tensors[:2]
        for given, scale in ((query, 4 * 8**-0.5), (4 * query, None), (query, None))
    )
    assert all(map(torch.equal, own, larger))
    assert not torch.equal(own[0], default[0])


@pytest.mark.parametrize("config", [MOBA, XATTENTION], ids=lambda config: config.pattern)
def test_selecting_in_small_pieces_selects_the_same(config, monkeypatch):
    query, key, _ = random_inputs(2, 104, 4, 2, 8)
    whole = select(query, key, config)
    monkeypatch.setattr("megatron_mtraining.selection.xattention._MASS_ELEMENTS", 2**6)
    monkeypatch.setattr("megatron_mtraining.selection.xattention.SCRATCH_ELEMENTS", 2**9)
    monkeypatch.setattr("megatron_mtraining.selection.moba.SCRATCH_ELEMENTS", 2**6)
    for ours, other in zip(select(query, key, config).tensors, whole.tensors, strict=True):
        assert ours is other is None or torch.equal(ours, other)


def test_a_block_keeps_its_own_chunk_then_from_the_greatest_until_the_threshold():
    mass, own = torch.tensor([[30, 50, 50, 0, 70]]), torch.tensor([[0]])
    for threshold, kept in ((0.1, [0]), (0.5, [0, 4]), (0.501, [0, 1, 4]), (0.76, [0, 1, 2, 4]), (1.0, [0, 1, 2, 4])):
        assert select_until(mass, own, threshold=threshold)[0].nonzero().flatten().tolist() == kept
    assert select_until(torch.zeros_like(mass), own, threshold=0.9)[0].tolist() == [True] + [False] * 4


@pytest.mark.parametrize("pattern", ["dense", "moba", "xattention"])
def test_what_is_said_to_be_unused_changes_no_list(pattern):
    query, key, _ = random_inputs(1, 64, 2, 1, 8)
    own = {"moba_chunk": 16, "moba_top_k": 2, "xattention_block": 8, "xattention_threshold": 0.5}
    others = {
        "estimator": "last_window",
        "budget": "fixed",
        "num_probe_rows": 8,
        "num_probe_windows": 3,
        "sink_tokens": 1,
        "local_blocks": 3,
        "target_recall": 0.1,
        "max_density": 0.1,
        "dense_above": 0.1,
    }
    others |= {"vertical_top_p": 0.1, "slash_top_p": 0.1, "max_vertical": 2, "max_slash": 1, "slash_run_length": 3}
    config = MTrainingConfig(pattern=pattern, dense_below=0, block_size=8, xattention_stride=4, **own)
    changed = replace(config, **others)
    assert set(changed.unused) - set(config.unused) == set(others)
    lists, again = (select(query, key, each).tensors for each in (config, changed))
    assert all(torch.equal(*pair) for pair in zip(lists, again, strict=True) if pair != (None, None))


@pytest.mark.parametrize("pattern", ["dense", "moba", "xattention"])
@pytest.mark.parametrize("bounds", [(0, 20, 64), (0, 64)])
def test_short_documents_attend_densely(pattern, bounds):
    query, key, _ = random_inputs(1, 64, 4, 2, 8)
    config = MTrainingConfig(pattern=pattern, dense_below=64)
    index = select(query, key, config, cu_seqlens=as_cu_seqlens(bounds))
    assert isinstance(index, VerticalSlashIndex)
    assert allowed_mask(index, seq_len=64).any(0).sum() == 4 * 64 * 65 // 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"starts": torch.tensor([[[0, 1, 1]]])},
            "index.starts must be of lists for 3 query blocks, those here, got 2.",
        ),
        ({"starts": torch.tensor([[[0, 2, 1, 3]]])}, "index.starts must be ascending from list to list"),
        ({"starts": torch.tensor([[[0, 1, 1, 2]]])}, "index.chunks must be of 2 entries, as index.starts says, got 3."),
        ({"chunks": torch.tensor([0, 1, 3])}, "index.chunks must be in \\[0, 3\\), got 0 to 3."),
        ({"chunk_blocks": torch.tensor(3)}, "index.chunks must be in \\[0, 1\\), got 0 to 2."),
        ({"chunks": torch.tensor([0, 2, 1])}, "index.chunks must be strictly ascending in every list"),
        ({"query_blocks": torch.tensor([0, 1])}, "index.query_blocks must be int64 of shape \\(3,\\) on the CPU, got"),
        (
            {"query_blocks": torch.tensor([0, 2, 4])},
            "index.query_blocks\\[1\\] must be 1, the block of the queries there, got 2. Select with the layout and",
        ),
    ],
)
def test_lists_that_are_none_are_refused(change, sentence):
    tables = {"starts": torch.tensor([[[0, 1, 1, 3]]]), "chunks": torch.tensor([0, 1, 2])} | change
    blocks, chunk_blocks = tables.pop("query_blocks", None), int(tables.pop("chunk_blocks", 1))
    query, key, value = random_inputs(1, 20, 1, 1, 8)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        index = BlockListIndex(
            **{name: table.int() for name, table in tables.items()},
            block_size=BLOCK,
            query_blocks=blocks,
            chunk_blocks=chunk_blocks,
        )
        sparse_attention(query, key, value, index=index)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pattern": "flow"}, "pattern must be one of vertical_slash, dense, moba, xattention, got 'flow'."),
        ({"pattern": "moba", "moba_chunk": 100}, "moba_chunk must be a multiple of block_size = 64, got 100."),
        ({"pattern": "xattention", "xattention_block": 96}, "xattention_block must be a multiple of block_size = 64"),
        ({"pattern": "xattention", "xattention_stride": 24}, "xattention_stride must be a divisor of block_size = 64"),
        ({"pattern": "moba", "block_size": 128, "moba_chunk": 256}, "block_size must be at most 64 for the pattern"),
        ({"pattern": "moba", "index_sharing": "kv_group"}, "index_sharing must be head for the pattern moba, which"),
        ({"pattern": "xattention", "index_sharing": "kv_group"}, "index_sharing must be head for the pattern xatt"),
        ({"xattention_threshold": 0.0}, "xattention_threshold must be in \\(0, 1\\], got 0.0."),
        ({"moba_top_k": 0}, "moba_top_k must be an integer of at least 1, got 0."),
    ],
)
def test_configurations_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        MTrainingConfig(**options)


def test_published_hyperparameters_are_the_defaults():
    config = MTrainingConfig()
    assert (config.moba_chunk, config.moba_top_k) == (4096, 12)
    assert (config.xattention_block, config.xattention_stride, config.xattention_threshold) == (128, 16, 0.9)


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(("seq_len", "bounds"), [(61, None), (64, (0, 3, 3, 30, 64))])
def test_pairs_are_counted_as_the_mask_has_them(seq_len, bounds, masks):
    index = random_lists(1, 2, seq_len, chunk_blocks=3, masks=masks)
    layout = SequenceLayout("contiguous", seq_len=seq_len, cp_size=1, block_size=BLOCK)
    mask = allowed_mask(index, seq_len=seq_len, cu_seqlens=as_cu_seqlens(bounds))
    options = {"cp_rank": 0, "cu_seqlens": as_cu_seqlens(bounds)}
    assert torch.equal(computed_pairs_of_lists(index, layout, **options), mask.sum((2, 3)))
    assert pairs_by_owner(index, layout, **options).tolist() == [int(mask.sum())]
    assert torch.equal(computed_pairs_of_lists(index.per_head(4), layout, **options)[0, ::2], mask[0].sum((1, 2)))


@pytest.mark.parametrize("bits", [1, 8, 31, 32, 33, 63, 64])
def test_bits_of_both_halves_of_a_row_mask_are_counted(bits):
    words = [0, -1, 1 << 31, -(1 << 63), *(random.getrandbits(64) - (1 << 63) for _ in range(50))]
    expected = [(word & (1 << bits) - 1).bit_count() for word in words]
    assert list_pairs._count_bits(torch.tensor(words), bits).tolist() == expected


def test_counting_asks_the_device_for_nothing():
    """No operation runs whose result the host reads, or whose size is in the data."""
    index = random_lists(1, 2, 64, chunk_blocks=2, masks=True)
    layout = SequenceLayout("contiguous", seq_len=64, cp_size=1, block_size=BLOCK)
    ran = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            ran.append((operation.name(), kwargs or {}))
            return operation(*args, **(kwargs or {}))

    with Recorder():
        computed_pairs_of_lists(index, layout, cp_rank=0)
    sizes = [options.get("output_size") for name, options in ran if name == "aten::repeat_interleave.Tensor"]
    assert sizes == [index.chunks.numel()]
    assert not {"aten::nonzero", "aten::_local_scalar_dense"} & {name for name, _ in ran}


@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 30, 64)])
def test_recall_of_lists_is_the_kept_share_of_dense_attention(bounds):
    index, rows = random_lists(1, 2, 64, chunk_blocks=2, masks=True), (0, 7, 31, 63)
    query, key, _ = random_inputs(1, 64, 4, 2, 8)
    recall = attention_recall(query, key, index, rows=rows, cu_seqlens=as_cu_seqlens(bounds))
    kept = allowed_mask(index.per_head(4), seq_len=64, cu_seqlens=as_cu_seqlens(bounds))[0]
    everything = BlockListIndex.from_lists([[[[0]] * 8] * 4], chunk_blocks=8, block_size=BLOCK)
    dense = allowed_mask(everything, seq_len=64, cu_seqlens=as_cu_seqlens(bounds))[0]
    scores = torch.einsum("bqhd,bkhd->hqk", query, key.repeat_interleave(2, 2)) * 8**-0.5
    share = torch.softmax(scores.masked_fill(~dense, -torch.inf), -1) * kept
    torch.testing.assert_close(recall[0], share.sum(-1)[:, list(rows)], rtol=0, atol=1e-12)
