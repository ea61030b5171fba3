"""Replacing the core attention of a spec: the right ones, all of them, in a copy."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_mtraining.megatron import (
    MTrainingCoreAttention,
    get_mtraining_layer_local_spec,
    replace_core_attention,
)

from .split import fresh_process
from .test_unsupported import start, transformer_config


def attention(node: Any) -> Any:
    """The core attention of a layer spec's self attention."""
    return node.submodules.self_attention.submodules.core_attention


def self_attention(mask: AttnMaskType) -> ModuleSpec:
    submodules = SelfAttentionSubmodules(linear_qkv=None, core_attention=DotProductAttention, linear_proj=None)
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": mask}, submodules=submodules)


def test_the_local_spec_differs_in_its_attention_only():
    stock, sparse = get_gpt_layer_local_spec(qk_layernorm=True), get_mtraining_layer_local_spec(qk_layernorm=True)
    assert attention(sparse) is MTrainingCoreAttention
    sparse.submodules.self_attention.submodules.core_attention = attention(stock)
    assert sparse.submodules.self_attention == stock.submodules.self_attention
    others = [
        field.name for field in dataclasses.fields(stock.submodules) if field.name not in ("self_attention", "mlp")
    ]
    assert all(getattr(sparse.submodules, name) == getattr(stock.submodules, name) for name in others)


def test_the_original_is_left_alone():
    stock = get_gpt_layer_local_spec()
    before = copy.deepcopy(stock)
    replaced = replace_core_attention(stock)
    assert replaced.num_replaced == 1
    assert attention(stock) is DotProductAttention
    assert stock.submodules.self_attention == before.submodules.self_attention
    assert replaced.spec.submodules.mlp is stock.submodules.mlp


def test_every_layer_of_a_block_is_counted():
    layer = get_gpt_layer_local_spec()
    replaced = replace_core_attention([layer, layer, {"not": "a spec"}, None])
    assert replaced.num_replaced == 2
    assert all(attention(spec) is MTrainingCoreAttention for spec in replaced.spec[:2])


def test_partials_are_searched():
    submodules = self_attention(AttnMaskType.causal).submodules
    builder = functools.partial(SelfAttention, submodules=submodules, attn_mask_type=AttnMaskType.causal)
    replaced = replace_core_attention(builder)
    assert replaced.spec.keywords["submodules"].core_attention is MTrainingCoreAttention
    assert submodules.core_attention is DotProductAttention


def cross_attention() -> ModuleSpec:
    submodules = CrossAttentionSubmodules(
        linear_q=None, linear_kv=None, core_attention=DotProductAttention, linear_proj=None
    )
    return ModuleSpec(module=CrossAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def test_attentions_that_keep_their_own_are_named():
    kept = [cross_attention(), self_attention(AttnMaskType.padding), self_attention(AttnMaskType.no_mask)]
    replaced = replace_core_attention([*kept, self_attention(AttnMaskType.causal)])
    assert replaced.num_replaced == 1
    assert all(new is old for new, old in zip(replaced.spec, kept, strict=False))
    assert replaced.others == (
        "CrossAttention with attn_mask_type=causal",
        "SelfAttention with attn_mask_type=padding",
        "SelfAttention with attn_mask_type=no_mask",
    )
    assert replace_core_attention(get_gpt_layer_local_spec()).others == ()


def build_sparse(spec: ModuleSpec, cp_size: int) -> Any:
    """The core attention of a replaced self attention, as Megatron builds it."""
    return spec.submodules.core_attention(
        config=transformer_config(cp_size=cp_size),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )


@pytest.mark.parametrize("replace_first", [True, False], ids=["spec-first", "initialize-first"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_attentions_that_keep_their_own_need_megatrons_split(
    replace_first: bool, times: int, monkeypatch: pytest.MonkeyPatch
):
    """A wrong mask otherwise; a model is refused whether the spec or initialize() came first."""

    def replaced() -> ModuleSpec:
        spec = [cross_attention(), self_attention(AttnMaskType.padding), self_attention(AttnMaskType.causal)]
        for _ in range(times):
            spec = replace_core_attention(spec).spec
        return spec[2]

    spec = replaced() if replace_first else None
    start(monkeypatch, cp_size=2)
    spec = spec or replaced()
    sentence = (
        "spec must be of causal self attentions only with layout=striped on 2 ranks, got CrossAttention with "
        "attn_mask_type=causal, SelfAttention with attn_mask_type=padding beside them. "
        "Use layout=zigzag, which is Megatron's own split, or one context-parallel rank."
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build_sparse(spec, cp_size=2)
    start(monkeypatch, cp_size=2, layout="zigzag")
    assert isinstance(build_sparse(spec, cp_size=2), MTrainingCoreAttention)
    start(monkeypatch)
    assert isinstance(build_sparse(spec, cp_size=1), MTrainingCoreAttention)


def test_a_spec_with_others_cannot_be_built_before_initialize(monkeypatch: pytest.MonkeyPatch):
    fresh_process(monkeypatch)
    spec = replace_core_attention([cross_attention(), self_attention(AttnMaskType.causal)]).spec[1]
    with pytest.raises(RuntimeError, match="initialize must be called before a model is built"):
        build_sparse(spec, cp_size=1)


@pytest.mark.parametrize("spec", [self_attention(AttnMaskType.padding), ModuleSpec(module=SelfAttention), []])
def test_a_spec_without_causal_self_attention_is_refused(spec: Any):
    with pytest.raises(ValueError, match="spec must be one with a causal self attention"):
        replace_core_attention(spec)


def test_multi_latent_attention_is_refused():
    with pytest.raises(ValueError, match="multi_latent_attention must be False"):
        replace_core_attention(get_gpt_layer_local_spec(multi_latent_attention=True))


def test_a_latent_attention_that_a_hybrid_stack_only_lists_is_left_alone():
    layers = [get_gpt_layer_local_spec(), latent := get_gpt_layer_local_spec(multi_latent_attention=True)]
    replaced = replace_core_attention(layers)
    assert (replaced.num_replaced, replaced.others) == (1, ())
    assert replaced.spec[1] is latent
