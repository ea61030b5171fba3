"""Padding at the end of a row or document chooses no key: the text keeps what it would keep without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_mtraining import (
    BlockListIndex,
    MTrainingConfig,
    SequenceLayout,
    VerticalSlashIndex,
    select,
    shard_sequence,
    sparse_attention,
)
from megatron_mtraining.config import LAYOUTS
from megatron_mtraining.metrics import PairCounter, computed_pairs_of_lists, held_out_rows
from megatron_mtraining.selection import xattention_tiles
from megatron_mtraining.testing.oracle import allowed_mask
from megatron_mtraining.testing.simulator import RankSimulator
from tests.layouts import node_size_of

from .attention_inputs import as_cu_seqlens, random_inputs

SMALL = {"block_size": 8, "dense_below": 16, "num_probe_rows": 8, "sink_tokens": 2, "local_blocks": 1}
CONFIGS = {
    "last_window": MTrainingConfig.algorithm_1(max_vertical=6, max_slash=2, **SMALL),
    "probe_windows": MTrainingConfig.algorithm_1(
        max_vertical=6, max_slash=2, estimator="probe_windows", num_probe_windows=4, index_sharing="kv_group", **SMALL
    ),
    "cost": MTrainingConfig(target_recall=0.3, num_probe_windows=4, dense_above=0.9, **SMALL),
    "cost with a bound": MTrainingConfig(
        target_recall=0.4, max_density=0.2, num_probe_windows=4, index_sharing="kv_group", **SMALL
    ),
    "dense": MTrainingConfig(pattern="dense", block_size=8),
    "moba": MTrainingConfig(pattern="moba", moba_chunk=16, moba_top_k=3, block_size=8, dense_below=16),
    "xattention": MTrainingConfig(
        pattern="xattention",
        xattention_block=16,
        xattention_stride=4,
        xattention_threshold=0.6,
        block_size=8,
        dense_below=16,
    ),
}
SEQ_LEN = 192


def counts(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def padded_inputs(config: MTrainingConfig, spans: list[tuple[int, int]], *, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Query and key whose padding, all but ``spans``, is louder than the text."""
    dtype = torch.bfloat16 if config.pattern == "xattention" else torch.float64
    query, key, _ = random_inputs(batch, SEQ_LEN, 4, 2, 8, dtype=dtype)
    for row, spans_of_row in enumerate([spans] if batch == 1 else [[span] for span in spans]):
        is_padding = torch.ones(SEQ_LEN, dtype=torch.bool)
        for start, stop in spans_of_row:
            is_padding[start:stop] = False
        query[row, is_padding] *= 9
        key[row, is_padding] *= 5
    return 2 * query, key


@pytest.mark.parametrize("takes_tiles", [False, True])
@pytest.mark.parametrize("length", [1, 8, 17, 99, 104, 187])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_keeps_what_it_would_keep_without_padding(name, length, takes_tiles, monkeypatch):
    if takes_tiles and name != "xattention":
        return
    monkeypatch.setattr(xattention_tiles, "takes", lambda call: takes_tiles)
    query, key = padded_inputs(CONFIGS[name], [(0, length)])
    index = select(query, key, CONFIGS[name], num_valid=counts(length))
    alone = select(query[:, :length], key[:, :length], CONFIGS[name])
    kept = allowed_mask(index, seq_len=SEQ_LEN)[..., :length, :length]
    assert torch.equal(kept, allowed_mask(alone, seq_len=length))


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_batch_each_select_as_they_would_alone(name):
    lengths = (187, 0, 40, SEQ_LEN, 9)
    query, key = padded_inputs(CONFIGS[name], [(0, length) for length in lengths], batch=5)
    index = select(query, key, CONFIGS[name], num_valid=counts(*lengths))
    kept = allowed_mask(index, seq_len=SEQ_LEN)
    for row, length in enumerate(lengths):
        if length:
            alone = select(query[row : row + 1, :length], key[row : row + 1, :length], CONFIGS[name])
            assert torch.equal(kept[row, :, :length, :length], allowed_mask(alone, seq_len=length)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_of_a_pack_select_as_if_the_next_one_began_behind_their_text(name):
    """On the grid of blocks that the pack gives them: padding that is a document of its own says the same."""
    bounds, lengths = (0, 64, 64, 80, SEQ_LEN), (48, 0, 0, 88)
    split = as_cu_seqlens((0, 48, 64, 64, 80, 168, SEQ_LEN))
    query, key = padded_inputs(CONFIGS[name], [(0, 48), (80, 168)])
    given = {"cu_seqlens": as_cu_seqlens(bounds), "num_valid": counts(*lengths)}
    index = select(query, key, CONFIGS[name], **given)
    kept = allowed_mask(index, seq_len=SEQ_LEN, cu_seqlens=given["cu_seqlens"])
    apart = allowed_mask(select(query, key, CONFIGS[name], cu_seqlens=split), seq_len=SEQ_LEN, cu_seqlens=split)
    for text in (slice(0, 48), slice(80, 168)):
        assert torch.equal(kept[..., text, :], apart[..., text, :])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_ranks_and_layout_selects_the_same(name, cp_size, kind):
    config, lengths = CONFIGS[name], (75, 187)
    query, key = padded_inputs(config, [(0, length) for length in lengths], batch=2)
    alone = select(query, key, config, num_valid=counts(*lengths))
    layout = SequenceLayout(kind, seq_len=SEQ_LEN, cp_size=cp_size, block_size=8, node_size=node_size_of(cp_size))

    def body(group):
        local = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in (query, key))
        return select(*local, config, layout=layout, groups=group, num_valid=counts(*lengths))

    for index in RankSimulator(cp_size).run(body):
        if isinstance(index, BlockListIndex):
            held = index.query_blocks.tolist()
            assert entries(index, range(len(held))) == entries(alone, held)
        else:
            assert all(map(torch.equal, index.tensors, alone.tensors))


