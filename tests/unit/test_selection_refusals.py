"""What selection refuses, each with one clear sentence; and what an index costs to keep."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from megatron_mtraining import select
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import SequenceLayout
from megatron_mtraining.request import AttentionRequest
from megatron_mtraining.selection import dense, vertical_slash
from megatron_mtraining.transport import RingGroups, SoloTransport
from megatron_mtraining.types import VerticalSlashIndex
from megatron_mtraining.validate import validate_request

CONFIG = MTrainingConfig.algorithm_1(block_size=8, dense_below=0)


def tensor(*shape, dtype=torch.float32) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype)


QUERY, KEY = tensor(1, 16, 4, 8), tensor(1, 16, 2, 8)
ONE_RANK = SequenceLayout("striped", seq_len=16, cp_size=1, block_size=8)

REFUSALS = [  # one of each check; tests/unit/test_validation.py has the sentences, of the same function
    ((QUERY, KEY.half(), {}), "key.dtype must be torch.float32 as query has, got torch.float16."),
    ((QUERY, KEY, {"config": None}), "config must be an MTrainingConfig, got None."),
    ((QUERY, KEY, {"config": {"num_probe_rows": 8}}), "config must be an MTrainingConfig, got dict."),
    (
        (QUERY, KEY, {"layout": "striped", "groups": SoloTransport()}),
        "layout must be a SequenceLayout, got 'striped'. SequenceLayout(kind, seq_len=..., cp_size=...) makes one.",
    ),
    (
        (QUERY, KEY, {"layout": SequenceLayout("striped", seq_len=32, cp_size=2, block_size=8)}),
        "layout.cp_size must be the size 1 of the context-parallel group, got 2. Pass the groups that the sequence is "
        "split over.",
    ),
    (
        (QUERY, KEY, {"layout": ONE_RANK, "groups": "world"}),
        "group must be a torch process group that this rank belongs to, or a Transport, got 'world'.",
    ),
    (
        (QUERY, KEY, {"cu_seqlens": torch.tensor([0, 12], dtype=torch.int32)}),
        "cu_seqlens[-1] must be the sequence length 16, got 12.",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSALS, ids=[sentence for _, sentence in REFUSALS])
def test_refusals(call, sentence):
    query, key, options = call
    for pattern in ("vertical_slash", "dense", "moba"):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            select(query, key, **({"config": replace(CONFIG, pattern=pattern)} | options))


def test_unknown_estimator_is_refused_even_where_all_is_dense():
    with pytest.raises(ValueError, match="estimator must be one of"):
        select(QUERY, KEY, MTrainingConfig(estimator="lucky", block_size=8))


def every_distance(request: AttentionRequest) -> VerticalSlashIndex:
    widths = vertical_slash.list_widths(request.config, request.spans)
    return dense.every_distance(request, widths)


def request_of(config: MTrainingConfig, seq_len: int, *, num_heads: int) -> AttentionRequest:
    """A request on one device, of a query that takes no memory."""
    query = torch.zeros(1).expand(1, seq_len, num_heads, 1)
    groups = RingGroups(cp=SoloTransport())
    options = {"index": None, "layout": None, "softmax_scale": None, "cu_seqlens": None, "num_valid": None}
    return validate_request(query, query, None, config, groups=groups, **options)


def test_a_layer_keeps_less_than_a_mebibyte_at_a_million_tokens():
    """Widths follow from the configuration, so a document of any content keeps as much."""
    million = 2**20
    index = every_distance(request_of(MTrainingConfig.algorithm_1(), million, num_heads=32))
    assert index.vertical.shape == (1, 32, 1152) and index.slash.shape == (1, 32, 128)
    assert index.num_bytes == 32 * 4 * (1152 + 1 + 128 + 1)
    assert index.num_bytes < 2**20


def test_lists_are_no_wider_than_the_documents_fill():
    """A pack of a thousand small documents packs a column for each, not the caps of a long one."""
    config = MTrainingConfig.algorithm_1(dense_below=128, sink_tokens=4, max_vertical=96, local_blocks=2, max_slash=6)
    for bounds, widths in (((0, 0, 100, 228), (1, 3)), ((0, 130, 160), (100, 3)), ((0, 4096), (100, 8))):
        query, key = torch.randn(2, 1, bounds[-1], 1, 4)
        index = select(query, key, config, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        assert (index.vertical.shape[2], index.slash.shape[2]) == widths


@pytest.mark.parametrize("seq_len", [100, 5000, 9000])
def test_selected_and_dense_rows_share_one_width(seq_len):
    config = MTrainingConfig.algorithm_1(max_vertical=8, max_slash=8)
    index = select(torch.randn(1, seq_len, 1, 4), torch.randn(1, seq_len, 1, 4), config)
    dense = every_distance(request_of(config, seq_len, num_heads=1))
    assert index.vertical.shape == dense.vertical.shape and index.slash.shape == dense.slash.shape
