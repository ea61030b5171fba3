"""The model: weights of a fetched folder or of a Hugging Face folder, with positions stretched by YaRN."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_mtraining import hf
from megatron_mtraining.errors import invalid

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    try:
        model = AutoModelForCausalLM.from_pretrained(cache / "weights", gguf_file=GGUF, dtype=torch.float32)
    except ImportError as error:
        remedy = f"Run: pip install --no-index --no-deps {cache}/wheels/gguf-*.whl"
        raise invalid("gguf", "installed to read the weights", str(error).splitlines()[0], remedy) from None
    # Entries of a quantised model keep transformers from saving it.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.is_quantized, model.hf_quantizer = False, None
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


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
        return LlamaForCausalLM(stretched(config, length)).to(device)
    config = stretched(AutoConfig.from_pretrained(folder), length)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=hf.NAME
    )
    return model.to(device)


def stretched(config: LlamaConfig, length: int) -> LlamaConfig:
    """Set YaRN where a text is longer than the positions of the checkpoint; factor and length are powers of two."""
    original = config.max_position_embeddings
    factor = 1
    while original * factor < length:
        factor *= 2
    if factor > 1:
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": config.rope_parameters["rope_theta"],
            "factor": float(factor),
            "original_max_position_embeddings": original,
        }
        config.max_position_embeddings = original * factor
    return config