def entries(index: BlockListIndex, slots) -> list:
    """Chunks and row masks of the lists of some slots."""
    found = []
    for starts in index.starts.flatten(0, 1):
        for slot in slots:
            of_list = slice(int(starts[slot]), int(starts[slot + 1]))
            found.append(
                (index.chunks[of_list].tolist(), index.row_masks is not None and index.row_masks[of_list].tolist())
            )
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_alone_selects_nothing_but_its_own_block(name):
    query, key = padded_inputs(CONFIGS[name], [])
    index = select(query, key, CONFIGS[name], num_valid=counts(0))
    chunk = 16 if isinstance(index, BlockListIndex) else 8
    kept = allowed_mask(index, seq_len=SEQ_LEN)
    place = torch.arange(SEQ_LEN) // chunk
    assert torch.equal(kept, (place[:, None] == place).tril().expand_as(kept))


def test_text_that_looks_at_key_1000_is_not_sent_elsewhere_by_padding():
    """4992 rows of text and 64 of padding behind them, which look at another key."""
    seq_len, text = 5056, slice(0, 4992)
    query, key, value = (torch.randn(1, seq_len, 1, 16, dtype=torch.float64) * 0.1 for _ in range(3))
    direction, other = torch.eye(16, dtype=torch.float64)[:2]
    query[:, text] += 40 * direction
    query[:, 4992:] += 40 * other
    key[:, 1000], key[:, 2000], value[:, 1000] = direction, other, 3.0
    config = MTrainingConfig.algorithm_1(max_vertical=16, max_slash=0, vertical_top_p=0.9)

    def attend(length, **options):
        parts = [each[:, :length] for each in (query, key, value)]
        index = select(*parts[:2], config, **options)
        return index, sparse_attention(*parts, index=index).out[:, text]

    (index, out), (alone, expected) = attend(seq_len, num_valid=counts(4992)), attend(4992)
    assert all(map(torch.equal, listed(index), listed(alone)))
    assert torch.equal(out, expected)
    assert (attend(seq_len)[1] - expected).abs().max() > 2.5, "undeclared padding chooses the keys"


def listed(index) -> list[Tensor]:
    """Entries that count, and how many they are."""
    verticals = [row[:count] for row, count in zip(index.vertical[0], index.num_vertical[0], strict=True)]
    slashes = [row[:count] for row, count in zip(index.slash[0], index.num_slash[0], strict=True)]
    return [*verticals, *slashes, index.num_vertical, index.num_slash]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([5], "num_valid must be an int32 or int64 tensor, got list."),
        (torch.tensor([5.0]), "num_valid must be an int32 or int64 tensor, got torch.float32."),
        (counts(5, 5), r"num_valid must be of shape \(1,\), a count for each row, got \(2,\)."),
        (counts(-1), r"num_valid\[0\] must be between 0 and 192, the tokens of its row, got -1."),
        (counts(193), r"num_valid\[0\] must be between 0 and 192, the tokens of its row, got 193."),
    ],
)
def test_counts_that_do_not_fit_are_named(given, sentence):
    query, key, _ = random_inputs(1, SEQ_LEN, 4, 2, 8)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        select(query, key, CONFIGS["last_window"], num_valid=given)


@pytest.mark.parametrize("name", CONFIGS)
def test_pairs_of_padding_are_not_counted(name):
    lengths, config = (187, 0, 40), CONFIGS[name]
    query, key = padded_inputs(config, [(0, length) for length in lengths], batch=3)
    index = select(query, key, config, num_valid=counts(*lengths))
    kept = allowed_mask(index, seq_len=SEQ_LEN)
    expected = sum(kept[row, :, :length, :length].sum((1, 2)) for row, length in enumerate(lengths))
    counter, given = PairCounter(), {"seq_len": SEQ_LEN, "head_dim": 8, "num_valid": counts(*lengths)}
    if isinstance(index, BlockListIndex):
        layout = SequenceLayout("contiguous", seq_len=SEQ_LEN, cp_size=1, block_size=8)
        pairs = computed_pairs_of_lists(index, layout, cp_rank=0, num_valid=counts(*lengths))
        counter.add_counted(1, pairs, **given)
    else:
        counter.add(1, index, num_heads=4, **given)
    pairs = counter.totals()[1]
    assert pairs.computed.tolist() == expected.repeat_interleave(4 // len(expected)).tolist()
    assert pairs.causal == 187 * 188 // 2 + 40 * 41 // 2


def test_padding_alone_has_density_0():
    counter = PairCounter()
    index = VerticalSlashIndex.dense(rows=1, num_heads=2, seq_len=SEQ_LEN, block_size=8)
    counter.add(1, index, seq_len=SEQ_LEN, num_heads=2, head_dim=8, num_valid=counts(0))
    assert counter.totals()[1].density.tolist() == [0.0, 0.0]


def test_rows_held_out_are_text_that_no_estimator_looks_at():
    config = CONFIGS["last_window"]
    rows = held_out_rows(config, seq_len=SEQ_LEN, count=1000, num_valid=counts(60))
    assert rows == tuple(range(52))
    packed = {"cu_seqlens": as_cu_seqlens((0, 64, 80, SEQ_LEN)), "num_valid": counts(40, 0, 12)}
    assert held_out_rows(config, seq_len=SEQ_LEN, count=1000, **packed) == (*range(32), *range(80, 92))
    assert held_out_rows(config, seq_len=SEQ_LEN, count=1000, num_valid=counts(0)) == ()
    assert held_out_rows(config, seq_len=SEQ_LEN, count=1000, num_valid=counts(20, 60)) == (*range(12), *range(20, 52))
