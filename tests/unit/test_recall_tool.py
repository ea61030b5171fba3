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


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--slash-run-length 0", "--slash-run-length must be an integer of at least 1, got 0."),
        (
            "--slash-run-length 200",
            "--max-slash must be 0 or at least slash_run_length = 200, got 120. Raise it, or lower slash_run_length.",
        ),
        (
            "--num-probe-rows 15",
            "--num-probe-rows must be a multiple of num_probe_windows, got 15 and 8. Change one of them.",
        ),
        ("--num-probe-rows 256", "--num-probe-rows must be so few that some of the 256 rows are held out, got 256."),
        ("--rows 0", "--rows must be at least 1, got 0."),
        ("--num-heads 3", "--num-heads must be a multiple of --num-kv-heads 2, got 3."),
        ("--num-kv-heads 0", "--num-kv-heads must be at least 1, got 0."),
        ("--head-dim 2", "--head-dim must be at least 3, got 2."),
        ("--seq-len 129", "--seq-len must be at least 130, got 129."),
        ("--seed -1", "--seed must be from 0 to 2 ** 63 - 1, got -1."),
        ("--load nowhere.pt", "--load must be a file that can be read, got nowhere.pt: No such file or directory."),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(flags, sentence):
    with pytest.raises(SystemExit) as caught:
        main(["--seq-len", "256", *flags.split()])
    assert caught.value.code == sentence


@pytest.mark.parametrize("saved", [b"no tensors", [1, 2], {"query": torch.ones(1)}, {"query": 1, "key": 1}])
def test_a_file_that_holds_no_layer_is_refused(tmp_path, saved):
    path = tmp_path / "qk.pt"
    if isinstance(saved, bytes):
        path.write_bytes(saved)
    else:
        torch.save(saved, path)
    with pytest.raises(SystemExit, match=f"--load must be a file .*, got {path}"):
        main(["--load", str(path)])
