"""The page of results is what the files beside it say."""

from __future__ import annotations

import json

from tools.bench import tables
from tools.bench.report import DEFAULT_FOLDER


def test_the_page_is_made_from_the_files_beside_it():
    assert (DEFAULT_FOLDER / "RESULTS.md").read_text() == tables.document()


def test_a_row_for_each_operation_and_baseline(tmp_path):
    row = {"baseline": "ours", "ms": 2.0, "tflops": 451.6, "efficiency": None, "sm_mhz": 1700.0}
    case = {"label": "random", "density": 0.074, "distances": 128.0, "verticals": 1152.0}
    case |= {"rows": {"forward": [row], "backward": [{**row, "ms": 5.0}]}, "absent": {"peer": "Not installed."}}
    problem = {"seq_len": 4096, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "bf16"}
    written = {"command": "python -m tools.bench.run", "gpu": "NVIDIA X", "date": "2026-01-02T00:00:00+00:00"}
    written |= {
        "torch": "2.9",
        "cudnn": 1,
        "driver": "5",
        "commit": "0123456789abcdef",
        "repeats": 20,
        "rest_ms": 100.0,
    }
    written |= {"problem": problem, "cases": [case | {"failed": {}}]}
    (tmp_path / "forward_x.json").write_text(json.dumps(written))
    page = tables.document(tmp_path)
    assert "## forward_x\n" in page and "commit 0123456789ab; 20 repeats, 100 ms of rest before each." in page
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert rows[0] == ["operation", "baseline", "ms", "useful TFLOP/s", "MHz"]
    assert rows[2:] == [["forward", "ours", "2.00", "452", "1700"], ["backward", "ours", "5.00", "452", "1700"]]
    assert "density 7.40 %" in page and "- peer: not here. Not installed." in page
