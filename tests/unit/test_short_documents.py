"""Documents whose keys are all kept anyway are not scored, and get the lists that scoring would give them."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import MTrainingConfig, SequenceLayout, select, shard_sequence
from megatron_mtraining.selection import reference
from megatron_mtraining.testing.simulator import RankSimulator

BOUNDS = [0, 1, 1, 3, 9, 17, 80, 81, 200, 203, 240]
"""Lengths of 0 and 1, of a block and over its edge, and some with a choice to make."""


def selected(config: MTrainingConfig, cp_size: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, BOUNDS[-1], heads, 8, generator=generator) for heads in (4, 2))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    if cp_size == 1:
        return select(query, key, config, cu_seqlens=bounds).tensors
    layout = SequenceLayout("striped", seq_len=BOUNDS[-1], cp_size=cp_size, block_size=config.block_size)

    def body(transport):
        parts = (shard_sequence(tensor, layout, cp_rank=transport.rank, dim=1) for tensor in (query, key))
        return select(*parts, config, layout=layout, groups=transport, cu_seqlens=bounds)

    return RankSimulator(cp_size).run(body)[0].tensors


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize(("sinks", "local"), [(4, 1), (0, 3), (70, 1), (300, 1)])
def test_only_documents_with_a_choice_are_scored(sinks, local, cp_size, monkeypatch):
    config = MTrainingConfig.algorithm_1(
        dense_below=0,
        num_probe_rows=16,
        block_size=8,
        sink_tokens=sinks,
        local_blocks=local,
        max_vertical=9,
        max_slash=3,
    )
    scored = []
    scores = reference.ProbeScores
    monkeypatch.setattr(reference, "ProbeScores", lambda **given: scored.append(given) or scores(**given))
    ours = selected(config, cp_size)
    num_scored = len(scored) // cp_size
    monkeypatch.setattr(reference, "_has_choice", lambda document, config: True)
    for name, tensor, expected in zip(
        ("vertical", "count", "slash", "count"), ours, selected(config, cp_size), strict=True
    ):
        assert torch.equal(tensor, expected), name
    spans = [span for span in zip(BOUNDS, BOUNDS[1:], strict=False) if span[1] > span[0]]
    blocks = [(stop - 1) // 8 - start // 8 + 1 for start, stop in spans]
    choices = [stop - start > sinks and count > local for (start, stop), count in zip(spans, blocks, strict=True)]
    assert num_scored == sum(choices) < len(spans) == len(scored) // cp_size - num_scored
