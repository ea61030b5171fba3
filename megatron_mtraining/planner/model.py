"""Sizes and parameters of a dense transformer, whole and on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import invalid

VOCABULARY_MULTIPLE = 128
"""Megatron's ``--make-vocab-size-divisible-by``, which it multiplies by the tensor-parallel size."""

MOST = 2**30
"""Largest value of any size: more is a slip."""

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of equal dense layers, as Megatron's GPTModel builds it.

    Raises:
        ValueError: a size out of its range, or heads that their key/value heads do not divide.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding before padding."""

    tied_embeddings: bool = False
    """True if the output layer is the embedding."""

    gated_mlp: bool = True
    """True if the first product of the MLP is twice as wide (SwiGLU)."""

    qkv_bias: bool = False
    linear_bias: bool = False
    """True if all products have a bias, those of queries, keys and values too."""

    qk_norm: bool = False
    layer_norm: bool = False
    """True for LayerNorm, with a bias, instead of RMSNorm."""

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if not 1 <= size <= MOST:
                rule = "at least 1" if size < 1 else f"at most {MOST}"
                raise invalid(f"{name} of the model", rule, f"{size:.3e}" if size > MOST else size)
        if self.num_heads % self.num_kv_heads:
            raise invalid("num_heads of the model", f"a multiple of its {self.num_kv_heads} kv heads", self.num_heads)

    @property
    def query_size(self) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys; of its values as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def ffn_input_size(self) -> int:
        """Elements of a token after the first product of the MLP."""
        return (2 if self.gated_mlp else 1) * self.ffn_hidden_size

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices, which tensor parallelism splits."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        return attention + self.hidden_size * (self.ffn_input_size + self.ffn_hidden_size)

    def heads(self, tp: int) -> tuple[int, int]:
        """Return query heads and key/value heads of one of ``tp`` ranks; more ranks than the latter share them."""
        return self.num_heads // tp, max(self.num_kv_heads // tp, 1)

    def padded_vocab(self, tp: int) -> int:
        """Return the rows of the embedding of ``tp`` ranks together.

        Source: ``vocab_size_with_padding`` of megatron.core.tokenizers (in 0.16 of megatron.training.tokenizer).
        """
        multiple = VOCABULARY_MULTIPLE * tp
        return -(-self.vocab_size // multiple) * multiple

    def layer_parameters(self, tp: int = 1) -> int:
        """Count parameters of a layer on one of ``tp`` ranks; norms and row-parallel products' biases are on all."""
        split = self.layer_weights
        if self.qkv_bias or self.linear_bias:
            split += self.query_size + 2 * self.kv_size
        if self.linear_bias:
            split += self.ffn_input_size
        whole = 2 * self._norm_parameters + (2 * self.head_dim if self.qk_norm else 0)
        return split // tp + whole + (2 * self.hidden_size if self.linear_bias else 0)

    def stage_parameters(self, *, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
        """Count parameters of one pipeline stage on one tensor-parallel rank.

        The first stage has the embedding, the last one the final norm and the output layer: a copy of the embedding
        where the two are tied and on different stages.
        """
        embedding = self.padded_vocab(tp) // tp * self.hidden_size
        count = self.num_layers // pp * self.layer_parameters(tp)
        if stage == 0:
            count += embedding
        if stage == pp - 1:
            count += self._norm_parameters
            count += 0 if self.tied_embeddings and pp == 1 else embedding
        return count

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.layer_norm else 1)


_QWEN2 = {"tied_embeddings": False, "qkv_bias": True}
PRESETS = {
    name: ModelShape(name=name, **dict(zip(SIZES, (*sizes, 128, vocab), strict=True)) | options)
    for name, sizes, vocab, options in (
        ("qwen2.5-1.5b", (28, 1536, 8960, 12, 2), 151936, _QWEN2 | {"tied_embeddings": True}),
        ("qwen2.5-3b", (36, 2048, 11008, 16, 2), 151936, _QWEN2 | {"tied_embeddings": True}),
        ("qwen2.5-7b", (28, 3584, 18944, 28, 4), 152064, _QWEN2),
        ("qwen2.5-14b", (48, 5120, 13824, 40, 8), 152064, _QWEN2),
        ("qwen3-8b", (36, 4096, 12288, 32, 8), 151936, {"qk_norm": True}),
        ("llama3-8b", (32, 4096, 14336, 32, 8), 128256, {}),
        ("llama3-70b", (80, 8192, 28672, 64, 8), 128256, {}),
    )
}
"""Models by name, from the ``config.json`` that each publisher put beside the weights."""
