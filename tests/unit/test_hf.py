"""Sparse attention inside transformers: random tiny models against transformers' own attention."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from megatron_mtraining import MTrainingConfig, hf, sparse_attention  # noqa: E402
from megatron_mtraining.hf import attention  # noqa: E402
from megatron_mtraining.hf.documents import text_spans  # noqa: E402

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
EVERY_KEY = MTrainingConfig(dense_below=0, sink_tokens=1024)
"""Every key of a short text is a sink, so the sparse path computes dense attention."""
SPARSE = MTrainingConfig(dense_below=0, sink_tokens=4, local_blocks=1, budget="fixed", max_vertical=8, max_slash=0)

BASE_1E6 = {"rope_type": "default", "rope_theta": 1e6}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2.5": Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=False, rope_parameters=BASE_1E6),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "gemma": GemmaConfig(**SIZES, head_dim=32),
}
"""Models that differ in biases, norms of queries and keys, head_dim and scale; attention is causal in all."""
CAPPED = Gemma2Config(
    **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=64, attn_logit_softcapping=0.5, pad_token_id=0
)
WINDOWED = MistralConfig(**SIZES, sliding_window=64)


@pytest.fixture(params=MODELS)
def model(request):
    return random_model(MODELS[request.param])


@pytest.fixture
def llama():
    return random_model(MODELS["llama"])


def random_model(config: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(config)).double().eval()


def tokens(batch: int = 1, seq: int = 200) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(1))


def gradients(model: torch.nn.Module, **inputs: object) -> list[torch.Tensor]:
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_every_key_selected_is_dense_attention(model):
    ids = tokens(batch=2)
    expected = model(ids).logits, gradients(model, input_ids=ids)
    hf.configure(model, EVERY_KEY)
    seen = hf.LayerMetrics()
    with hf.observe(seen):
        logits = model(ids).logits
    assert seen.density == {1: 1.0, 2: 1.0}
    torch.testing.assert_close(logits, expected[0])
    torch.testing.assert_close(gradients(model, input_ids=ids), expected[1])


def test_prefill_is_sparse_attention(llama):
    """The output of a layer is that of the call with the keys and queries that the layer was given."""
    hf.configure(llama, SPARSE)
    calls, outputs = [], []
    llama.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    attention = llama.model.layers[0].self_attn
    values = []
    attention.v_proj.register_forward_hook(lambda _, __, output: values.append(output))
    with hf.observe(calls.append):
        llama(tokens(seq=300))
    call = calls[0]
    expected = sparse_attention(call.query, call.key, values[0].view(1, 300, 1, 16), SPARSE).out
    torch.testing.assert_close(outputs[0], expected.flatten(2))
    assert 0 < call.density.mean() < 0.5


def test_decoding_and_chunks_of_a_prefill_are_dense(llama, caplog):
    ids = tokens()
    expected = llama(ids).logits
    hf.configure(llama, EVERY_KEY)
    attention._log_once.cache_clear()
    cache = llama(ids[:, :128], use_cache=True).past_key_values
    seen = hf.LayerMetrics()
    with hf.observe(seen):
        chunk = llama(ids[:, 128:199], past_key_values=cache, use_cache=True)
        last = llama(ids[:, 199:], past_key_values=cache, use_cache=True)
    assert not seen.density
    assert sum("chunks of a prefill" in record.message for record in caplog.records) == 1
    torch.testing.assert_close(torch.cat([chunk.logits, last.logits], 1), expected[:, 128:])


def test_generation_with_every_key_is_that_of_dense_attention(model):
    """A batch of unequal lengths, padded on the left, its prefill whole or in chunks: text as sdpa's one by one."""
    ids = tokens(batch=2, seq=130).clamp(min=1)  # without a mask generate would mask token 0, the padding
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    options = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    alone = [ids[i : i + 1, is_text] for i, is_text in enumerate(mask.bool())]
    expected = torch.cat([model.generate(each, **options)[:, -5:] for each in alone])
    hf.configure(model, EVERY_KEY)
    seen = hf.LayerMetrics()
    with hf.observe(seen):
        assert model.generate(ids, attention_mask=mask, **options)[:, -5:].equal(expected)
    assert seen.density == {1: 1.0, 2: 1.0}
    chunks = {"prefill_chunk_size": 48, "cache_implementation": "static", "disable_compile": True}
    assert model.generate(ids, attention_mask=mask, **chunks, **options)[:, -5:].equal(expected)
    assert model.generate(alone[0], cache_implementation="static", **options)[:, -5:].equal(expected[:1])


