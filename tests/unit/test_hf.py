"""Sparse attention inside transformers: random tiny models against transformers' own attention."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from megatron_mtraining import MTrainingConfig, hf, sparse_attention  # noqa: E402
from megatron_mtraining.hf.documents import document_bounds  # noqa: E402

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

MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


@pytest.fixture(params=MODELS)
def model(request):
    config, of_config = MODELS[request.param]
    torch.manual_seed(0)
    return of_config(config(**SIZES)).double().eval()


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()


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


def test_decoding_and_chunks_of_a_prefill_are_dense(llama):
    ids = tokens()
    expected = llama(ids).logits
    hf.configure(llama, EVERY_KEY)
    cache = llama(ids[:, :128], use_cache=True).past_key_values
    seen = hf.LayerMetrics()
    with hf.observe(seen):
        chunk = llama(ids[:, 128:199], past_key_values=cache, use_cache=True)
        last = llama(ids[:, 199:], past_key_values=cache, use_cache=True)
    assert not seen.density
    torch.testing.assert_close(torch.cat([chunk.logits, last.logits], 1), expected[:, 128:])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(llama, cache):
    ids, options = tokens(seq=130), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = llama.generate(ids, **options)
    hf.configure(llama, EVERY_KEY)
    seen = hf.LayerMetrics()
    with hf.observe(seen):
        assert llama.generate(ids, cache_implementation=cache, **options).equal(expected)
    assert set(seen.density) == {1, 2}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prefill(llama, side):
    ids, mask = tokens(batch=2), torch.ones(2, 200, dtype=torch.long)
    mask[1, slice(0, 70) if side == "left" else slice(130, 200)] = 0
    expected = llama(ids, attention_mask=mask).logits
    hf.configure(llama, EVERY_KEY)
    logits = llama(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


def test_padding_does_not_change_the_keys_that_are_selected(llama):
    hf.configure(llama, SPARSE)
    ids = tokens(seq=256)
    alone = llama(ids).logits
    padded = torch.cat([ids, torch.zeros(1, 64, dtype=torch.long)], 1)
    mask = (torch.arange(320) < 256).long()[None]
    torch.testing.assert_close(llama(padded, attention_mask=mask).logits[:, :256], alone)


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


def test_bounds_of_masks():
    mask = causal_mask(6)
    assert document_bounds(mask, 6) == ((0, 6),)
    padded = causal_mask(6)
    padded[..., 4:] = False  # on the right: rows 4 and 5 still see the text
    assert document_bounds(padded, 6) == ((0, 4, 6),)
    left = causal_mask(6)
    left[..., :2] = False
    packed = causal_mask(6)
    packed[..., 3:, :3] = False
    assert document_bounds(torch.cat([left, packed]), 6) == ((0, 2, 6), (0, 3, 6))


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
        document_bounds(mask, 6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"attention_dropout": 0.1}, "attention_dropout"), ({"sliding_window": 8}, "sliding_window")],
)
def test_other_attention_raises(changes, named):
    sizes = SIZES | changes
    if "sliding_window" in changes:
        sizes |= {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).train()
    hf.configure(model, SPARSE)
    with pytest.raises(ValueError, match=f"unsupported: attn_implementation='mtraining' with {named}"):
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
