"""``mtraining balance`` on layers: block lists by rank and step, planted imbalance, the command and its errors."""

from __future__ import annotations

import json
import re

import pytest
import torch

from megatron_mtraining import MTrainingConfig, SequenceLayout, select
from megatron_mtraining.commands.balance.command import main
from megatron_mtraining.commands.balance.layers import head_pairs
from megatron_mtraining.metrics import computed_pairs_of_lists, rank_lists, rank_pairs, work_of_pairs
from megatron_mtraining.ring import RingShape
from megatron_mtraining.types import BlockListIndex
from tools import synthetic_layer

SEQ, HEADS = 2048, 2
LAYOUTS = ("zigzag", "striped", "node_striped", "contiguous")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("layers") / "planted.pt"
    synthetic_layer.main([str(file), "--seq", str(SEQ), "--heads", str(HEADS), "--kv-heads", "1"])
    return file


@pytest.fixture(scope="module")
def layer(path):
    return torch.load(path, weights_only=True)


def config(pattern):
    chunk = {"moba": {"moba_chunk": 128, "moba_top_k": 3}, "xattention": {"xattention_threshold": 0.5}}
    return MTrainingConfig(pattern=pattern, dense_below=0, **chunk.get(pattern, {}))


def mask_of(index):
    """bool ``[heads, queries, keys]``, entry by entry."""
    mask = torch.zeros(HEADS, SEQ, SEQ, dtype=torch.bool)
    size = index.block_size * index.chunk_blocks
    for head in range(HEADS):
        for block in range(index.num_query_blocks):
            for entry in range(int(index.starts[0, head, block]), int(index.starts[0, head, block + 1])):
                bits = -1 if index.row_masks is None else int(index.row_masks[entry])
                rows = [block * 64 + row for row in range(64) if bits >> row & 1]
                first = int(index.chunks[entry]) * size
                mask[head, rows, first : first + size] = True
    return mask & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()


