"""The bench's index sets: drawn ones, recorded ones, and the same sets as FlexAttention's block masks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_mtraining.commands.balance.synthetic import IndexShape, disjoint_runs
from megatron_mtraining.metrics import Recording
from megatron_mtraining.metrics.indices import runs_of
from megatron_mtraining.testing.oracle import allowed_mask, oracle_attention
from megatron_mtraining.types import VerticalSlashIndex
from tools.bench import baselines, record  # noqa: F401  (baselines register themselves)
from tools.bench.baselines.block_masks import MASK_BLOCK, SelectedTables, issued_pairs
from tools.bench.baselines.issued import issued_pairs_of_tiles
from tools.bench.indices import synthetic_index
from tools.bench.problem import Problem
from tools.bench.registry import REGISTRY

from .attention_inputs import random_index


def problem(**sizes: int | str) -> Problem:
    given_sizes = {"seq_len": 2048, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, **sizes}
    return Problem(dtype=torch.float32, device=torch.device("cpu"), **given_sizes)


@given(count=st.integers(0, 20), run=st.integers(1, 5), spare=st.integers(0, 10), seed=st.integers(0, 99))
def test_runs_are_as_long_as_asked_and_never_touch(count, run, spare, seed):
    start = 7
    stop = start + -(-count // run) * (run + 1) + spare
    generator = torch.Generator().manual_seed(seed)
    entries = disjoint_runs(count, run=run, start=start, stop=stop, generator=generator)
    assert entries == sorted(set(entries)) and len(entries) == count
    assert all(start <= entry < stop for entry in entries)
    lengths = [length for _, length in runs_of(entries)]
    assert lengths == [run] * (count // run) + [count % run] * (count % run > 0)


@pytest.mark.parametrize(("run", "index_sharing", "num_lists"), [(1, "head", 4), (16, "head", 4), (16, "kv_group", 2)])
def test_a_synthetic_index_has_the_shape_that_was_asked_for(run, index_sharing, num_lists):
    shape = IndexShape(distances=14, local=3, verticals=200, sinks=32, run=run)
    index = synthetic_index(problem(batch=2, index_sharing=index_sharing), shape)
    assert (index.num_vertical == 200).all() and (index.num_slash == 14).all()
    assert index.vertical[..., :32].tolist() == [[list(range(32))] * num_lists] * 2
    assert index.slash[..., :3].tolist() == [[[0, 1, 2]] * num_lists] * 2
    assert len({tuple(head) for row in index.vertical.tolist() for head in row}) == 2 * num_lists
    lengths = {length for row in index.vertical.tolist() for head in row for _, length in runs_of(head[32:])}
    assert lengths == ({1} if run == 1 else {16, 8})  # 168 columns are ten runs of 16 and a half


def test_a_recording_survives_its_file_and_fills_every_head(tmp_path):
    heads = {"vertical": [[[0, 8], [100, 2]], [[0, 8]]], "slash": [[[0, 2], [5, 1]], [[0, 3]]]}
    recording = Recording(seq_len=512, block_size=64, **heads, source={"origin": "a test"})
    recording.save(tmp_path / "sets.json")
    assert Recording.load(tmp_path / "sets.json") == recording
    index = recording.index(seq_len=1024, num_heads=4)
    assert index.num_vertical.tolist() == [[10, 8, 10, 8]] and index.num_slash.tolist() == [[3, 3, 3, 3]]
    assert index.vertical[0, 2].tolist() == [*range(8), 200, 201] and index.slash[0, 2].tolist() == [0, 1, 10]


def test_what_is_recorded_is_what_the_selection_chose(tmp_path, capsys):
    torch.save({"query": torch.randn(1, 640, 2, 8), "key": torch.randn(1, 640, 1, 8)}, tmp_path / "qk.pt")
    flags = "--sink-tokens 8 --local-blocks 1 --max-vertical 20 --max-slash 2"
    record.main([str(tmp_path / "qk.pt"), "--output", str(tmp_path / "sets.json"), *flags.split()])
    recording = Recording.load(tmp_path / "sets.json")
    assert recording.seq_len == 640 and len(recording.vertical) == 2
    for vertical, slash in zip(recording.vertical, recording.slash, strict=True):
        assert vertical[0][0] == 0 and vertical[0][1] >= 8 and slash[0][0] == 0
        assert 8 < sum(length for _, length in vertical) <= 28
        assert 1 < sum(length for _, length in slash) <= 3
    assert recording.source["config"]["max_slash"] == 2
    assert "list 1: " in capsys.readouterr().out


def test_the_shipped_recording_is_small_and_complete():
    path = record.Path(__file__).parents[2] / "tools/bench/data/tiny_gpt.json"
    assert path.stat().st_size < 32 * 1024
    recording = Recording.load(path)
    assert set(json.loads(path.read_text())["source"]) == {"origin", "date", "torch", "config", "density", "recall"}
    index = recording.index(seq_len=131072, num_heads=16)
    assert int(index.num_slash.min()) > 8 and int(index.num_vertical.min()) > 128
    assert int(index.vertical.max()) <= 131072 and int(index.slash.max()) <= 2048


def test_packed_documents_are_not_recorded(tmp_path):
    saved = {"query": torch.zeros(1, 64, 1, 8), "key": torch.zeros(1, 64, 1, 8)}
    torch.save({**saved, "cu_seqlens": torch.tensor([0, 64], dtype=torch.int32)}, tmp_path / "qk.pt")
    with pytest.raises(SystemExit, match="cu_seqlens must be absent from what is recorded"):
        record.main([str(tmp_path / "qk.pt"), "--output", str(tmp_path / "sets.json")])


EVERY_PAIR = (VerticalSlashIndex.dense(rows=1, num_heads=1, seq_len=512), 512)
A_WHOLE_TILE_OF_COLUMNS = (VerticalSlashIndex.from_lists([[list(range(200))]], [[[0, 3]]], seq_len=512), 512)
# Distance 3 of the tiles (2, 1) lies between block 2 and block 5, which 257 tokens do not have.
REACHED_PAST_THE_END = (VerticalSlashIndex.from_lists([[[]]], [[[0, 3]]], seq_len=257), 257)


@st.composite
def indices(draw: st.DrawFn) -> tuple[VerticalSlashIndex, int]:
    """An index for up to six tiles, and its tokens; the last tile and its blocks as full as it comes."""
    rows, heads, seq_len = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 6 * MASK_BLOCK))

    def lists(entries: int, max_size: int) -> st.SearchStrategy[list[list[list[int]]]]:
        head = st.lists(st.integers(0, entries - 1), max_size=max_size)
        return st.lists(st.lists(head, min_size=heads, max_size=heads), min_size=rows, max_size=rows)

    slash = [[[0, *head] for head in row] for row in draw(lists(-(-seq_len // 64), 2))]
    return VerticalSlashIndex.from_lists(draw(lists(seq_len, 3)), slash, seq_len=seq_len), seq_len


def whole_mask(mask, index: VerticalSlashIndex, queries: int, keys: int) -> torch.Tensor:
    """The mask function at every pair."""
    sizes = (index.rows, index.num_lists, queries, keys)
    grid = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    return mask(*grid)


@given(indices())
@example(EVERY_PAIR)
@example(A_WHOLE_TILE_OF_COLUMNS)
@example(REACHED_PAST_THE_END)
def test_a_block_mask_skips_only_blocks_without_a_pair(drawn):
    index, seq_len = drawn
    tables = SelectedTables(index, seq_len)
    allowed = allowed_mask(index, seq_len=seq_len)
    assert torch.equal(whole_mask(tables.either, index, seq_len, seq_len), allowed)
    tiles = -(-seq_len // MASK_BLOCK)
    short = tiles * MASK_BLOCK - seq_len
    padded = torch.nn.functional.pad(allowed, (0, short, 0, short)).unflatten(3, (tiles, -1)).unflatten(2, (tiles, -1))
    blocks = tables.either_blocks()
    assert torch.equal(blocks.to_dense().bool(), padded.any(5).any(3))
    full = padded.all(5).all(3).sum(-1)
    assert (blocks.full_kv_num_blocks <= full).all()
    assert issued_pairs(blocks) == int(padded.any(5).any(3).sum()) * MASK_BLOCK**2


@given(indices())
@settings(max_examples=3)
@example(EVERY_PAIR)
@example(A_WHOLE_TILE_OF_COLUMNS)
@pytest.mark.parametrize("name", ["flex-attention", "composite-flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_under_these_masks_is_the_attention(name, drawn):
    """Forward only: there is no backward of it on a CPU."""
    index, seq_len = drawn
    sizes = problem(batch=index.rows, seq_len=seq_len, num_heads=index.num_lists, num_kv_heads=1)
    inputs = sizes.inputs()
    bound = REGISTRY[name].bind(sizes, inputs, index)
    exact = oracle_attention(inputs.query, inputs.key, inputs.value, index).out.float()
    torch.testing.assert_close(bound.attend(*bound.leaves), exact)
    assert bound.issued_pairs >= int(allowed_mask(index, seq_len=seq_len).sum())


@pytest.mark.parametrize("seq_len", [640, 700])
def test_issued_pairs_are_those_of_tiles_with_a_selected_pair(seq_len):
    index = random_index(2, 3, seq_len, 64)
    slashes = replace(index, num_vertical=torch.zeros_like(index.num_vertical))
    only_slash = allowed_mask(slashes, seq_len=seq_len)
    only_vertical = allowed_mask(index, seq_len=seq_len) & ~only_slash
    blocks = -(-seq_len // 64)
    short = blocks * 64 - seq_len
    tiles = 0
    for row in range(2):
        for head in range(3):
            mask = torch.nn.functional.pad(only_slash[row, head], (0, short, 0, short))
            tiles += int(mask.unflatten(0, (blocks, 64)).unflatten(2, (blocks, 64)).any(3).any(1).sum())
            columns = index.vertical[row, head, : index.num_vertical[row, head]].long()
            packed = torch.nn.functional.pad(only_vertical[row, head][:, columns], (0, 0, 0, short))
            for tile in packed.split(64, dim=1):
                tiles += int(tile.unflatten(0, (blocks, 64)).any(2).any(1).sum())
    assert issued_pairs_of_tiles(index, seq_len=seq_len) == tiles * 64 * 64
