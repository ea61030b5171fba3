"""The code in README runs, and its ten lines of PyTorch compute what the package computes."""

from __future__ import annotations

import re

import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, select, sparse_attention

from .sources import ROOT


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_ten_lines_are_the_definition():
    namespace: dict = {}
    exec(python_blocks()[0], namespace)
    query, key, value = torch.randn(3, 1, 300, 16, dtype=torch.float64)
    vertical, slash = [0, 5, 129], [0, 2, 3]
    index = VerticalSlashIndex.from_lists([[vertical]], [[slash]], seq_len=300)
    package = sparse_attention(*(t[:, :, None] for t in (query, key, value)), index=index)
    readme = namespace["vertical_slash"](query, key, value, torch.tensor(vertical), torch.tensor(slash))
    torch.testing.assert_close(package.out[:, :, 0], readme, rtol=0, atol=1e-12)


def test_the_six_lines_train_one_step():
    namespace: dict = {}
    exec(python_blocks()[1], namespace)
    assert namespace["out"].shape == (1, 8192, 4, 64) and namespace["lse"].shape == (1, 4, 8192)
    assert all(namespace[name].grad.any() for name in ("query", "key", "value"))
    index = select(namespace["query"], namespace["key"], MTrainingConfig(dense_below=0))
    assert int(index.num_slash.max()) < 128  # sparse: 8192 tokens have 128 distances
