"""Block lists on the CUDA kernels against the float64 oracle, on one device and rank by rank; their selection there."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_mtraining import BlockListIndex, MTrainingConfig, select, sparse_attention
from megatron_mtraining.backends.cuda import cuda_backend
from megatron_mtraining.backends.geometry import BlockGeometry
from megatron_mtraining.layout import SequenceLayout, shard_sequence, token_positions
from megatron_mtraining.testing.error_budget import (
    assert_all_within_budget,
    nan_filled_empty,
    plain_attention,
    run_with_gradients,
)
from megatron_mtraining.testing.oracle import oracle_attention
from megatron_mtraining.testing.simulator import RankSimulator

from .cases import BLOCK, Case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family")]

FP16 = torch.float16
DOCUMENTS = (0, 9, 17, 25, 25, 26, 130, 300, 301, 768)
CASES = [
    # case, lists, blocks in a chunk, masks
    (Case(seq_len=704, num_heads=4, num_kv_heads=2, head_dim=128), 4, 1, True),
    (Case(seq_len=1025, num_heads=4, num_kv_heads=1, head_dim=64), 4, 2, True),
    (Case(seq_len=449, num_heads=3, num_kv_heads=3, head_dim=96, batch=2), 3, 2, False),
    (Case(seq_len=833, num_heads=6, num_kv_heads=2, head_dim=64, dtype=FP16, batch=2), 2, 3, True),
    (Case(seq_len=640, num_heads=8, num_kv_heads=2, head_dim=96, dtype=FP16), 2, 4, False),
    (Case(seq_len=1100, num_heads=2, num_kv_heads=1, head_dim=128, dtype=FP16), 2, 40, True),
    (Case(seq_len=768, num_heads=4, num_kv_heads=2, head_dim=128, bounds=DOCUMENTS), 4, 2, True),
    (Case(seq_len=768, num_heads=2, num_kv_heads=1, head_dim=64, bounds=DOCUMENTS), 2, 1, False),
    (Case(seq_len=63, num_heads=2, num_kv_heads=1, head_dim=128), 2, 1, True),
]


def random_lists(case: Case, num_lists: int, chunk_blocks: int, masks: bool) -> BlockListIndex:
    """Lists of any length; every row sees its own chunk."""
    num_blocks = -(-case.seq_len // BLOCK)
    lists, rows = [], []
    for _ in range(case.batch * num_lists):
        for block in range(num_blocks):
            own = block // chunk_blocks
            chosen = sorted({own, *random.sample(range(own + 1), random.randint(0, own))})
            lists.append(chosen)
            rows.append([(1 << 64) - 1 if chunk == own else random.getrandbits(64) for chunk in chosen])
    nested = [
        [[table[(row * num_lists + head) * num_blocks :][:num_blocks] for head in range(num_lists)]
         for row in range(case.batch)]
        for table in (lists, rows)
    ]  # fmt: skip
    index = BlockListIndex.from_lists(nested[0], nested[1] if masks else None, chunk_blocks=chunk_blocks)
    return index.to("cuda")


def judge(case: Case, index: BlockListIndex, ours: dict[str, Tensor], inputs, gradients) -> None:
    """The error rule for every result of ``ours``."""
    grad_out, grad_lse = gradients
    per_head = index.per_head(case.num_heads)
    whole = {"index": per_head, "softmax_scale": case.scale, "cu_seqlens": case.cu_seqlens}
    given = {"grad_out": grad_out, "grad_lse": grad_lse}
    low = run_with_gradients(partial(plain_attention, **whole), *inputs, **given)
    wide = [tensor.double() for tensor in inputs]
    exact = run_with_gradients(partial(oracle_attention, **whole), *wide, **given)
    assert_all_within_budget(ours, low, exact, case=str(case))
    torch.testing.assert_close(ours["lse"].double(), exact["lse"], rtol=2e-6, atol=2e-5)


def check(case: Case, index: BlockListIndex) -> None:
    """The error rule on one device, and the same bits the second time."""
    inputs, gradients = case.inputs(), case.gradients()
    given = {"grad_out": gradients[0], "grad_lse": gradients[1]}
    options = {"softmax_scale": case.scale, "cu_seqlens": case.cu_seqlens, "config": MTrainingConfig(backend="cuda")}
    run = partial(sparse_attention, index=index, **options)
    with nan_filled_empty():
        ours = run_with_gradients(run, *inputs, **given)
        again = run_with_gradients(run, *inputs, **given)
    judge(case, index, ours, inputs, gradients)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.parametrize(("case", "num_lists", "chunk_blocks", "masks"), CASES, ids=lambda value: str(value))
def test_agrees_with_the_definition(case, num_lists, chunk_blocks, masks):
    check(case, random_lists(case, num_lists, chunk_blocks, masks))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_one_of_two_tiles_needs_little_of_what_the_other_does(head_dim):
    """A warpgroup passes over more slots than the ring has, between two of its tiles and between its last and the end;
    in the `far` lists over every number up to that, between the first two that an odd key, or query, meets."""
    case = Case(seq_len=2560, num_heads=5, num_kv_heads=1, head_dim=head_dim)
    even_keys = [sorted({*range(0, block, 2), block}) for block in range(40)]
    odd_queries = [list(range(block + 1)) if block % 2 else sorted({0, block}) for block in range(40)]
    every_key = [list(range(block + 1)) for block in range(40)]
    far = [2 + block // 2 % 13 for block in range(40)]
    far_queries = [sorted({min(far[q], q), q}) if q % 2 else list(range(q + 1)) for q in range(40)]
    far_keys = [[k for k in range(q + 1) if k % 2 == 0 or q - k in (0, far[k])] for q in range(40)]
    index = BlockListIndex.from_lists([[far_keys, far_queries, even_keys, odd_queries, every_key]]).to("cuda")
    check(case, index)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rows_without_keys_give_nothing_and_get_nothing(head_dim):
    """Block 1 has no list, and of block 2 every other row sees nothing."""
    case = Case(seq_len=256, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    lists, rows = [[[[0], [], [0, 2], [1]]] * 2], [[[[-1], [], [0x5555, 0x5555], [-1]]] * 2]
    index = BlockListIndex.from_lists(lists, rows).to("cuda")
    inputs, given = case.inputs(), {"grad_out": case.gradients()[0], "grad_lse": None}
    with nan_filled_empty():
        ours = run_with_gradients(
            partial(sparse_attention, index=index, config=MTrainingConfig(backend="cuda")), *inputs, **given
        )
    wide = [tensor.double() for tensor in inputs]
    exact = run_with_gradients(partial(oracle_attention, index=index), *wide, **given)
    empty = exact["lse"][0, 0] == -torch.inf
    assert int(empty.sum()) == 64 + 56
    assert torch.equal(ours["lse"] == -torch.inf, exact["lse"] == -torch.inf)
    assert (ours["out"][:, empty] == 0).all() and (ours["grad_query"][:, empty] == 0).all()
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        torch.testing.assert_close(ours[name].double(), exact[name], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("kind", "cp_size", "pattern", "case"),
    [
        ("striped", 4, "moba", Case(seq_len=1024, num_heads=4, num_kv_heads=2, head_dim=128)),
        ("zigzag", 2, "xattention", Case(seq_len=1024, num_heads=4, num_kv_heads=2, head_dim=64)),
        ("rotated", 3, "moba", Case(seq_len=768, num_heads=2, num_kv_heads=1, head_dim=96, bounds=DOCUMENTS)),
        ("striped", 3, "xattention", Case(seq_len=768, num_heads=2, num_kv_heads=1, head_dim=128, bounds=DOCUMENTS)),
    ],
)
def test_ranks_select_and_attend_as_one_device(kind, cp_size, pattern, case):
    """Every rank's lists are bit for bit those of one device, and its steps add up to what the oracle says."""
    config = MTrainingConfig(
        pattern=pattern, moba_chunk=128, moba_top_k=3, xattention_threshold=0.7, dense_below=0, layout=kind
    )
    layout = SequenceLayout(kind, seq_len=case.seq_len, cp_size=cp_size)
    inputs, gradients = case.inputs(), case.gradients()
    whole = select(*inputs[:2], config, cu_seqlens=case.cu_seqlens)

    def body(group):
        query, key = (shard_sequence(tensor, layout, cp_rank=group.rank, dim=1) for tensor in inputs[:2])
        return select(query, key, config, layout=layout, groups=group, cu_seqlens=case.cu_seqlens)

    indices = RankSimulator(cp_size).run(body)
    for rank, index in enumerate(indices):
        assert _lists(index, range(layout.num_local_blocks)) == _lists(whole, layout.blocks(rank).tolist())
    with nan_filled_empty():
        ours = _rank_by_rank(case, layout, indices, inputs, gradients)
    judge(case, whole, ours, inputs, gradients)


