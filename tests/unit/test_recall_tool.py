"""The recall tool's table, on synthetic data and on a saved layer."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_mtraining.config import INDEX_SHARINGS
from tools.recall import main, synthetic_sample

ROW = re.compile(r"^(.{38}) +([\d.]+) % +([\d.]+) % \( *([\d.]+)\) +(\d+) +([\d.]+) +([\d.]+)$")


def table(text: str) -> dict[str, tuple[float, float, float]]:
    """(kept, recall, worst head's recall) in percent by label."""
    matches = filter(None, map(ROW.match, text.splitlines()))
    return {match[1].strip(): tuple(float(match[column]) for column in (2, 3, 4)) for match in matches}


SMALL = ["--seq-len", "1024", "--num-heads", "2", "--num-kv-heads", "1", "--sink-tokens", "16", "--local-blocks", "2"]


def test_more_budget_recalls_more(capsys):
    main(SMALL)
    text = capsys.readouterr().out
    rows = table(text)
    assert len(rows) == 13 and text.splitlines()[-1].startswith("kept: % of causal pairs")
    always = rows["always kept only"]
    for estimator in ("last_window", "probe_windows"):
        small, large = rows[f"{estimator} p 0.3/0.5"], rows[f"{estimator} p 0.9/0.9"]
        assert always[0] < small[0] < large[0] <= 100
        assert always[1] < small[1] < large[1] <= 100
        assert large[2] <= large[1]


def test_lists_may_be_shared(capsys):
    """What is always kept is so for every head; what is chosen for all heads together is something else."""
    tables = []
    for sharing in INDEX_SHARINGS:
        main([*SMALL, "--max-vertical", "16", "--max-slash", "1", "--index-sharing", sharing])
        text = capsys.readouterr().out
        assert f"a list for each {sharing}" in text
        tables.append(table(text))
    head, shared = tables
    assert shared["always kept only"] == head["always kept only"]
    assert shared["probe_windows p 0.9/0.9"] != head["probe_windows p 0.9/0.9"]


def test_a_saved_layer_gives_the_same_table(tmp_path, capsys):
    sample = synthetic_sample(
        seq_len=1024, num_heads=2, num_kv_heads=1, head_dim=64, generator=torch.Generator().manual_seed(0)
    )
    torch.save({"query": sample.query, "key": sample.key}, tmp_path / "qk.pt")
    main(SMALL)
    expected = table(capsys.readouterr().out)
    main([*SMALL, "--load", str(tmp_path / "qk.pt")])
    assert table(capsys.readouterr().out) == expected


def test_a_saved_pack_of_documents(tmp_path, capsys):
    saved = {
        "query": torch.randn(1, 300, 2, 8),
        "key": torch.randn(1, 300, 1, 8),
        "softmax_scale": 0.3,
        "cu_seqlens": torch.tensor([0, 100, 300], dtype=torch.int32),
    }
    torch.save(saved, tmp_path / "qk.pt")
    main([*SMALL, "--rows", "20", "--load", str(tmp_path / "qk.pt")])
    assert len(table(capsys.readouterr().out)) == 13


def test_a_file_without_keys_is_refused(tmp_path):
    torch.save({"query": torch.zeros(1, 8, 1, 8)}, tmp_path / "q.pt")
    with pytest.raises(SystemExit, match=r"q\.pt must be a dict with query and key, got no key\."):
        main(["--load", str(tmp_path / "q.pt")])
