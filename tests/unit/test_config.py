"""The configuration refuses what it cannot mean, and survives being copied and sent."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import fields

import numpy as np
import pytest

from megatron_mtraining import MTrainingConfig, SequenceLayout, VerticalSlashIndex
from megatron_mtraining.arguments import _field_docs
from megatron_mtraining.config import BUDGETS, PATTERNS
from megatron_mtraining.layout import token_positions
from megatron_mtraining.testing.simulator import ThreadHub
from megatron_mtraining.transport.groups import inner_and_outer_ranks
from megatron_mtraining.types import BlockListIndex


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (
            "layout",
            "diagonal",
            "layout must be one of auto, contiguous, zigzag, striped, rotated, node_striped, got 'diagonal'.",
        ),
        ("schedule", "spiral", "schedule must be one of auto, hierarchical, flat, gather, got 'spiral'."),
        ("profile", "", "profile must be auto, a name or a file, got ''."),
        ("backend", "tpu", "backend must be one of auto, reference, cuda, got 'tpu'."),
        ("index_sharing", "kv", "index_sharing must be one of head, kv_group, got 'kv'."),
        ("vertical_top_p", 0.0, "vertical_top_p must be in \\(0, 1\\], got 0.0."),
        ("slash_top_p", 1.5, "slash_top_p must be in \\(0, 1\\], got 1.5."),
        ("slash_top_p", True, "slash_top_p must be in \\(0, 1\\], got True."),
        ("slash_top_p", "0.5", "slash_top_p must be in \\(0, 1\\], got '0.5'."),
        ("num_probe_rows", 0, "num_probe_rows must be an integer of at least 1, got 0."),
        ("local_blocks", 0, "local_blocks must be an integer of at least 1, got 0."),
        ("slash_run_length", 0, "slash_run_length must be an integer of at least 1, got 0."),
        ("target_recall", 0.0, "target_recall must be in \\(0, 1\\], got 0.0."),
        ("target_recall", 1.01, "target_recall must be in \\(0, 1\\], got 1.01."),
        ("target_recall", float("nan"), "target_recall must be in \\(0, 1\\], got nan."),
        ("target_recall", None, "target_recall must be in \\(0, 1\\], got None."),
        ("max_density", 0, "max_density must be in \\(0, 1\\], got 0."),
        ("dense_above", None, "dense_above must be in \\(0, 1\\], got None."),
        ("max_vertical", 2.5, "max_vertical must be an integer of at least 0, got 2.5."),
        ("sink_tokens", True, "sink_tokens must be an integer of at least 0, got True."),
        ("dense_layers", 3, "dense_layers must be a tuple of layer numbers, got 3."),
        ("dense_layers", (0,), "a layer of dense_layers must be an integer of at least 1, got 0."),
        ("dense_layers", (True,), "a layer of dense_layers must be an integer of at least 1, got True."),
        ("dense_layers", (4.0,), "a layer of dense_layers must be an integer of at least 1, got 4.0."),
        ("dense_layers", ("2",), "a layer of dense_layers must be an integer of at least 1, got '2'."),
        ("dense_layers", (2, 3, 2), "dense_layers must be layer numbers that differ, got \\(2, 3, 2\\)."),
        ("estimator", 3, "estimator must be one of last_window, probe_windows, got 3."),
        ("estimator", "lucky", "estimator must be one of .*, got 'lucky'. Register one of your own first, with ESTIM"),
        (
            "budget",
            "lucky",
            "budget must be one of cost, top_p, fixed, top_p_literal, got 'lucky'. Register one of your own",
        ),
    ],
)
def test_a_field_out_of_range_is_refused(field, value, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        MTrainingConfig(**{field: value})


_INTEGERS = [field.name for field in fields(MTrainingConfig) if field.type == "int"]


@pytest.mark.parametrize("value", [True, False, 64.0, "64", None, np.bool_(True), np.float64(64)])
def test_no_integer_field_takes_a_bool_a_float_or_a_text(value):
    assert len(_INTEGERS) > 10
    for name in _INTEGERS:
        with pytest.raises(ValueError, match=f"^{name} must be an integer of at least [01], got "):
            MTrainingConfig(**{name: value})


def test_numbers_of_numpy_are_numbers():
    config = MTrainingConfig(num_probe_rows=np.int64(128), dense_layers=[np.int32(2)], slash_top_p=np.float32(0.5))
    assert config == MTrainingConfig(num_probe_rows=128, dense_layers=(2,), slash_top_p=0.5)
    assert repr(config) == repr(MTrainingConfig(num_probe_rows=128, dense_layers=(2,), slash_top_p=0.5))


_LISTS = VerticalSlashIndex.from_lists([[[3]]], [[[0]]], seq_len=64)
_SIZES = {
    "seq_len": lambda size: SequenceLayout("striped", seq_len=size, cp_size=1),
    "cp_size": lambda size: SequenceLayout("striped", seq_len=512, cp_size=size),
    "block_size": lambda size: SequenceLayout("striped", seq_len=512, cp_size=2, block_size=size),
    "node_size": lambda size: SequenceLayout("node_striped", seq_len=512, cp_size=2, node_size=size),
    "cp_rank": lambda size: token_positions(SequenceLayout("striped", seq_len=512, cp_size=2), cp_rank=size),
    "inner_size": lambda size: inner_and_outer_ranks(range(4), inner_size=size),
    "world_size": lambda size: ThreadHub(size, timeout=1.0),
    "index.block_size": lambda size: VerticalSlashIndex(*_LISTS.tensors, block_size=size),
    "index.chunk_blocks": lambda size: BlockListIndex.from_lists([[[[0]]]], chunk_blocks=size),
    "an entry of vertical": lambda size: VerticalSlashIndex.from_lists([[[size]]], [[[0]]], seq_len=64),
    "an entry of slash": lambda size: VerticalSlashIndex.from_lists([[[]]], [[[0, size]]], seq_len=512),
    "an entry of chunks": lambda size: BlockListIndex.from_lists([[[[size]]]]),
}


@pytest.mark.parametrize("name", _SIZES)
def test_no_size_takes_a_bool_or_a_float(name):
    for value in (True, 1.0, "1"):
        with pytest.raises(ValueError, match=f"^{re.escape(name)} must be .*, got {value!r}"):
            _SIZES[name](value)
    assert _SIZES[name](np.int64(1)) is not None


def test_probe_windows_need_rows_that_divide():
    with pytest.raises(ValueError, match="^num_probe_rows must be a multiple of num_probe_windows, got 512 and 7."):
        MTrainingConfig(num_probe_windows=7)
    assert MTrainingConfig(estimator="last_window", num_probe_rows=7).num_probe_rows == 7


def test_runs_belong_to_the_budgets_that_read_them():
    with pytest.raises(
        ValueError, match="^unsupported: slash_run_length above 1 with budget cost. Set slash_run_length"
    ):
        MTrainingConfig(slash_run_length=2)
    for budget in ("top_p", "fixed"):
        rule = "max_slash must be 0 or at least slash_run_length = 121, got 120."
        with pytest.raises(ValueError, match=f"^{rule}"):
            MTrainingConfig(budget=budget, slash_run_length=121)
    assert MTrainingConfig(budget="top_p_literal", slash_run_length=121).unused == ("slash_run_length",)


def test_algorithm_1_is_that_of_the_paper_with_changes():
    config = MTrainingConfig.algorithm_1(layout="zigzag", max_slash=7)
    assert (config.budget, config.estimator, config.num_probe_rows) == ("top_p", "last_window", 64)
    assert (config.vertical_top_p, config.slash_top_p) == (0.5, 0.8)
    assert (config.sink_tokens, config.local_blocks) == (128, 8)
    assert (config.max_vertical, config.max_slash, config.layout) == (1024, 7, "zigzag")
    assert config.unused == ()


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"pattern": "moba", "max_vertical": 3, "moba_top_k": 3}, ("max_vertical",)),
        ({"pattern": "moba", "slash_run_length": 200}, ("slash_run_length",)),
        ({"pattern": "xattention", "xattention_stride": 8, "estimator": "last_window"}, ("estimator",)),
        ({"pattern": "dense", "xattention_stride": 8, "num_probe_rows": 32}, ("num_probe_rows", "xattention_stride")),
        ({"moba_top_k": 3, "max_vertical": 3}, ("max_vertical", "moba_top_k")),
        ({"budget": "top_p", "max_vertical": 3, "target_recall": 0.5}, ("target_recall",)),
        ({"budget": "fixed", "max_slash": 3, "slash_top_p": 0.1, "dense_above": 1}, ("dense_above", "slash_top_p")),
        ({"budget": "top_p_literal", "sink_tokens": 3, "slash_top_p": 0.1}, ("sink_tokens",)),
        ({"num_probe_windows": 4, "estimator": "last_window"}, ("num_probe_windows",)),
        ({"num_probe_windows": 4, "target_recall": 0.5, "max_density": 0.1, "dense_above": 0.2}, ()),
    ],
)
def test_what_is_set_and_not_read_is_known(options, unused):
    assert MTrainingConfig(**options).unused == unused


def test_the_sentence_of_a_field_names_the_pattern_that_reads_it():
    docs = _field_docs()
    for pattern in PATTERNS:
        named = {name for name, sentence in docs.items() if sentence.startswith(f"``{pattern}``")}
        assert named == {each.name for each in fields(MTrainingConfig) if each.metadata.get("pattern") == pattern}


def test_the_sentence_of_a_field_names_the_budgets_that_read_it():
    """In brackets; a sentence without brackets is for all. The paper's listing is described once, in its class."""
    docs, shipped = _field_docs(), ("cost", "top_p", "fixed")
    for name in BUDGETS.fields:
        readers = {budget for budget in shipped if name in BUDGETS.get(budget).reads}
        named = re.match(r"``vertical_slash``(?: \((.*?)\))?:", docs[name])[1]
        assert readers == (set(shipped) if named is None else set(re.findall(r"\w+", named)))


def test_copies_are_equal():
    config = MTrainingConfig(dense_layers=[1, 3], num_probe_rows=128)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert config.dense_layers == (1, 3)


def test_an_index_can_be_compared_and_put_into_a_set():
    index = VerticalSlashIndex.from_lists([[[3]]], [[[0]]], seq_len=64)
    assert index == index and index != copy.deepcopy(index)
    assert len({index, index}) == 1
