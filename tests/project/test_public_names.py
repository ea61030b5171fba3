"""The public surface: these names, no more and no fewer, each documented."""

from __future__ import annotations

import inspect

import pytest

import megatron_mtraining

PUBLIC = {
    "BlockListIndex",
    "MTrainingConfig",
    "SequenceLayout",
    "VerticalSlashIndex",
    "gather_sequence",
    "merge_partials",
    "ring_attention",
    "select_dense",
    "select_index",
    "select_moba",
    "select_vertical_slash",
    "select_xattention",
    "shard_sequence",
    "token_positions",
    "vertical_slash_attention",
}

SELECTIONS = ("dense", "index", "moba", "vertical_slash", "xattention")

KEYWORDS = {
    **{f"select_{name}": {"softmax_scale", "layout", "cp_group", "cu_seqlens"} for name in SELECTIONS},
    "vertical_slash_attention": {"softmax_scale", "cu_seqlens", "deterministic", "backend"},
    "ring_attention": {
        "layout",
        "cp_group",
        "inner_group",
        "outer_group",
        "schedule",
        "softmax_scale",
        "cu_seqlens",
        "deterministic",
        "backend",
    },
    "shard_sequence": {"cp_rank", "dim"},
    "gather_sequence": {"dim"},
    "token_positions": {"cp_rank"},
}
"""Arguments that callers write by name."""

POSITIONAL = {
    **{f"select_{name}": ["query", "key", "config"] for name in SELECTIONS},
    "vertical_slash_attention": ["query", "key", "value", "index"],
    "ring_attention": ["query", "key", "value", "index"],
    "shard_sequence": ["tensor", "layout"],
    "gather_sequence": ["parts", "layout"],
    "token_positions": ["layout"],
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
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert positional == POSITIONAL[name]
    assert keywords >= KEYWORDS[name]