@pytest.mark.parametrize("config", [EVERY_KEY, SPARSE], ids=["every key", "sparse"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_unequal_lengths_equals_one_by_one(llama, side, config):
    """Whatever the padding: lists are chosen, and blocks counted, as for the text alone."""
    hf.configure(llama, config)
    ids, mask = tokens(batch=3, seq=300), torch.ones(3, 300, dtype=torch.long)
    for row, padding in enumerate((0, 70, 171)):
        mask[row, slice(0, padding) if side == "left" else slice(300 - padding, 300)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = llama(ids, attention_mask=mask, position_ids=positions).logits
    assert logits.isfinite().all()
    for row, is_text in enumerate(mask.bool()):
        torch.testing.assert_close(logits[row, is_text], llama(ids[row : row + 1, is_text]).logits[0])


def test_a_left_padded_batch_generates_as_one_by_one(llama):
    hf.configure(llama, SPARSE)
    ids, mask = tokens(batch=2), torch.ones(2, 200, dtype=torch.long)
    mask[1, :70] = 0
    options = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    generated = llama.generate(ids, attention_mask=mask, **options)[:, 200:]
    for row, is_text in enumerate(mask.bool()):
        assert llama.generate(ids[row : row + 1, is_text], **options)[0, -5:].equal(generated[row])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("config", "reason"), [(CAPPED, "softcap"), (WINDOWED, "window")], ids=["capped", "windowed"])
def test_layers_with_windows_or_caps_run_the_own_attention_of_the_model(config, reason, cache, caplog):
    model = random_model(config)
    model.set_attn_implementation("eager")
    ids, options = tokens(), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model(ids).logits, model.generate(ids, **options)
    hf.configure(model, SPARSE)
    attention._log_once.cache_clear()
    torch.testing.assert_close(model(ids).logits, expected[0])
    assert model.generate(ids, cache_implementation=cache, **options).equal(expected[1])
    padded, mask = torch.cat([torch.zeros_like(ids[:, :70]), ids], 1), (torch.arange(270) >= 70).long()[None]
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 70:], expected[0])
    assert sum(reason in record.message for record in caplog.records) == 1


def test_a_window_that_hides_no_key_is_sparse():
    model = random_model(WINDOWED)
    hf.configure(model, SPARSE)
    seen = hf.LayerMetrics()
    with hf.observe(seen):
        model(tokens(seq=64))
    assert set(seen.density) == {1, 2}


def test_packed_documents(llama):
    ids = tokens(seq=200)
    positions = torch.cat([torch.arange(70), torch.arange(130)])[None]
    expected = torch.cat([llama(ids[:, :70]).logits, llama(ids[:, 70:]).logits], 1)
    hf.configure(llama, EVERY_KEY)
    torch.testing.assert_close(llama(ids, position_ids=positions, use_cache=False).logits, expected)


def test_recomputation_selects_the_same_keys(llama):
    hf.configure(llama, SPARSE)
    ids = tokens(seq=300)
    expected = gradients(llama, input_ids=ids)
    llama.train()
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    seen = []
    with hf.observe(seen.append):
        recomputed = gradients(llama, input_ids=ids)
    assert all(map(torch.equal, recomputed, expected))
    assert [call.layer for call in seen] == [1, 2]