@pytest.mark.parametrize("pattern", ["moba", "xattention"])
@pytest.mark.parametrize("cp_size", [3, 4, 8])
def test_pairs_of_lists_by_rank_and_head_are_those_of_the_mask(layer, pattern, cp_size):
    query, key = (layer[name][:, : SEQ // 3 // 128 * 128 * 3 if cp_size == 3 else SEQ] for name in ("query", "key"))
    seq_len = query.shape[1]
    index = select(query, key, config(pattern))
    mask = mask_of(index)[:, :seq_len, :seq_len]
    for kind in LAYOUTS:
        layout = SequenceLayout(kind, seq_len=seq_len, cp_size=cp_size, node_size=2 if cp_size % 2 == 0 else 1)
        owner = layout.owners().repeat_interleave(64)
        one_hot = torch.nn.functional.one_hot(owner, cp_size).double()
        expected = torch.stack([one_hot.T @ each.double() @ one_hot for each in mask]).long()
        pairs, vertical = rank_pairs(index, layout)
        assert torch.equal(pairs, expected.sum(0)) and not vertical.any()
        assert torch.equal(head_pairs(index, layout), expected.sum(2).T)


@pytest.mark.parametrize("pattern", ["moba", "xattention"])
def test_lists_of_a_rank_are_those_that_it_selects(layer, pattern):
    """Of one device's lists those of a rank's blocks, in the order of its slots."""
    index = select(layer["query"], layer["key"], config(pattern))
    layout = SequenceLayout("zigzag", seq_len=SEQ, cp_size=4)
    pairs = torch.stack(
        [
            computed_pairs_of_lists(rank_lists(index, layout, cp_rank=rank), layout, cp_rank=rank).sum(0)
            for rank in range(4)
        ]
    )
    one = SequenceLayout("contiguous", seq_len=SEQ, cp_size=1)
    assert torch.equal(pairs.sum(0), computed_pairs_of_lists(index, one, cp_rank=0).sum(0))
    first = rank_lists(index, layout, cp_rank=1)
    blocks = first.query_blocks.tolist()
    assert blocks == [4, 5, 6, 7, 24, 25, 26, 27]
    for slot, block in enumerate(blocks):
        entries = [index.starts[0, 1, block + i] for i in (0, 1)]
        own = [first.starts[0, 1, slot + i] for i in (0, 1)]
        assert torch.equal(first.chunks[own[0] : own[1]], index.chunks[entries[0] : entries[1]])


def test_head_pairs_of_columns_and_distances_add_up(layer):
    index = select(layer["query"], layer["key"], config("vertical_slash"))
    layout = SequenceLayout("striped", seq_len=SEQ, cp_size=4)
    slash, vertical = rank_pairs(index, layout)
    assert torch.equal(head_pairs(index, layout).sum(1), slash.sum(1) + vertical)


def test_a_planted_busy_stretch_is_uneven_in_zigzag_and_even_in_striped():
    """64 blocks, 4 ranks: blocks 24 to 31, zigzag's chunk 3 of rank 3, select every key, the others their own block."""
    lists = [list(range(block + 1)) if 24 <= block < 32 else [block] for block in range(64)]
    index = BlockListIndex.from_lists([[lists]])
    own, busy = 64 * 65 // 2, sum(range(24, 32)) * 64 * 64
    worker = {}
    for kind in ("zigzag", "striped"):
        pairs = rank_pairs(index, SequenceLayout(kind, seq_len=4096, cp_size=4))
        worker[kind] = work_of_pairs(*pairs, RingShape(kind="flat", cp_size=4, node_size=4).source_ranks())
    mean = (64 * own + busy) / 4
    assert worker["zigzag"].worker_imbalance == pytest.approx((16 * own + busy) / mean)
    assert worker["zigzag"].worker_imbalance > 3.6
    blocks_of_last = 27 + 31
    assert worker["striped"].worker_imbalance == pytest.approx((16 * own + blocks_of_last * 64 * 64) / mean)


def test_lists_of_other_blocks_raise(layer):
    index = select(layer["query"], layer["key"], config("moba"))
    with pytest.raises(ValueError, match=r"index.query_blocks must be the 64 blocks of the layout in order, got 32"):
        rank_pairs(index, SequenceLayout("striped", seq_len=2 * SEQ, cp_size=2))


def balance(capsys, folder, *flags):
    main([*map(str, flags), "--output", str(folder)])
    return capsys.readouterr().out


def test_table_and_file(path, tmp_path, capsys):
    flags = ("--world", "4,8", "--node", 4, "--layouts", "zigzag,striped", "--schedules", "flat")
    flags += ("--selections", "dense,xattention,these flags", "--mtraining-pattern", "moba", "--mtraining-moba-chunk")
    out = balance(capsys, tmp_path, "--load", path, path, *flags, 128)
    written = json.loads((tmp_path / "balance.json").read_text())
    assert [(row["cp_size"], row["selection"]) for row in written["balances"][::2]] == [
        (cp_size, name) for name in ("dense", "xattention", "these flags") for cp_size in (4, 8)
    ]
    for row in written["balances"]:
        assert [each["layer"] for each in row["layers"]] == [1, 2]
        assert f"{row['layers'][0]['worker']:.3f}" in out
    dense = next(row for row in written["balances"] if row["layout"] == "zigzag")
    assert dense["layers"][0]["worker"] == dense["layers"][0]["density"] == 1


def test_layers_of_a_model(tmp_path, capsys):
    transformers, numpy = pytest.importorskip("transformers"), pytest.importorskip("numpy")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=512, **sizes)
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path)
    numpy.save(tmp_path / "tokens.npy", torch.randint(0, 64, (2, 512)).short().numpy())
    flags = ("--model", tmp_path, "--text", tmp_path / "tokens.npy", "--length", 512, "--layers", 2, "--world", 4)
    balance(capsys, tmp_path / "out", *flags, "--node", 2, "--layouts", "striped", "--selections", "xattention")
    rows = json.loads((tmp_path / "out" / "balance.json").read_text())["balances"]
    assert {(row["selection"], row["layers"][0]["layer"], len(row["layers"])) for row in rows} == {("xattention", 2, 1)}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--load PATH --layouts token_striped", r"unsupported: --layouts token_striped with layers\."),
        ("--load PATH --layers 1", r"unsupported: --layers with --load\."),
        ("--load PATH --selections best", r"--selections must be some of dense, .*xattention, got best\."),
        ("--load PATH --world 5", r"seq_len must be a multiple of"),
        ("--load nowhere.pt", r"--load must be a file that can be read, got nowhere.pt"),
        ("--model .", r"--text must be given with --model, got nothing\."),
    ],
)
def test_errors(path, tmp_path, capsys, flags, sentence):
    with pytest.raises(SystemExit, match="2"):
        balance(capsys, tmp_path, *flags.replace("PATH", str(path)).split())
    error = capsys.readouterr().err
    assert re.match(f"mtraining balance: error: {sentence}", error) and error.count("\n") == 1
