"""The code in README and Getting started runs; README's ten lines of PyTorch compute what the package computes."""

from __future__ import annotations

import re
import subprocess
import sys

import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, select, sparse_attention
from megatron_mtraining.metrics import density

from .sources import ROOT


def python_blocks(document: str = "README.md") -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def test_the_ten_lines_are_the_definition():
    namespace: dict = {}
    exec(python_blocks()[1], namespace)
    query, key, value = torch.randn(3, 1, 300, 16, dtype=torch.float64)
    vertical, slash = [0, 5, 129], [0, 2, 3]
    index = VerticalSlashIndex.from_lists([[vertical]], [[slash]], seq_len=300)
    package = sparse_attention(*(t[:, :, None] for t in (query, key, value)), index=index)
    readme = namespace["vertical_slash"](query, key, value, torch.tensor(vertical), torch.tensor(slash))
    torch.testing.assert_close(package.out[:, :, 0], readme, rtol=0, atol=1e-12)


def test_the_six_lines_train_one_step():
    namespace: dict = {}
    exec(python_blocks()[0], namespace)
    assert namespace["out"].shape == (1, 8192, 4, 64) and namespace["lse"].shape == (1, 4, 8192)
    assert all(namespace[name].grad.any() for name in ("query", "key", "value"))
    config = MTrainingConfig(dense_below=0, max_density=0.1)
    index = select(namespace["query"], namespace["key"], config)
    assert density(index, seq_len=8192).mean() <= 0.1


COMPARED = """
import sys
from megatron_mtraining import gather_sequence

def whole(part):
    parts = [torch.empty_like(part) for _ in range(layout.cp_size)]
    torch.distributed.all_gather(parts, part.contiguous())
    return gather_sequence(parts, layout, dim=1)

with torch.no_grad():
    tensors = [whole(each) for each in (query, key, value, out, query.grad, key.grad, value.grad)]
if torch.distributed.get_rank() == 0:
    torch.save(tensors, sys.argv[1])
torch.distributed.destroy_process_group()
"""


def test_the_same_lines_over_two_ranks_are_one_device(tmp_path):
    script, result = tmp_path / "ring.py", tmp_path / "tensors.pt"
    script.write_text(python_blocks("docs/getting_started.md")[1] + COMPARED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*torchrun, script, result], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    *inputs, out, grad_query, grad_key, grad_value = torch.load(result)
    inputs = [each.requires_grad_() for each in inputs]
    expected = sparse_attention(*inputs, MTrainingConfig(dense_below=0, max_density=0.1))
    expected.out.sum().backward()
    torch.testing.assert_close(out, expected.out, rtol=0, atol=1e-5)
    for grad, each in zip((grad_query, grad_key, grad_value), inputs, strict=True):
        torch.testing.assert_close(grad, each.grad, rtol=0, atol=1e-4)
