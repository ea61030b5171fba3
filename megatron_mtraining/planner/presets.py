"""Models by name; every figure is from the ``config.json`` that its publisher put beside the weights."""

from __future__ import annotations

from .model_shape import ModelShape


def _shape(
    name: str, layers: int, hidden: int, ffn: int, heads: tuple[int, int], vocab: int, **options: bool | int
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        vocab_size=vocab,
        **{"head_dim": 128, **options},
    )


PRESETS = {
    shape.name: shape
    for shape in (
        _shape("qwen2.5-1.5b", 28, 1536, 8960, (12, 2), 151936, tied_embeddings=True, qkv_bias=True),
        _shape("qwen2.5-3b", 36, 2048, 11008, (16, 2), 151936, tied_embeddings=True, qkv_bias=True),
        _shape("qwen2.5-7b", 28, 3584, 18944, (28, 4), 152064, qkv_bias=True),
        _shape("qwen2.5-14b", 48, 5120, 13824, (40, 8), 152064, qkv_bias=True),
        _shape("qwen3-8b", 36, 4096, 12288, (32, 8), 151936, qk_norm=True),
        _shape("llama3-8b", 32, 4096, 14336, (32, 8), 128256),
        _shape("llama3-70b", 80, 8192, 28672, (64, 8), 128256),
    )
}
"""Models by name."""
