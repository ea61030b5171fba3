"""What an attention call refuses, and in which sentence, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_mtraining import MTrainingConfig, SequenceLayout, sparse_attention
from megatron_mtraining.ring import ring as ring_module
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import RingGroups, SoloTransport
from megatron_mtraining.types import BlockListIndex, Documents, VerticalSlashIndex
from megatron_mtraining.validate import validate_request

BATCH, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 2, 20, 4, 2, 8


def valid_call() -> dict[str, Any]:
    """Arguments that are accepted; each case below spoils one."""
    return {
        "query": torch.zeros(BATCH, SEQ_LEN, HEADS, HEAD_DIM),
        "key": torch.zeros(BATCH, SEQ_LEN, KV_HEADS, HEAD_DIM),
        "value": torch.zeros(BATCH, SEQ_LEN, KV_HEADS, HEAD_DIM),
        "index": index_of([3, 7], [0, 2]),
        "softmax_scale": None,
        "cu_seqlens": None,
    }


def index_of(vertical: list[int], slash: list[int], *, rows: int = BATCH, heads: int = HEADS) -> VerticalSlashIndex:
    """One list for all heads, taken as it is: neither sorted nor checked."""
    lists = (
        torch.tensor(entries, dtype=torch.int32).expand(rows, heads, len(entries)) for entries in (vertical, slash)
    )
    counts = (torch.full((rows, heads), len(entries), dtype=torch.int32) for entries in (vertical, slash))
    (vertical_list, slash_list), (num_vertical, num_slash) = lists, counts
    return VerticalSlashIndex(vertical_list, num_vertical, slash_list, num_slash, block_size=4)


def cu_seqlens(*bounds: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(bounds, dtype=dtype)


def one_row(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Makes the call one of batch 1 and two documents, then applies ``changes``."""

    def apply(call: dict[str, Any]) -> None:
        for name in ("query", "key", "value"):
            call[name] = call[name][:1]
        call.update(changes)

    return apply


