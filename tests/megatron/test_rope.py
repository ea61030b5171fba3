"""Rotary tables are cut as the layout cuts tokens, wherever Megatron has bound the function, and put back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding

from megatron_mtraining.layout import SequenceLayout, token_positions
from megatron_mtraining.megatron import MissingSymbolError, split
from megatron_mtraining.megatron.documents import positions_in_documents
from megatron_mtraining.testing.megatron_on_cpu import megatron_on_cpu
from tests.layouts import node_size_of

from .fakes import Group
from .split import PATCHES, follow

BOUND_IN = (rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding)


@pytest.fixture(autouse=True)
def megatron_as_it_was() -> Iterator[None]:
    with contextlib.nullcontext() if torch.cuda.is_available() else megatron_on_cpu():
        yield
        PATCHES.undo()


def local_positions(layout: str, seq_len: int, group: Group) -> torch.Tensor:
    sizes = {"seq_len": seq_len, "cp_size": group.size(), "block_size": 8, "node_size": node_size_of(group.size())}
    sequence = SequenceLayout(layout, **sizes)
    return token_positions(sequence, cp_rank=group.rank())


@pytest.mark.parametrize("layout", ["contiguous", "striped", "rotated", "node_striped", "zigzag"])
@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_each_rank_has_the_angles_of_its_tokens(layout: str, kind: str):
    follow(layout, block_size=8, node_size=3)
    for rank in range(6):
        group = Group(6, rank)
        if kind == "rope":
            embedding = rotary_pos_embedding.RotaryEmbedding(16, 1.0, use_cpu_initialization=True, cp_group=group)
            whole, part = embedding.get_emb(96), embedding(96)
        else:
            embedding = yarn_rotary_pos_embedding.YarnRotaryEmbedding(
                16, scaling_factor=2.0, original_max_position_embeddings=48, use_cpu_initialization=True, cp_group=group
            )
            (whole, scale), (part, part_scale) = embedding.get_emb(96), embedding(96)
            assert part_scale == scale
        assert torch.equal(part, whole[local_positions(layout, 96, group)])


def test_a_yarn_table_that_the_layout_does_not_divide_can_be_built():
    follow("striped", block_size=8)
    for rank, rows in enumerate((16, 16, 10, 8)):
        embedding = yarn_rotary_pos_embedding.YarnRotaryEmbedding(
            16, original_max_position_embeddings=50, use_cpu_initialization=True, cp_group=Group(4, rank)
        )
        assert embedding.cos_cached.shape[0] == rows


def test_a_table_made_where_another_device_is_the_default_is_cut_as_ever():
    """Megatron makes YaRN's tables with the GPU as torch's default device."""
    follow("striped", block_size=8)
    group, table = Group(4, 1), torch.arange(480.0).view(480, 1, 1, 1)
    with torch.device("meta"):
        part = rope_utils.get_pos_emb_on_this_cp_rank(table, 0, group)
    assert torch.equal(part.flatten().long(), local_positions("striped", 480, group))


def test_every_module_that_bound_the_function_gets_the_new_one_and_the_old_one_back():
    originals = {module: module.get_pos_emb_on_this_cp_rank for module in BOUND_IN}
    packed = rope_utils._apply_rotary_pos_emb_thd
    follow("striped", block_size=8)
    replaced = {module.get_pos_emb_on_this_cp_rank for module in BOUND_IN}
    assert len(replaced) == 1
    assert replaced.isdisjoint(originals.values())
    assert rope_utils._apply_rotary_pos_emb_thd is not packed
    PATCHES.undo()
    PATCHES.undo()
    assert {module: module.get_pos_emb_on_this_cp_rank for module in BOUND_IN} == originals
    assert rope_utils._apply_rotary_pos_emb_thd is packed


def test_zigzag_is_megatrons_own():
    original = rope_utils.get_pos_emb_on_this_cp_rank
    follow("zigzag", block_size=8)
    assert rope_utils.get_pos_emb_on_this_cp_rank is original


def test_tables_cut_before_are_forgotten():
    embedding = rotary_pos_embedding.RotaryEmbedding(16, 1.0, use_cpu_initialization=True, cp_group=Group(2, 0))
    zigzag = embedding(96)
    follow("striped", block_size=8)
    assert not torch.equal(embedding(96), zigzag)
    PATCHES.undo()
    assert torch.equal(embedding(96), zigzag)


@pytest.mark.parametrize("symbol", ["get_pos_emb_on_this_cp_rank", "_apply_rotary_pos_emb_thd"])
def test_a_missing_symbol_is_named_and_nothing_is_replaced(symbol: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(rope_utils, symbol)
    before = dict(vars(rope_utils))
    with pytest.raises(MissingSymbolError, match=f"rope_utils.{symbol} must exist"):
        follow("striped", block_size=8)
    assert vars(rope_utils) == before


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rope_utils, "get_pos_emb_on_this_cp_rank", lambda pos_emb, dim: pos_emb)
    with pytest.raises(MissingSymbolError, match="get_pos_emb_on_this_cp_rank must take .* got no seq_dim, cp_group"):
        follow("striped", block_size=8)


def rotate_packed(tokens: torch.Tensor, bounds: list[int], table: torch.Tensor, group: Any) -> torch.Tensor:
    return rope_utils._apply_rotary_pos_emb_thd(
        tokens, torch.tensor(bounds, dtype=torch.int32), table, rotary_interleaved=False, mscale=1.0, cp_group=group
    )


@pytest.mark.parametrize("bounds", [[0, 96], [0, 9, 17, 17, 18, 96], [0, 0, 50, 96]])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "rotated"])
def test_packed_positions_restart_in_each_document(layout: str, bounds: list[int]):
    table = rotary_pos_embedding.RotaryEmbedding(16, 1.0, use_cpu_initialization=True, cp_group=Group(1, 0)).get_emb(95)
    if bounds == [0, 96]:
        table = torch.cat([table, table[-1:] + 1])
    tokens = torch.randn(96, 2, 16, device=table.device)
    whole = rotate_packed(tokens, bounds, table, Group(1, 0))
    follow(layout, block_size=8)
    for rank in range(3):
        rows = local_positions(layout, 96, Group(3, rank))
        assert torch.equal(rotate_packed(tokens[rows], bounds, table, Group(3, rank)), whole[rows])


def test_positions_are_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    computed = []

    def counted(layout: SequenceLayout, *, cp_rank: int) -> torch.Tensor:
        computed.append((layout.kind, layout.seq_len, cp_rank))
        return token_positions(layout, cp_rank=cp_rank)

    monkeypatch.setattr(split, "token_positions", counted)
    split.TokenSplit.positions.cache_clear()
    follow("striped", block_size=8)
    table = torch.randn(60, 1, 1, 16)
    for bounds in ([0, 40, 96], [0, 50, 96]):
        for heads in (4, 2, 4, 2):
            rotate_packed(torch.randn(48, heads, 16), bounds, table, Group(2, 1))
    rope_utils.get_pos_emb_on_this_cp_rank(torch.randn(96, 1, 1, 16), 0, Group(2, 1))
    assert computed == [("striped", 96, 1)]
    rotate_packed(torch.randn(48, 2, 16), [0, 50, 96], table, Group(2, 0))
    assert computed[1:] == [("striped", 96, 0)]


def test_a_table_as_long_as_the_pack_has_an_angle_for_every_token():
    """Megatron's rule for positions of more than one dimension: no restart (0, 3, 4, 7 and not 0, 3, 0, 3)."""
    table = torch.arange(96.0)[:, None, None, None].expand(-1, 1, 1, 16)
    tokens = torch.randn(96, 2, 16)
    whole = rotate_packed(tokens, [0, 48, 96], table, Group(1, 0))
    follow("striped", block_size=8)
    rows = local_positions("striped", 96, Group(2, 1))
    assert torch.equal(rotate_packed(tokens[rows], [0, 48, 96], table, Group(2, 1)), whole[rows])


def test_positions_are_counted_from_the_last_of_several_equal_bounds():
    bounds = torch.tensor([0, 4, 4, 8], dtype=torch.int32)
    assert positions_in_documents(torch.arange(8), bounds).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_functions_bound_by_later_imports_are_put_back_too(monkeypatch: pytest.MonkeyPatch):
    follow("striped", block_size=8)
    late = type(sys)("late_importer")
    late.get_pos_emb = rope_utils.get_pos_emb_on_this_cp_rank
    monkeypatch.setitem(sys.modules, "late_importer", late)
    PATCHES.undo()
    assert late.get_pos_emb is rope_utils.get_pos_emb_on_this_cp_rank
