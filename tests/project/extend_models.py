"""Tiny random models and their tokenizer, as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512


def save_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Save a byte-level BPE tokenizer that was trained on this repository's README."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    readme = Path(__file__).parents[2] / "README.md"
    tokenizer.train([str(readme)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def save_model(kind: str, folder: Path, **changes: object) -> None:
    """Save a random model of 2 layers and 256 tokens of context with a tokenizer; ``kind`` is llama, qwen2 or qwen3."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind != "llama",
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(config | changes)))
    model.save_pretrained(folder)
    save_tokenizer(folder)
