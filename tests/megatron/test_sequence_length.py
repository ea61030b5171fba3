"""A batch that nobody split, or that was split twice, stops training in a sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mtraining import MTrainingConfig, SequenceLayout, token_positions
from megatron_mtraining.config import LAYOUTS
from megatron_mtraining.megatron import micro_batch
from megatron_mtraining.megatron.micro_batch import check_length
from megatron_mtraining.megatron.runtime import Runtime

from .fakes import Group

TOLD = 192
MODEL = {"max_sequence_length": TOLD, "training": True, "config": SimpleNamespace(variable_seq_lengths=False)}


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "global_of_training", lambda getter: None)


def runtime(cp_size: int = 2, rank: int = 0, layout: str = "striped") -> Any:
    config = MTrainingConfig(layout=layout, block_size=8)
    return Runtime(config=config, cp_group=Group(cp_size, rank), ring_groups=None, inner_size=1)


def call(
    local_len: int, *, cp_size: int = 2, given: dict[str, Any] | None = None, state: Any = None, **changes: Any
) -> None:
    model = SimpleNamespace(**(MODEL | changes))
    check_length(model, {"input_ids": torch.zeros(1, local_len)} | (given or {}), state or runtime(cp_size))


VARIABLE = SimpleNamespace(variable_seq_lengths=True)


def test_a_batch_that_was_split_once_passes():
    call(96)
    call(192, cp_size=1)
    call(64, cp_size=3)
    call(0, given={"input_ids": None, "labels": torch.zeros(1, 96)})
    call(0, given={"input_ids": None})  # a stage between others


@pytest.mark.parametrize("changes", [{}, {"config": VARIABLE}, {"training": False}])
def test_a_batch_that_nobody_split(changes: dict[str, Any]):
    sentence = (
        "^The tokens of a sequence on each of 2 context-parallel ranks must be 96, of max_sequence_length 192, "
        "got 192: a batch that nobody split. Split every batch once, with get_batch_on_this_cp_rank or "
    )
    with pytest.raises(ValueError, match=sentence):
        call(192, **changes)


def test_a_batch_that_was_split_twice():
    with pytest.raises(
        ValueError, match="must be 96, of max_sequence_length 192, got 48: a batch that was split twice"
    ):
        call(48)
    with pytest.raises(ValueError, match="got 24: a sequence of another length. Split .* --variable-seq-lengths"):
        call(24)


def test_shorter_is_legal_where_lengths_vary_and_in_evaluation(caplog: pytest.LogCaptureFixture):
    call(48, config=VARIABLE)
    assert not caplog.records
    state = runtime()
    for _ in range(2):
        call(40, state=state, training=False)
        with torch.no_grad():
            call(40, state=state)
    (record,) = caplog.records
    assert record.message == "evaluation of sequences of 80 tokens, shorter than max_sequence_length 192."


def test_megatrons_flag_says_the_length_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(micro_batch, "global_of_training", lambda getter: SimpleNamespace(seq_length=96))
    call(48)
    with pytest.raises(ValueError, match="must be 48, of --seq-length 96, got 96: a batch that nobody split."):
        call(96)


def test_a_pack_is_left_to_its_bounds():
    call(48, given={"packed_seq_params": SimpleNamespace(qkv_format="thd")})
    with pytest.raises(ValueError, match="a batch that was split twice"):
        call(48, given={"packed_seq_params": SimpleNamespace(qkv_format="sbhd")})


def positions(layout: str, seq_len: int, cp_size: int, rank: int) -> Tensor:
    sequence = SequenceLayout(layout, seq_len=seq_len, cp_size=cp_size, block_size=8, node_size=1)
    return token_positions(sequence, cp_rank=rank)


def check_positions(ids: Tensor, *, cp_size: int, rank: int, layout: str) -> None:
    model = SimpleNamespace(**(MODEL | {"config": VARIABLE, "max_sequence_length": 4096}))
    check_length(model, {"input_ids": ids, "position_ids": ids}, runtime(cp_size, rank, layout))


@pytest.mark.parametrize("layout", [kind for kind in LAYOUTS if kind != "contiguous"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_positions_of_a_batch_that_was_split_twice(layout: str, cp_size: int):
    """Some rank stops; the position ids say so where lengths vary. A contiguous part may be a text that goes on."""
    seq_len, stopped = 64 * cp_size**2, []
    for rank in range(cp_size):
        once = positions(layout, seq_len, cp_size, rank)
        check_positions(once[None], cp_size=cp_size, rank=rank, layout=layout)
        twice = once[positions(layout, seq_len // cp_size, cp_size, rank)]
        try:
            check_positions(twice[None], cp_size=cp_size, rank=rank, layout=layout)
        except ValueError as error:
            stopped.append(str(error))
    assert stopped and all(
        sentence.startswith(f"position_ids must be those of this rank's tokens in layout {layout}, got others: a batch")
        for sentence in stopped
    )


def test_positions_that_begin_anew_or_go_on_are_legal():
    own = positions("striped", 192, 2, 1)[None]
    check_positions(own % 50, cp_size=2, rank=1, layout="striped")
    check_positions(own + 4096, cp_size=2, rank=1, layout="striped")
    check_positions(torch.zeros_like(own), cp_size=2, rank=1, layout="striped")