def test_autocast(llama):
    """Rotary embedding promotes queries and keys; attention takes the autocast dtype for all."""
    llama.float()
    ids = tokens(seq=300)
    hf.configure(llama, SPARSE)
    seen = []
    with torch.autocast("cpu", torch.bfloat16), hf.observe(seen.append):
        llama(ids)
    assert {call.query.dtype for call in seen} == {torch.bfloat16}


def test_observed_density_and_recall(llama):
    for config in (SPARSE, MTrainingConfig(pattern="moba", moba_chunk=64, moba_top_k=2, dense_below=0)):
        hf.configure(llama, config)
        seen = hf.LayerMetrics(rows=(250, 299))
        with hf.observe(seen):
            llama(tokens(batch=2, seq=300))
        for layer in (1, 2):
            assert 0 < seen.density[layer] < 1
            assert seen.recall[layer].shape == (3,)
            assert (seen.recall[layer] > 0).all() and (seen.recall[layer] < 1).all()


def test_dense_layers_are_counted_from_one(llama):
    hf.configure(llama, MTrainingConfig(pattern="vertical_slash", dense_layers=(2,), **_fields(SPARSE)))
    seen = hf.LayerMetrics(rows=(299,))
    with hf.observe(seen):
        llama(tokens(seq=300))
    assert seen.density[1] < 1 and seen.density[2] == 1
    assert seen.recall[2].eq(1).all()


def _fields(config: MTrainingConfig) -> dict[str, object]:
    names = ("dense_below", "sink_tokens", "local_blocks", "budget", "max_vertical", "max_slash")
    return {name: getattr(config, name) for name in names}


def test_configuration_is_saved_with_the_model(llama, tmp_path):
    hf.configure(llama, SPARSE)
    ids = tokens(seq=300)
    expected = llama(ids).logits
    llama.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="mtraining").eval()
    assert loaded.config.mtraining == {name: value for name, value in _fields(SPARSE).items()}
    torch.testing.assert_close(loaded(ids).logits, expected)


def causal_mask(seq: int) -> torch.Tensor:
    return torch.ones(1, 1, seq, seq, dtype=torch.bool).tril()


def test_texts_of_masks():
    mask = causal_mask(6)
    assert text_spans(mask, 6) == (((0, 6),),)
    padded = causal_mask(6)
    padded[..., 4:] = False  # on the right: rows 4 and 5 still see the text
    assert text_spans(padded, 6) == (((0, 4),),)
    left = causal_mask(6)
    left[..., :2] = False
    packed = causal_mask(6)
    packed[..., 3:, :3] = False
    assert text_spans(torch.cat([left, packed]), 6) == (((2, 6),), ((0, 3), (3, 6)))


@pytest.mark.parametrize("change", ["window", "future", "hole", "additive"])
def test_other_masks_raise(change):
    mask = causal_mask(6)
    if change == "window":
        mask &= torch.ones(6, 6, dtype=torch.bool).triu(-2)
    elif change == "future":
        mask[..., 1, 2] = True
    elif change == "hole":
        mask[..., 5, 3] = False
    else:
        mask = mask.double()
    with pytest.raises(ValueError, match="unsupported: attn_implementation='mtraining' with an attention mask"):
        text_spans(mask, 6)


def test_dropout_raises():
    model = random_model(Qwen2Config(**SIZES, attention_dropout=0.1)).train()
    hf.configure(model, SPARSE)
    with pytest.raises(ValueError, match="unsupported: attn_implementation='mtraining' with attention_dropout"):
        model(tokens(), use_cache=False)


def test_configurations_that_raise(llama):
    with pytest.raises(ValueError, match="unsupported: dense_warmup_steps with Hugging Face models"):
        hf.configure(llama, MTrainingConfig(dense_warmup_steps=10))
    with pytest.raises(ValueError, match="config must be an MTrainingConfig"):
        hf.configure(llama, {"target_recall": 0.9})


def test_import_without_transformers_names_the_extra():
    script = "import sys; sys.modules['transformers'] = None\nimport megatron_mtraining.hf"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'megatron-mtraining[hf]'" in run.stderr.splitlines()[-1]
