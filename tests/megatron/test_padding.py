"""Padding is counted where the batch is split, and every attention layer selects as if there were none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mtraining.config import LAYOUTS, MTrainingConfig
from megatron_mtraining.megatron import documents
from megatron_mtraining.megatron.compat import has_module
from megatron_mtraining.megatron.documents import find_padding

from . import tiny_gpt
from .ranks import run_on_ranks

PAD, EOD = 9, 5


def masked(*rows: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor]:
    tokens, masks = zip(*rows, strict=True)
    return torch.tensor(tokens), torch.tensor(masks).float()


@pytest.fixture(params=["known", "unknown"])
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if Megatron's tokenizer is known; its pad token is PAD then."""
    known = request.param == "known"
    ids = {"pad": PAD, "eod": EOD} if known else {}
    monkeypatch.setattr(documents, "token_id", lambda _tokenizer, name: ids.get(name))
    return known


def runs(*batch: Tensor, **bounds: Tensor) -> tuple[tuple[int, int, int], ...]:
    found = find_padding(*batch, **bounds)
    return () if found is None else found.runs


def test_what_is_padding(tokenizer: bool):
    batch = masked(
        ([1, 2, 3, PAD, PAD, PAD], [1, 1, 0, 0, 0, 0]),  # the last token of the text has no label
        ([1, 2, 3, 4, 0, 0], [1, 1, 1, 0, 0, 0]),  # zeros, as Megatron's datasets write
        ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]),  # a prompt
        ([1, 2, PAD, PAD, PAD, PAD], [1, 1, 1, 1, 1, 1]),  # tokens that are learned
        ([1, PAD, PAD, 2, 3, 0], [1, 0, 0, 1, 1, 0]),  # masked tokens inside
        ([PAD, PAD, PAD, PAD, PAD, PAD], [0, 0, 0, 0, 0, 0]),
        ([1, 2, 3, PAD, PAD, 0], [1, 1, 1, 0, 0, 0]),  # a loader's padding, and that of pad_batch
        ([1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 0]),  # no label behind the last token
    )
    assert runs(*batch) == ((0, 3, 6), (1, 4, 6), (4, 5, 6), (5, 0, 6), (6, 3, 6))


def test_other_tokens_are_padding_only_where_no_tokenizer_says_what_is(tokenizer: bool):
    batch = masked(([1, 2, 7, 7], [1, 1, 0, 0]), ([1, 2, EOD, EOD], [1, 1, 0, 0]), ([1, 2, 3, EOD], [1, 1, 1, 0]))
    assert runs(*batch) == (((1, 2, 4),) if tokenizer else ((0, 2, 4), (1, 2, 4)))


def test_documents_of_a_pack():
    tokens, loss_mask = masked(([1, 2, 0, 0, 3, 4, 5, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]))
    bounds = torch.tensor([[0, 4, 7, 9, 12, 12]], dtype=torch.int32)
    # The label of a document's last token is the first one of the next document, which counts.
    found = find_padding(tokens, loss_mask, cu_seqlens=bounds)
    assert found.runs == ((0, 2, 4), (0, 7, 9), (0, 9, 12))
    assert found.num_valid(bounds[0], rows=1, seq_len=12).tolist() == [2, 3, 0, 0, 0]
    halves = torch.tensor([0, 2, 4, 7, 7, 9, 12], dtype=torch.int32)
    assert found.num_valid(halves, rows=1, seq_len=12).tolist() == [2, 0, 3, 0, 0, 0]


def test_what_lies_behind_the_bounds_of_documents():
    tokens, loss_mask = masked(([1, 2, 8, 3, 4, 8, 8, 8], [1] * 8))
    bounds, padded = (torch.tensor(each, dtype=torch.int32) for each in ((0, 2, 4), (0, 3, 8)))
    found = find_padding(tokens, loss_mask, cu_seqlens=bounds, cu_seqlens_padded=padded)
    assert found.runs == ((0, 2, 3), (0, 5, 8))


def test_without_a_loss_mask_or_padding_there_is_nothing_to_say():
    tokens, loss_mask = masked(([1, 2, 0, 0], [1, 1, 1, 1]))
    assert find_padding(tokens, None) is find_padding(None, loss_mask) is find_padding(tokens, loss_mask) is None


def test_another_batch_than_the_one_that_was_split_is_named():
    found = find_padding(*masked(([1, 2, 0, 0], [1, 0, 0, 0])))
    with pytest.raises(ValueError, match=r"must be the 1 rows of 4 tokens that were split, got 2 rows of 8. Pass the"):
        found.num_valid(None, rows=2, seq_len=8)


