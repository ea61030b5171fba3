"""The configuration refuses what it cannot mean, and survives being copied and sent."""

from __future__ import annotations

import copy
import pickle

import pytest

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.arguments import _field_docs
from megatron_mtraining.config import _READ_BY, PATTERNS


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        (
            "layout",
            "diagonal",
            "layout must be one of contiguous, zigzag, striped, rotated, node_striped, got 'diagonal'.",
        ),
        ("schedule", "spiral", "schedule must be one of hierarchical, flat, gather, got 'spiral'."),
        ("backend", "tpu", "backend must be one of auto, reference, cuda, got 'tpu'."),
        ("index_sharing", "kv", "index_sharing must be one of head, kv_group, got 'kv'."),
        ("vertical_top_p", 0.0, "vertical_top_p must be in \\(0, 1\\], got 0.0."),
        ("slash_top_p", 1.5, "slash_top_p must be in \\(0, 1\\], got 1.5."),
        ("slash_top_p", True, "slash_top_p must be in \\(0, 1\\], got True."),
        ("slash_top_p", "0.5", "slash_top_p must be in \\(0, 1\\], got '0.5'."),
        ("window", 0, "window must be an integer of at least 1, got 0."),
        ("local_blocks", 0, "local_blocks must be an integer of at least 1, got 0."),
        ("slash_run_length", 0, "slash_run_length must be an integer of at least 1, got 0."),
        ("slash_run_length", 121, "max_slash must be 0 or at least slash_run_length = 121, got 120."),
        ("max_vertical", 2.5, "max_vertical must be an integer of at least 0, got 2.5."),
        ("sink_tokens", True, "sink_tokens must be an integer of at least 0, got True."),
        ("dense_layers", 3, "dense_layers must be a tuple of layer numbers, got 3."),
        ("dense_layers", (0,), "dense_layers must be layer numbers of at least 1, got \\(0,\\)."),
    ],
)
def test_a_field_out_of_range_is_refused(field, value, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        MTrainingConfig(**{field: value})


def test_probe_windows_need_rows_that_divide():
    with pytest.raises(ValueError, match="^window must be a multiple of num_probe_windows, got 64 and 7."):
        MTrainingConfig(estimator="probe_windows", num_probe_windows=7)


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"pattern": "moba", "max_vertical": 3, "moba_top_k": 3}, ("max_vertical",)),
        ({"pattern": "moba", "slash_run_length": 200}, ("slash_run_length",)),
        ({"pattern": "xattention", "xattention_stride": 8, "estimator": "mine"}, ("estimator",)),
        ({"pattern": "dense", "xattention_stride": 8, "window": 32}, ("window", "xattention_stride")),
        ({"moba_top_k": 3, "max_vertical": 3}, ("moba_top_k",)),
        ({"num_probe_windows": 4}, ("num_probe_windows",)),
        ({"num_probe_windows": 4, "estimator": "probe_windows"}, ()),
    ],
)
def test_what_is_set_and_not_read_is_known(options, unused):
    assert MTrainingConfig(**options).unused == unused


def test_the_sentence_of_a_field_says_which_pattern_reads_it():
    docs = _field_docs()
    for pattern in PATTERNS:
        says_so = {name for name, sentence in docs.items() if sentence.startswith(f"``{pattern}``:")}
        assert says_so == set(_READ_BY.get(pattern, ()))


def test_copies_are_equal():
    config = MTrainingConfig(dense_layers=[1, 3], window=32)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert config.dense_layers == (1, 3)


def test_an_index_can_be_compared_and_put_into_a_set():
    index = VerticalSlashIndex.from_lists([[[3]]], [[[0]]], seq_len=64)
    assert index == index and index != copy.deepcopy(index)
    assert len({index, index}) == 1
