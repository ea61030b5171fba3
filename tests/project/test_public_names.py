"""The public surface: these names, no more and no fewer, each documented."""

from __future__ import annotations

import inspect

import pytest

import megatron_mtraining

PUBLIC = {
    "AttentionOutput",
    "BlockListIndex",
    "MTrainingConfig",
    "RingGroups",
    "SequenceLayout",
    "VerticalSlashIndex",
    "gather_sequence",
    "merge_partials",
    "select",
    "shard_sequence",
    "sparse_attention",
    "token_positions",
}

REQUIRED = inspect.Parameter.empty
OF_CALLS = dict.fromkeys(("softmax_scale", "layout", "groups", "cu_seqlens", "num_valid"))

KEYWORDS = {
    "select": OF_CALLS,
    "sparse_attention": {"index": None} | OF_CALLS,
    "merge_partials": {},
    "shard_sequence": {"cp_rank": REQUIRED, "dim": REQUIRED},
    "gather_sequence": {"dim": REQUIRED},
    "token_positions": {"cp_rank": REQUIRED},
    "SequenceLayout": {"seq_len": REQUIRED, "cp_size": REQUIRED, "block_size": 64, "node_size": None},
    "RingGroups": {"cp": REQUIRED} | dict.fromkeys(("inner", "outer", "inner_gradient", "outer_gradient")),
}
"""Arguments that callers write by name, and their defaults."""

POSITIONAL = {
    "select": ["query", "key", "config"],
    "sparse_attention": ["query", "key", "value", "config"],
    "merge_partials": ["a", "b"],
    "shard_sequence": ["tensor", "layout"],
    "gather_sequence": ["parts", "layout"],
    "token_positions": ["layout"],
    "SequenceLayout": ["kind"],
    "RingGroups": [],
}


def test_all_names_exactly_the_public_surface():
    assert set(megatron_mtraining.__all__) == PUBLIC
    assert len(megatron_mtraining.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_public_name_is_documented(name):
    documented = getattr(megatron_mtraining, name)
    assert len(inspect.getdoc(documented) or "") > 40


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_signatures_are_pinned(name):
    parameters = inspect.signature(getattr(megatron_mtraining, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == POSITIONAL[name]
    assert keywords == KEYWORDS[name]


def test_the_configuration_is_frozen_and_takes_names_only():
    parameters = inspect.signature(megatron_mtraining.MTrainingConfig).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(p.default is not REQUIRED for p in parameters)
    with pytest.raises(AttributeError):
        megatron_mtraining.MTrainingConfig().num_probe_rows = 8


@pytest.mark.parametrize("name", sorted(set(POSITIONAL) - {"SequenceLayout", "RingGroups"}))
def test_docstrings_say_what_is_taken_given_back_and_refused(name):
    function = getattr(megatron_mtraining, name)
    doc, parameters = inspect.getdoc(function), inspect.signature(function).parameters
    assert "\nReturns:\n" in doc and "\nRaises:\n" in doc
    if name not in REFERS:
        missing = [each for each in parameters if f"\n    {each}: " not in doc]
        assert "\nArgs:\n" in doc and not missing


REFERS = {"select"}
"""Whose arguments another docstring describes."""