LENGTHS = (149, 192, 40)
"""Tokens of text in each row of a batch."""


def padded_batch() -> dict[str, Tensor]:
    batch = tiny_gpt.batch(batch_size=len(LENGTHS))
    batch["tokens"] = batch["tokens"].clamp(min=1)
    for row, length in enumerate(LENGTHS):
        batch["loss_mask"][row, length - 1 :] = 0
        batch["tokens"][row, length:] = 0
    return batch


def text_of_row(row: int) -> dict[str, Tensor]:
    return {name: value[row : row + 1, : LENGTHS[row]] for name, value in padded_batch().items()}


def selected(batch: dict[str, Tensor], config: Any, **inputs: Any) -> dict[int, Any]:
    """Records of each layer in a training step in double precision."""
    from megatron_mtraining import megatron as mtraining

    model = tiny_gpt.build(tiny_gpt.sparse_spec()).double()
    with mtraining.record_attention(capture_query_key=True) as recorder:
        tiny_gpt.mean_loss(model, batch, config, **inputs).backward()
    return recorder.layers


def lists_of(index: Any, row: int) -> list[list[int]]:
    """The entries that count of a row."""
    tables = ((index.vertical[row], index.num_vertical[row]), (index.slash[row], index.num_slash[row]))
    return [each[:count].tolist() for table, counts in tables for each, count in zip(table, counts, strict=True)]


def lists_of_padded(cp_size: int, layouts: tuple[str, ...]) -> dict[str, list[Any]]:
    found = {}
    for layout in layouts:
        config = dataclasses.replace(tiny_gpt.SPARSE, layout=layout, dense_below=48)
        with tiny_gpt.parallel_job(config, cp_size=cp_size, inner_size=2 if cp_size == 4 else 1):
            layers = selected(padded_batch(), config)
            assert all(record.num_valid.tolist() == list(LENGTHS) for record in layers.values())
            found[layout] = [lists_of(layer.index, row) for layer in layers.values() for row in range(len(LENGTHS))]
    return found


def lists_of_text() -> list[Any]:
    config = dataclasses.replace(tiny_gpt.SPARSE, dense_below=48)
    with tiny_gpt.parallel_job(config):
        rows = [selected(text_of_row(row), config) for row in range(len(LENGTHS))]
        return [lists_of(rows[row][layer].index, 0) for layer in rows[0] for row in range(len(LENGTHS))]


@functools.cache
def expected_lists() -> list[Any]:
    return run_on_ranks(lists_of_text, 1)[0]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_text_selects_as_without_padding_on_every_number_of_ranks_and_layout(cp_size: int):
    layouts, expected = LAYOUTS if cp_size > 1 else ("striped",), expected_lists()
    for by_layout in run_on_ranks(lists_of_padded, cp_size, cp_size=cp_size, layouts=layouts):
        assert by_layout == dict.fromkeys(layouts, expected)


CONVERSATIONS, PACK = (100, 3000, 701), 4608
"""Tokens of each conversation, and of the pack that they are padded to."""


