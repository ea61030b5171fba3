"""The model: weights of a fetched folder or of a Hugging Face folder, with positions stretched by YaRN."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_mtraining import hf
from megatron_mtraining.errors import invalid

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
}
"""Parameters of transformers by their names in GGUF."""


def load_tokenizer(cache: Path) -> object:
    """Return the tokenizer of the fetched weights."""
    return AutoTokenizer.from_pretrained(cache / "weights", gguf_file=GGUF)


def model_folder(cache: Path) -> Path:
    """Return the Hugging Face folder of the fetched weights, bfloat16; made of the GGUF file on first use.

    Raises:
        ValueError: nothing was fetched, or the package that reads the file is not installed.
    """
    folder = cache / "model"
    if (folder / "config.json").exists():
        return folder
    if not (cache / "weights" / GGUF).exists():
        remedy = f"Run: python -m examples.real_model fetch --cache {cache}"
        raise invalid("--cache", f"a folder with weights/{GGUF}", cache, remedy)
    load_gguf(cache / "weights" / GGUF, wheels=cache / "wheels").to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(cache).save_pretrained(folder)
    return folder


def load_gguf(path: Path, *, wheels: Path) -> LlamaForCausalLM:
    """Return the Llama of a GGUF file, dequantised, in float32.

    transformers has such a loader, which needs the package accelerate as well.

    Raises:
        ValueError: the package that reads the file is not installed; ``wheels`` has it.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        remedy = f"Run: pip install --no-index --no-deps {wheels}/gguf-*.whl"
        raise invalid("gguf", "installed to read the weights", "nothing", remedy) from None
    reader = GGUFReader(path)

    def field(name: str) -> object:
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        *layer, name, _ = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        if name in heads:  # GGUF interleaves the halves that rotate together
            weight = weight.view(heads[name], -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        weights[f"model.layers.{layer[1]}.{NAMES[name]}" if layer else NAMES[name]] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def load_model(folder: Path | None, *, length: int, device: str, seed: int = 0) -> nn.Module:
    """Return the model for texts of ``length`` tokens, its weights in float32, with this package's attention.

    Args:
        folder: a Hugging Face folder; None for a tiny model of random weights.
        length: tokens; positions beyond those of the checkpoint are stretched by YaRN.
        device: where it runs.
        seed: of the random weights.
    """
    if folder is None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            attn_implementation=hf.NAME,
        )
        hf.stretch_positions(config, length)
        return LlamaForCausalLM(config).to(device)
    config = AutoConfig.from_pretrained(folder)
    hf.stretch_positions(config, length)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=hf.NAME
    )
    return model.to(device)