def _lists(index: BlockListIndex, slots) -> list[tuple[list[int], list[int] | None]]:
    starts, chunks = index.starts.cpu(), index.chunks.cpu()
    masks = None if index.row_masks is None else index.row_masks.cpu()
    found = []
    for head in starts.flatten(0, 1):
        for slot in slots:
            entries = slice(*head[slot : slot + 2].tolist())
            found.append((chunks[entries].tolist(), None if masks is None else masks[entries].tolist()))
    return found


def _rank_by_rank(case, layout, indices, inputs, gradients) -> dict[str, Tensor]:
    """Each rank's queries against the keys of one rank after the other, rank 0's first."""
    backend, (query, key, value), (grad_out, grad_lse) = cuda_backend(), inputs, gradients
    results = {"out": torch.empty_like(query), "grad_query": torch.empty_like(query)}
    results["lse"] = query.new_empty(query.shape[0], query.shape[2], query.shape[1], dtype=torch.float32)
    grad_keys = torch.zeros(2, *key.shape, device="cuda")
    tokens = [token_positions(layout, cp_rank=rank).cuda() for rank in range(layout.cp_size)]
    for rank, rows in enumerate(tokens):
        geometries = [
            BlockGeometry(
                seq_len=layout.seq_len, block_size=BLOCK, query_blocks=layout.blocks(rank),
                key_blocks=layout.blocks(source), documents=case.documents,
            )
            for source in range(layout.cp_size)
        ]  # fmt: skip
        result = grad_query = None
        for source, keys in enumerate(tokens):
            held, last = (query[:, rows], key[:, keys], value[:, keys]), source + 1 == layout.cp_size
            options = {"softmax_scale": case.scale, "previous": result, "is_last": last}
            result = backend.forward(*held, indices[rank], geometries[source], **options)
        results["out"][:, rows], results["lse"][:, :, rows] = result
        delta = backend.softmax_delta(grad_out[:, rows], result.out, grad_lse[:, :, rows])
        for source, keys in enumerate(tokens):
            held, last = (query[:, rows], key[:, keys], value[:, keys]), source + 1 == layout.cp_size
            options = {"softmax_scale": case.scale, "previous": grad_query, "is_last": last}
            given = (grad_out[:, rows], *held, result.lse, delta, indices[rank], geometries[source])
            grad_query, part, _ = backend.backward(*given, **options)
            grad_keys[:, :, keys] += part
        results["grad_query"][:, rows] = grad_query
    return results | dict(zip(("grad_key", "grad_value"), grad_keys.to(query.dtype), strict=True))


@pytest.mark.parametrize("pattern", ["moba", "xattention"])
def test_a_gpu_selects_what_a_cpu_does(pattern):
    case = Case(seq_len=2999, num_heads=4, num_kv_heads=2, head_dim=64)
    config = MTrainingConfig(pattern=pattern, moba_chunk=256, moba_top_k=4, dense_below=0)
    query, key, _ = case.inputs()
    on_gpu = select(query, key, config)
    on_cpu = select(query.cpu(), key.cpu(), config)
    for ours, other in zip(on_gpu.tensors, on_cpu.tensors, strict=True):
        assert ours is other is None or torch.equal(ours.cpu(), other)
