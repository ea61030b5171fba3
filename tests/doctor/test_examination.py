"""A planted fault of each kind is found by its check, and by no other; without it every check passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mtraining.megatron.compat import has_module

from .jobs import DOCUMENTS, Examination, examine

pytestmark = pytest.mark.skipif(not has_module("megatron.training"), reason="no megatron.training in this wheel")

RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
REPEATS = {"attention twice", "recomputation", "selected keys"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    """Two ranks, one document, recomputation, six layers of which two are looked at; nothing is wrong."""
    folder = tmp_path_factory.mktemp("whole")
    return examine(*RECOMPUTE, "--deterministic-mode", "--num-layers", 6, cp_size=2, folder=folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    """Two ranks, a pack; nothing is wrong."""
    return examine(cp_size=2, folder=tmp_path_factory.mktemp("packed"), DOCUMENTS=DOCUMENTS)


def test_nothing_wrong_is_found_in_a_right_run(whole: Examination):
    assert whole.faults == set()
    expected = REPEATS | {"all gradients twice", "padding", "fewer ranks", "Megatron's attention"}
    assert whole.passed == expected, whole.found["findings"]
    assert "2 of 6 layers, those numbered 1, 6" in whole.found["notes"]


def test_all_is_said_that_a_reader_needs(whole: Examination):
    assert whole.found["setting"]["tokens"] == 192
    assert whole.found["setting"]["blocks_a_rank"] == 12
    for check in ("attention twice", "recomputation", "fewer ranks"):
        assert f"density {whole.found['setting']['density']}" in whole.text_of(check)
    assert "100.0%" in whole.text_of("Megatron's attention")
    assert "2 calls of a layer" in whole.text_of("recomputation")
    for check in ("fewer ranks", "Megatron's attention"):
        table = whole.found["gradients"][check]
        assert len(table) == 15, "the loss and 14 parameters"
        assert max(table.values()) < 5, "rounding alone"
    assert [layer["layer"].split(".")[2] for layer in whole.found["layers"]] == ["0", "1"]


def test_a_pack_passes_and_says_what_is_not_checked(packed: Examination):
    assert packed.faults == set()
    assert packed.passed == REPEATS | {"documents", "fewer ranks"}
    assert "Megatron's local attention does not support packed documents" in packed.text_of("Megatron's attention")


def test_a_rank_that_shifts_its_tokens(tmp_path: Path):
    found = examine(cp_size=2, folder=tmp_path, FAULT="shift")
    assert found.faults == {"fewer ranks"}
    assert min(found.found["gradients"]["fewer ranks"].values()) > 100


def test_a_leak_between_documents(tmp_path: Path):
    found = examine(folder=tmp_path, FAULT="leak", DOCUMENTS=DOCUMENTS)
    assert found.faults == {"documents"}
    assert "there is one context-parallel rank already" in found.text_of("fewer ranks")


def test_a_wrong_scale_an_index_of_padding_and_one_that_recomputation_changes(tmp_path: Path):
    found = examine(folder=tmp_path, FAULT="scale padding recomputation")
    assert found.faults == {"Megatron's attention", "padding", "recomputation"}
