"""The function with which Megatron's own training scripts cut a batch cuts it by the layout, whatever its release."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, utils

from megatron_mtraining.config import LAYOUTS
from megatron_mtraining.layout import SequenceLayout, token_positions
from megatron_mtraining.megatron import MissingSymbolError, packed_seq_params, shard_batch
from megatron_mtraining.megatron.documents import documents_of
from tests.layouts import node_size_of

from .fakes import Group
from .split import PATCHES, follow

SEQ_LEN = 96
NEWER = "is_hybrid_cp" in inspect.signature(utils.get_batch_on_this_cp_rank).parameters
"""Whether one public function takes packs too and asks for the group."""


@pytest.fixture(autouse=True)
def megatron_as_it_was() -> Iterator[None]:
    yield
    PATCHES.undo()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets this process be any rank of a context-parallel group."""

    def become(size: int, rank: int) -> Group:
        group = Group(size, rank)
        monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: group)
        return group

    return become


def whole_batch(**extra: Any) -> dict[str, Any]:
    text = torch.arange(2 * (SEQ_LEN + 1)).view(2, -1)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.rand(2, SEQ_LEN),
        "attention_mask": None,
        "position_ids": torch.arange(SEQ_LEN).expand(2, -1).contiguous(),
    } | extra


def cut(batch: dict[str, Any], group: Group, **options: Any) -> dict[str, Any]:
    """As ``pretrain_gpt.py`` of the release calls it."""
    newer = {"is_hybrid_cp": False, "cp_group": group} if NEWER else {}
    return utils.get_batch_on_this_cp_rank(batch, **(newer | options))


def cut_pack(batch: dict[str, Any], bounds: torch.Tensor, group: Group) -> tuple[dict[str, Any], torch.Tensor]:
    """As ``pretrain_gpt.py`` of the release calls it; the part and the bounds that the model is given."""
    if NEWER:
        part = cut(batch | {"cu_seqlens": bounds[None], "cu_seqlens_padded": None, "max_seqlen": None}, group)
        return part, part["cu_seqlens"].squeeze(0)
    part, params = utils.get_thd_batch_on_this_cp_rank(batch, bounds[None], None, torch.tensor([50]))
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 50, 50)
    assert params.cu_seqlens_kv is params.cu_seqlens_q
    return part, params.cu_seqlens_q


@pytest.mark.parametrize("layout", [kind for kind in LAYOUTS if kind != "zigzag"])
@pytest.mark.parametrize("cp_size", [1, 2, 6])
def test_a_batch_is_cut_by_the_layout(layout: str, cp_size: int, ranks: Any):
    follow(layout, block_size=8, node_size=node_size_of(cp_size))
    sequence = SequenceLayout(layout, seq_len=SEQ_LEN, cp_size=cp_size, block_size=8, node_size=node_size_of(cp_size))
    for rank in range(cp_size):
        batch = whole_batch(dataset_id=torch.tensor([3, 4]))
        expected = shard_batch(batch, sequence, rank)
        part = cut(batch, ranks(cp_size, rank))
        assert part is batch  # callers go on with their own dictionary
        assert part.keys() == expected.keys()
        for name, value in expected.items():
            assert value is None or torch.equal(part[name], value), name


@pytest.mark.parametrize("layout", ["striped", "rotated"])
def test_a_pack_is_cut_as_a_whole(layout: str, ranks: Any):
    follow(layout, block_size=8)
    bounds = torch.tensor([0, 41, 91, 96], dtype=torch.int32)  # no document divides by anything
    sequence = SequenceLayout(layout, seq_len=SEQ_LEN, cp_size=2, block_size=8)
    for rank in range(2):
        expected = shard_batch(whole_batch(), sequence, rank)
        part, documents = cut_pack(whole_batch(), bounds, ranks(2, rank))
        assert torch.equal(documents, bounds)
        for name in ("tokens", "labels", "position_ids"):
            assert torch.equal(part[name], expected[name])


def test_packs_that_megatron_cuts_by_transformer_engines_indices(monkeypatch: pytest.MonkeyPatch):
    """Its vision, Mamba and reinforcement-learning code asks for them by itself."""

    def thd_get_partitioned_indices(cu_seqlens: torch.Tensor, total_tokens: int, cp_size: int, rank: int) -> None: ...

    tex = type(sys)("transformer_engine_torch")
    tex.thd_get_partitioned_indices = thd_get_partitioned_indices
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", tex)
    monkeypatch.setattr(utils, "tex", tex, raising=False)
    follow("striped", block_size=8)
    bounds = torch.tensor([0, 41, 96], dtype=torch.int32)
    sequence = SequenceLayout("striped", seq_len=96, cp_size=3, block_size=8)
    for rank in range(3):
        indices = utils.tex.thd_get_partitioned_indices(bounds, 96, 3, rank)
        assert indices.tolist() == token_positions(sequence, cp_rank=rank).tolist()
    PATCHES.undo()
    assert tex.thd_get_partitioned_indices is thd_get_partitioned_indices