def replace(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda call: call.update(changes)


CASES = [
    (replace(query=None), "query must be a tensor, got None"),
    (replace(key=[[1.0]]), "key must be a tensor, got list"),
    (replace(index=None), "config or index must be given, got neither. Pass an MTrainingConfig, or an index of your"),
    (replace(index=[[0]]), "index must be a VerticalSlashIndex or a BlockListIndex, got list. select makes one."),
    (replace(query=torch.zeros(20, 4, 8)), r"query must be of shape \[batch, seq, heads, head_dim\], got \(20, 4, 8\)"),
    (replace(value=torch.zeros(2, 20, 2)), r"value must be of shape \[batch, seq, heads, head_dim\]"),
    (
        replace(query=torch.zeros(2, 20, 4, 8, dtype=torch.int64)),
        "query.dtype must be float64, float32, bfloat16 or float16, got torch.int64",
    ),
    (
        replace(query=torch.zeros(2, 20, 4, 8, dtype=torch.float8_e4m3fn)),
        "query.dtype must be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    (
        replace(key=torch.zeros(2, 20, 2, 8, dtype=torch.bfloat16)),
        "key.dtype must be torch.float32 as query has, got torch.bfloat16",
    ),
    (
        replace(value=torch.zeros(2, 20, 2, 8, dtype=torch.float64)),
        "value.dtype must be torch.float32 as query has, got torch.float64",
    ),
    (replace(key=torch.zeros(2, 20, 2, 8, device="meta")), "key.device must be cpu as query has, got meta"),
    (replace(query=torch.zeros(2, 0, 4, 8)), r"query.shape must be at least 1 in every dimension, got \(2, 0, 4, 8\)"),
    (replace(query=torch.zeros(2, 20, 4, 0)), "query.shape must be at least 1 in every dimension"),
    (replace(key=torch.zeros(2, 20, 0, 8)), "key.shape must be at least 1 in every dimension"),
    (replace(value=torch.zeros(2, 20, 4, 8)), r"value.shape must be \(2, 20, 2, 8\) as key has, got \(2, 20, 4, 8\)"),
    (
        replace(key=torch.zeros(1, 20, 2, 8), value=torch.zeros(1, 20, 2, 8)),
        r"key.shape\[0\] must be the batch size 2 of query, got 1",
    ),
    (
        replace(key=torch.zeros(2, 16, 2, 8), value=torch.zeros(2, 16, 2, 8)),
        r"key.shape\[1\] must be the sequence length 20 of query, got 16",
    ),
    (
        replace(key=torch.zeros(2, 20, 2, 16), value=torch.zeros(2, 20, 2, 16)),
        r"key.shape\[3\] must be the head_dim 8 of query, got 16",
    ),
    (
        replace(key=torch.zeros(2, 20, 3, 8), value=torch.zeros(2, 20, 3, 8)),
        r"query.shape\[2\] must be a multiple of the 3 key heads, got 4",
    ),
    (replace(index=index_of([3], [0], rows=3)), "index.rows must be 2, the batch size, got 3"),
    (
        replace(index=index_of([3], [0], heads=3)),
        "index.num_lists must be 4 or 2, the heads of query or of key, got 3",
    ),
    (replace(index=index_of([3], [0], heads=2)), None),
    (replace(index=index_of([3], [0]).to("meta")), "index.device must be cpu as query has, got meta"),
    (replace(index=index_of([7, 3], [0])), "index.vertical must be strictly ascending in every list"),
    (replace(index=index_of([3, 3], [0])), "index.vertical must be strictly ascending in every list"),
    (replace(index=index_of([3, 20], [0])), r"index.vertical must be in \[0, 20\), got 3 to 20"),
    (replace(index=index_of([-1, 3], [0])), r"index.vertical must be in \[0, 20\), got -1 to 3"),
    (replace(index=index_of([3], [0, 5])), r"index.slash must be in \[0, 5\), got 0 to 5"),
    (replace(index=index_of([3], [0, 2, 1])), "index.slash must be strictly ascending in every list"),
    (replace(index=index_of([3], [1, 2])), "index.slash must be a list that starts with distance 0 for every head"),
    (
        replace(
            index=VerticalSlashIndex(
                *(
                    t.int()
                    for t in (torch.zeros(2, 4, 3), torch.full((2, 4), 4), torch.zeros(2, 4, 1), torch.ones(2, 4))
                ),
                block_size=4,
            )
        ),
        "index.num_vertical must be from 0 to the width 3, got 4 to 4",
    ),
    (replace(cu_seqlens=cu_seqlens(0, 20)), "query.shape.0. must be 1 when cu_seqlens is given, got 2"),
    (one_row(cu_seqlens=cu_seqlens(0, 9, 20)), None),
    (one_row(cu_seqlens=cu_seqlens(0, 9, 9, 20)), "index.rows must be 3, documents, got 2"),
    (one_row(cu_seqlens=cu_seqlens(0, 9, 20, dtype=torch.int64)), "cu_seqlens must be int32 with one dimension"),
    (one_row(cu_seqlens=cu_seqlens(0)), "cu_seqlens must be int32 with one dimension and at least 2 entries"),
    (one_row(cu_seqlens=cu_seqlens(1, 9, 20)), r"cu_seqlens\[0\] must be 0, got 1"),
    (one_row(cu_seqlens=cu_seqlens(0, 9, 8, 20)), "cu_seqlens must be ascending, got 9 before 8 at entry 1"),
    (one_row(cu_seqlens=cu_seqlens(0, 9, 19)), r"cu_seqlens\[-1\] must be the sequence length 20, got 19"),
    *(
        (replace(softmax_scale=scale), "softmax_scale must be finite and positive")
        for scale in (0.0, -1.0, float("inf"), [1.0], 1j, 10**400, torch.ones(2), True, "1")
    ),
    (replace(softmax_scale=float("nan")), "softmax_scale must be finite and positive, got nan"),
]


@pytest.mark.parametrize(("spoil", "message"), CASES)
def test_refusals(
    spoil: Callable[[dict[str, Any]], None], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence for each, and no backend is asked for; ``None`` marks the counterpart that is accepted."""
    call = valid_call()
    spoil(call)
    if message is None:
        sparse_attention(**call)
        return
    monkeypatch.setattr(
        ring_module, "resolve_backend", lambda *_, **__: pytest.fail("refused only after a backend was resolved")
    )
    with pytest.raises(ValueError, match=message):
        sparse_attention(**call)


@pytest.mark.parametrize("name", ["vertical", "num_vertical", "slash", "num_slash"])
def test_an_index_is_made_of_tensors(name: str) -> None:
    tables = index_of([3], [0])
    given = {each: getattr(tables, each) for each in ("vertical", "num_vertical", "slash", "num_slash")}
    with pytest.raises(ValueError, match=f"^index.{name} must be a tensor, got list."):
        VerticalSlashIndex(**(given | {name: [[0]]}))


@pytest.mark.parametrize("name", ["starts", "chunks", "row_masks", "query_blocks"])
def test_block_lists_are_made_of_tensors(name: str) -> None:
    given = {"starts": torch.tensor([[[0, 1]]]).int(), "chunks": torch.tensor([0]).int()}
    with pytest.raises(ValueError, match=f"^index.{name} must be a tensor, got list."):
        BlockListIndex(**(given | {name: [0]}))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: VerticalSlashIndex(*index_of([3], [0]).tensors[:3], torch.ones(2, 3).int()),
            r"index.num_slash must be of leading shape \(2, 4\), got \(2, 3\)",
        ),
        (
            lambda: VerticalSlashIndex(*index_of([3], [0]).tensors[:3], torch.ones(2, 4, device="meta").int()),
            "index.num_slash must be on cpu as index.vertical is, got meta",
        ),
        (lambda: lists_of(row_masks=torch.ones(3).long()), "index.row_masks must be of the 2 entries of chunks, got 3"),
        (lambda: lists_of(row_masks=torch.ones(2).int()), "index.row_masks must be torch.int64 with 1 dimensions, got"),
        (lambda: lists_of(chunks=torch.ones(2, device="meta").int()), "index.chunks must be on cpu as index.starts is"),
        (lambda: lists_of(chunk_blocks=0), "index.chunk_blocks must be an integer of at least 1, got 0"),
        (lambda: Documents.from_cu_seqlens([0, 20], seq_len=20), "cu_seqlens must be an int32 tensor, got list"),
    ],
)
def test_what_an_index_is_not_made_of(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make()


def lists_of(**changes: Any) -> BlockListIndex:
    """Two entries for one block of queries."""
    given = {"starts": torch.tensor([[[0, 2]]]).int(), "chunks": torch.tensor([0, 1]).int()}
    return BlockListIndex(**(given | changes))


def resolved(call: dict[str, Any], **place: Any) -> tuple[float, Documents | None]:
    place = {"layout": None, "groups": RingGroups(cp=SoloTransport())} | place
    request = validate_request(**call, config=MTrainingConfig(block_size=4), num_valid=None, **place)
    return request.softmax_scale, request.documents


def test_what_is_resolved() -> None:
    call = valid_call()
    assert resolved(call) == (HEAD_DIM**-0.5, None)
    one_row(cu_seqlens=cu_seqlens(0, 9, 20), softmax_scale=2)(call)
    assert resolved(call) == (2.0, Documents((0, 9, 20)))


def test_a_rank_holds_part_of_what_the_index_names() -> None:
    """Positions are judged by the global length, not by the local tensors'."""
    call = valid_call() | {"index": index_of([3, 39], [0, 9])}
    layout = SequenceLayout("contiguous", seq_len=40, cp_size=2, block_size=4)
    RankSimulator(2).run(lambda group: resolved(call, layout=layout, groups=RingGroups(cp=group)))
    with pytest.raises(ValueError, match=r"index.vertical must be in \[0, 20\)"):
        resolved(call)


def test_an_index_of_inference_mode_is_refused_where_gradients_are_wanted():
    """torch cannot save it for a backward, and would not say that it is the index."""
    call = valid_call()
    with torch.inference_mode():
        call["index"] = index_of([3], [0])
    sparse_attention(**call)
    call["query"].requires_grad_()
    with pytest.raises(ValueError, match="index must be made outside torch.inference_mode for a call with gradients"):
        sparse_attention(**call)