def sft_sample(cp_size: int, seq_len: int) -> dict[str, Tensor]:
    """A pack as Megatron's SFTDataset makes one: each conversation is padded to a multiple, the last to the end."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets, positions, bounds = [], [], [], [0]
    for length in CONVERSATIONS:
        text = torch.randint(1, 63, (length,), generator=generator).tolist()
        is_last = len(bounds) == len(CONVERSATIONS)
        multiple = 2 * cp_size if cp_size > 1 else 1
        padding = seq_len + 1 - len(tokens) - length if is_last else -(len(tokens) + length) % multiple
        tokens += text + [0] * padding
        targets += [-100] * (length // 3) + text[length // 3 :] + [0] * padding  # the prompt, and what is learned
        positions += range(length + padding)
        bounds.append(len(tokens) - is_last)
    labels = torch.tensor(targets[1:])
    return {
        "tokens": torch.tensor([tokens[:-1]]),
        "labels": labels[None].clamp(min=0),
        "loss_mask": ((labels != 0) & (labels != -100)).float()[None],
        "position_ids": torch.tensor([positions[:-1]]),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
    }


@pytest.mark.skipif(not has_module("megatron.training.datasets.sft_dataset"), reason="no SFTDataset in this Megatron")
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_pack_is_that_of_megatrons_dataset(cp_size: int):
    from megatron.training.datasets.sft_dataset import SFTDataset

    class Tokenizer:
        eod, pad = 64, 0

        def tokenize_conversation(self, conversation: list[dict], **_: Any) -> tuple[Tensor, Tensor]:
            tokens = torch.tensor([message["content"] for message in conversation]).flatten()
            targets = tokens.clone()
            targets[: len(tokens) // 3] = -100
            return tokens, targets

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 63, (length,), generator=generator).tolist() for length in CONVERSATIONS]
    dataset = object.__new__(SFTDataset)
    dataset.dataset, dataset.indices = [[{"role": "system", "content": text} for text in texts]], [0]
    options = {"reset_position_ids": False, "create_attention_mask": False, "reset_attention_mask": False}
    sizes = {"sequence_length": PACK, "context_parallel_size": cp_size}
    dataset.config = SimpleNamespace(tokenizer=Tokenizer(), **sizes, **options)
    real, own = dataset[0], sft_sample(cp_size, PACK)
    for name in ("tokens", "loss_mask", "position_ids"):
        assert torch.equal(real[name], own[name][0]), name
    assert real["cu_seqlens"][: len(own["cu_seqlens"])].tolist() == own["cu_seqlens"].tolist()


def sft_lists(cp_size: int, layout: str) -> list[Any]:
    """Per layer and conversation what was selected, and what its text selects as a document of its own."""
    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining import select

    config = dataclasses.replace(tiny_gpt.SPARSE, layout=layout, dense_below=120)
    with tiny_gpt.parallel_job(config, cp_size=cp_size, inner_size=2 if cp_size == 4 else 1) as runtime:
        batch = sft_sample(cp_size, PACK)
        bounds = batch["cu_seqlens"]
        params = mtraining.packed_seq_params(bounds)
        layers = selected_pack(batch, config, params)
        starts = bounds[:-1].tolist()
        ends = [start + length for start, length in zip(starts, CONVERSATIONS, strict=True)]
        split = torch.tensor(sorted({*starts, *ends, PACK}), dtype=torch.int32)
        found = []
        for record in layers.values():
            group = {"layout": record.layout, "groups": runtime.cp_group} if cp_size > 1 else {}
            options = {"softmax_scale": record.softmax_scale, "cu_seqlens": split, **group}
            apart = select(record.query, record.key, config, **options)
            rows = [split.tolist().index(start) for start in starts]
            found += [(lists_of(record.index, i), lists_of(apart, row)) for i, row in enumerate(rows)]
        return found


def selected_pack(batch: dict[str, Tensor], config: Any, params: Any) -> dict[int, Any]:
    from megatron_mtraining import megatron as mtraining

    model = tiny_gpt.build(tiny_gpt.sparse_spec(), max_sequence_length=PACK).double()
    part = tiny_gpt.local_part(batch, config)
    with mtraining.record_attention(capture_query_key=True) as recorder:
        model(part["tokens"], part["position_ids"], None, labels=part["labels"], packed_seq_params=params).sum()
    return recorder.layers


@pytest.mark.parametrize(("cp_size", "layout"), [(1, "striped"), (2, "rotated"), (4, "node_striped")])
def test_conversations_of_a_pack_select_as_without_padding(cp_size: int, layout: str):
    for found in run_on_ranks(sft_lists, cp_size, cp_size=cp_size, layout=layout):
        assert len(found) == 2 * len(CONVERSATIONS)
        for own, alone in found:
            assert own == alone


def planted_errors(cp_size: int, layouts: tuple[str, ...], seq_len: int, declared: tuple[bool, ...]) -> list[float]:
    """Of text that looks at key 1000, with padding behind that looks elsewhere, through Megatron's model."""
    with tiny_gpt.parallel_job(PLANTED):
        alone = model_around(lambda attention: attention(*(each[:4992] for each in planted_tensors(seq_len)), None))
        expected = alone(torch.full((1, 4992), 7), torch.zeros(1, 4992, dtype=torch.int64), None)
    return [_planted_error(expected, cp_size, layout, seq_len, each) for layout in layouts for each in declared]


PLANTED = MTrainingConfig.algorithm_1(max_vertical=16, max_slash=0, vertical_top_p=0.9)


def _planted_error(expected: Tensor, cp_size: int, layout: str, seq_len: int, declared: bool) -> float:
    from megatron.core import parallel_state

    from megatron_mtraining import SequenceLayout, shard_sequence
    from megatron_mtraining import megatron as mtraining

    config = dataclasses.replace(PLANTED, layout=layout)
    with tiny_gpt.parallel_job(config, cp_size=cp_size, inner_size=2 if cp_size == 4 else 1) as runtime:
        tensors = planted_tensors(seq_len)
        sizes = {"cp_size": cp_size, "block_size": 64, "node_size": runtime.inner_size}
        sequence, rank = SequenceLayout(layout, seq_len=seq_len, **sizes), parallel_state.get_context_parallel_rank()
        parts = [shard_sequence(each, sequence, cp_rank=rank, dim=0) for each in tensors]
        model = model_around(lambda attention: attention(*parts, None), max_sequence_length=seq_len)
        tokens = torch.full((1, seq_len), 7)
        tokens[:, 4992:] = 0
        loss_mask = torch.ones(1, seq_len)
        loss_mask[:, 4992:] = 0 if declared else 1
        part = mtraining.shard_batch({"tokens": tokens, "loss_mask": loss_mask}, sequence, rank)
        out = model(part["tokens"], torch.zeros_like(part["tokens"]), None)
    own = shard_sequence(torch.arange(seq_len), sequence, cp_rank=rank, dim=0)
    return float((out[own < 4992] - expected[own[own < 4992]]).abs().max())