def test_a_stage_without_tokens_or_without_labels(ranks: Any):
    follow("striped", block_size=8)
    sequence = SequenceLayout("striped", seq_len=SEQ_LEN, cp_size=2, block_size=8)
    first = whole_batch(labels=None, loss_mask=None)
    last = whole_batch(tokens=None, position_ids=None)
    for batch in (first, last):
        expected = shard_batch(batch, sequence, 1)
        part = cut(batch, ranks(2, 1))
        assert {name for name, value in part.items() if value is None} == {
            name for name, value in expected.items() if value is None
        }
    middle = whole_batch(**dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids")))
    assert set(cut(middle, ranks(2, 1)).values()) == {None}


def test_zigzag_is_megatrons_own_function_and_the_projects_layout(ranks: Any, monkeypatch: pytest.MonkeyPatch):
    original = utils.get_batch_on_this_cp_rank
    follow("zigzag", block_size=8)
    assert utils.get_batch_on_this_cp_rank is original
    sequence = SequenceLayout("zigzag", seq_len=SEQ_LEN, cp_size=3, block_size=8)
    for rank in range(3):
        group = ranks(3, rank)
        monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", group.size)
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", group.rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", Group.size)
        monkeypatch.setattr(torch.distributed, "get_rank", Group.rank)
        part = cut(whole_batch(), group)
        assert torch.equal(part["tokens"], shard_batch(whole_batch(), sequence, rank)["tokens"])


def test_names_bound_before_and_after_follow_and_are_put_back(ranks: Any, monkeypatch: pytest.MonkeyPatch):
    script = type(sys)("a_training_script")
    script.split = utils.get_batch_on_this_cp_rank
    monkeypatch.setitem(sys.modules, "a_training_script", script)
    original, group = utils.get_batch_on_this_cp_rank, ranks(2, 1)
    follow("striped", block_size=8)
    batch = whole_batch()
    script.split(batch, **({"is_hybrid_cp": False, "cp_group": group} if NEWER else {}))
    assert batch["tokens"][0, :9].tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 24]
    assert "megatron.core.utils" in {name.rpartition(".")[0] for name in PATCHES.targets}
    PATCHES.undo()
    assert script.split is original
    assert utils.get_batch_on_this_cp_rank is original
    assert PATCHES.targets == ()


def test_what_cannot_be_cut_is_refused(ranks: Any):
    follow("striped", block_size=8)
    group = ranks(2, 0)
    with pytest.raises(ValueError, match="attention_mask must be None, .* --no-create-attention-mask-in-dataloader"):
        cut(whole_batch(attention_mask=torch.ones(2, 1, SEQ_LEN, SEQ_LEN)), group)
    with pytest.raises(ValueError, match="hybrid_context_parallel must be False, .* --hybrid-context-parallel out"):
        cut(whole_batch(local_cp_size=torch.tensor(2)), group)
    with pytest.raises(ValueError, match="seq_len must be a multiple of 80 for the striped layout over 2 ranks, got"):
        PATCHES.undo()
        follow("striped", block_size=40)
        cut(whole_batch(), group)


@pytest.mark.skipif(NEWER, reason="the newer releases cut packs in the public function")
def test_a_pack_for_another_group_and_hybrid_context_parallelism_are_refused(ranks: Any):
    follow("striped", block_size=8)
    ranks(2, 0)
    bounds = torch.tensor([[0, SEQ_LEN]], dtype=torch.int32)
    with pytest.raises(ValueError, match="cp_size and cp_rank must be those of the context-parallel group, got"):
        utils.get_thd_batch_on_this_cp_rank(whole_batch(), bounds, None, torch.tensor([96]), cp_size=4, cp_rank=0)
    with pytest.raises(ValueError, match="hybrid_context_parallel must be False, got True. Every sequence uses the"):
        utils.get_batch_on_this_hybrid_cp_rank(whole_batch(), 2)


def test_padded_bounds_reach_the_attention(ranks: Any):
    """Loaders fill bounds up with the length of the pack: empty documents at its end."""
    follow("striped", block_size=8)
    bounds = torch.tensor([0, 41, 96, 96, 96], dtype=torch.int32)
    _, documents = cut_pack(whole_batch(), bounds, ranks(2, 0))
    assert packed_seq_params(documents).max_seqlen_q == 55


@pytest.mark.skipif(NEWER, reason="the newer releases leave the parameters of packs to scripts")
def test_bounds_of_padded_documents_reach_the_attention(ranks: Any):
    """Documents of 38, 40 and 5 tokens, padded to 41, 50 and 5."""
    follow("striped", block_size=8)
    ranks(2, 0)
    bounds, padded = (torch.tensor([each], dtype=torch.int32) for each in ((0, 38, 78, 83), (0, 41, 91, 96)))
    _, params = utils.get_thd_batch_on_this_cp_rank(whole_batch(), bounds, padded, torch.tensor([50]))
    assert torch.equal(params.cu_seqlens_q_padded, padded[0]) and torch.equal(params.cu_seqlens_kv_padded, padded[0])
    assert documents_of(params, seq_len=SEQ_LEN).tolist() == [0, 38, 41, 81, 91, 96, 96]


def test_a_release_that_cuts_in_an_unknown_way_is_named(monkeypatch: pytest.MonkeyPatch):
    def get_batch_on_this_cp_rank(batch: Any, is_hybrid_cp: bool, cp_group: Any = None) -> None: ...

    for name in ("_get_batch_on_this_cp_rank_per_sequence_balancing", "get_pretrain_batch_on_this_cp_rank"):
        monkeypatch.delattr(utils, name, raising=False)
    monkeypatch.setattr(utils, "get_batch_on_this_cp_rank", get_batch_on_this_cp_rank)
    with pytest.raises(MissingSymbolError, match=r"megatron.core.utils must have _get_batch_.* or .*, got neither"):
        follow("striped", block_size=8)
    assert PATCHES.targets == ()