def planted_tensors(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(seq_len, 1, 1, 16, generator=generator, dtype=torch.float64) * 0.1 for _ in range(3)
    )
    direction, other = torch.eye(16, dtype=torch.float64)[:2]
    query[:4992] += 40 * direction
    query[4992:] += 40 * other
    key[1000], key[2000], value[1000] = direction, other, 3.0
    return query, key, value


def model_around(attend: Callable[[Any], Tensor], **options: Any) -> Any:
    """A GPTModel whose layers are one call of this attention."""
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_mtraining import megatron as mtraining

    config = tiny_gpt.transformer_config(num_layers=1, hidden_size=16, num_attention_heads=1, num_query_groups=1)
    options = {"position_embedding_type": "none", "post_process": False} | options
    model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=config, **options)
    attention = mtraining.MTrainingCoreAttention(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )

    class Layers(torch.nn.Module):
        def forward(self, *_: Any, **__: Any) -> Tensor:
            return attend(attention)

    model.decoder = Layers()
    return model


def test_padding_does_not_send_text_elsewhere():
    options = {"cp_size": 1, "layouts": ("striped",), "seq_len": 5056, "declared": (True, False)}
    ((declared, undeclared),) = run_on_ranks(planted_errors, 1, **options)
    assert declared == 0.0
    assert undeclared > 2.5


@pytest.mark.parametrize("cp_size", [pytest.param(2, marks=pytest.mark.extended), 4])
def test_padding_does_not_send_text_elsewhere_on_several_ranks(cp_size: int):
    options = {"cp_size": cp_size, "layouts": LAYOUTS, "seq_len": 5120, "declared": (True,)}
    for errors in run_on_ranks(planted_errors, cp_size, **options):
        assert max(errors) < 1e-12


def read_and_split(*, first_stage: bool, layout: str) -> list[tuple[int, int, int]] | None:
    """Padding that is known once Megatron's functions have read and split a batch, on one of two stages or alone."""
    from megatron.core import parallel_state, utils

    from megatron_mtraining.megatron.runtime import process

    config = dataclasses.replace(tiny_gpt.SPARSE, layout=layout)
    with tiny_gpt.parallel_job(config, cp_size=2, inner_size=1):
        batch = padded_batch() | {"cu_seqlens": None, "cu_seqlens_padded": None, "max_seqlen": None}
        newer = hasattr(utils, "get_batch_on_this_tp_rank")
        if newer:
            batch = utils.get_batch_on_this_tp_rank(
                batch,
                has_cu_seqlens=False,
                is_hybrid_cp=False,
                create_attention_mask_in_dataloader=False,
                broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
                broadcast_group=parallel_state.get_tensor_model_parallel_group(),
                cp_size=2,
                tp_rank=0,
                micro_batch_size=len(LENGTHS),
                seq_length=tiny_gpt.SEQ_LEN,
                mtp_on_this_rank=False,
                pipeline_model_parallel_size=2 if first_stage else 1,
                is_pipeline_first_stage=first_stage,
            )
            assert (batch["loss_mask"] is None) == first_stage, "Megatron drops it on the first of several stages"
        options = {"is_hybrid_cp": False} if newer else {}
        part = utils.get_batch_on_this_cp_rank(batch, cp_group=parallel_state.get_context_parallel_group(), **options)
        found = process().micro_batches.known_padding({"input_ids": part["tokens"]})
        copied = process().micro_batches.known_padding({"input_ids": part["tokens"].clone()})
        assert copied == found
        return found and list(found.runs)


@pytest.mark.parametrize(("first_stage", "layout"), [(False, "zigzag"), (True, "zigzag"), (True, "rotated")])
def test_megatrons_functions_read_and_split_what_is_counted(first_stage: bool, layout: str):
    for found in run_on_ranks(read_and_split, 2, first_stage=first_stage, layout=layout):
        assert found == [(0, 149, 192), (2, 40, 192)]
