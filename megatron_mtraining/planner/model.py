"""Sizes and parameters of a dense transformer, read from a Hugging Face ``config.json`` or from Megatron's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import read_json
from ..errors import invalid
from ..launch_config import read_launch_config

_SIZES = {
    "num_layers": ("num_hidden_layers", "--num-layers"),
    "hidden_size": ("hidden_size", "--hidden-size"),
    "ffn_hidden_size": ("intermediate_size", "--ffn-hidden-size"),
    "num_heads": ("num_attention_heads", "--num-attention-heads"),
    "num_kv_heads": ("num_key_value_heads", "--num-query-groups"),
    "head_dim": ("head_dim", "--kv-channels"),
    "vocab_size": ("vocab_size", "--padded-vocab-size"),
}
"""The key of a ``config.json`` and Megatron's flag for each size."""

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of one shape: RMSNorm, a gated MLP, biases of queries, keys and values in qwen2 only, norms of queries
and keys in qwen3 only. Source: ``modeling_<type>.py`` of the transformers package."""

_UNSUPPORTED_KEYS = ("kv_lora_rank", "q_lora_rank", "attention_dropout", "mlp_bias", "attention_bias")
_UNSUPPORTED_FLAGS = (
    "--num-experts --mtp-num-layers --hybrid-layer-pattern --hybrid-override-pattern --multi-latent-attention "
    "--experimental-attention-variant --window-size"
).split()
"""Flags that change memory or time and are not predicted; ``mtraining doctor`` finds those that cannot run."""


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
    vocab_size: int  # rows of the embedding before padding
    tied_embeddings: bool = False  # the output layer is the embedding
    gated_mlp: bool = True  # the first product of the MLP is twice as wide (SwiGLU)
    qkv_bias: bool = False
    linear_bias: bool = False  # of all products, and not counted: below a thousandth, as LayerNorm's
    qk_norm: bool = False
    layer_norm: bool = False  # instead of RMSNorm

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not 1 <= size <= 2**30:  # more is a slip
                raise invalid(f"{name} of the model", f"from 1 to {2**30}", str(size)[:20])
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
        """Return the rows of all ranks' embedding, as ``vocab_size_with_padding`` of megatron.core.tokenizers does."""
        multiple = 128 * tp  # default of --make-vocab-size-divisible-by
        return -(-self.vocab_size // multiple) * multiple

    def layer_parameters(self, tp: int = 1) -> int:
        """Count parameters of a layer on one of ``tp`` ranks; norms are on all."""
        split = self.layer_weights + (self.query_size + 2 * self.kv_size if self.qkv_bias else 0)
        return split // tp + 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    def stage_parameters(self, *, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
        """Count parameters of one pipeline stage on one tensor-parallel rank: the first one has the embedding, the last
        one the final norm and the output layer, a copy of the embedding where the two are tied and in other stages."""
        embedding = self.padded_vocab(tp) // tp * self.hidden_size
        count = self.num_layers // pp * self.layer_parameters(tp) + (embedding if stage == 0 else 0)
        if stage == pp - 1:
            count += self.hidden_size + (0 if self.tied_embeddings and pp == 1 else embedding)
        return count


def model_of(source: str) -> ModelShape:
    """Return the model of a preset's name, of a ``.json`` file (Hugging Face), or of a launch config.

    Raises:
        ValueError: an unknown name, a file without a size, or a kind of model that is not planned.
    """
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if is_launch_config(source):
        return model_of_flags(read_launch_config(path).flags, name=path.stem)
    if not path.is_file():
        raise invalid("--model", f"one of {', '.join(PRESETS)}, or a file", repr(source))
    return _of_hugging_face(read_json("--model", path), path.parent.name or path.stem)


def is_launch_config(source: str) -> bool:
    """Return whether ``source`` is a file of Megatron's flags."""
    return source not in PRESETS and not source.endswith(".json") and Path(source).is_file()


def model_of_flags(flags: Mapping[str, tuple[str, ...]], *, name: str) -> ModelShape:
    """Return the model that Megatron builds from ``flags``, each with its values.

    Raises:
        ValueError: a size that no flag gives, or a model that is not planned.
    """
    for flag in _UNSUPPORTED_FLAGS:
        if flag in flags:
            raise invalid("--model", "a model of dense layers and plain attention", f"{flag} in {name}")
    sizes = {size: _integer(flag, flags[flag]) for size, (_, flag) in _SIZES.items() if flag in flags}
    if "vocab_size" not in sizes and "--vocab-size" in flags:
        # The tokenizer that takes this flag adds one token for the end of a document.
        sizes["vocab_size"] = _integer("--vocab-size", flags["--vocab-size"]) + 1
    if "--group-query-attention" not in flags:
        sizes.pop("num_kv_heads", None)
    return _shape(
        name,
        sizes,
        {size: flag for size, (_, flag) in _SIZES.items()},
        tied_embeddings="--untie-embeddings-and-output-weights" not in flags,
        gated_mlp="--swiglu" in flags,
        qkv_bias="--add-qkv-bias" in flags,
        linear_bias="--disable-bias-linear" not in flags,
        qk_norm="--qk-layernorm" in flags,
        layer_norm=flags.get("--normalization", ("LayerNorm",))[0] == "LayerNorm",
    )


def _of_hugging_face(entries: Mapping[str, Any], name: str) -> ModelShape:
    kind = entries.get("model_type")
    if kind not in _KINDS:
        remedy = "Write a launch config with Megatron's flags for its sizes instead."
        raise invalid("--model", f"of model_type {', '.join(_KINDS)}", f"{kind!r} in {name}", remedy)
    for key, value in entries.items():
        is_unsupported = "expert" in key or key.startswith("moe_") or key in _UNSUPPORTED_KEYS
        if value and is_unsupported and (kind, key) != ("qwen2", "attention_bias"):  # qwen2 has those that are planned
            raise invalid("--model", "a model of dense layers and plain attention", f"{key} {value} in {name}")
    layer_types, window = entries.get("layer_types") or [], entries.get("sliding_window")
    # Only mistral reads no use_sliding_window; layer_types win over both.
    uses_window = window and not layer_types and (kind == "mistral" or entries.get("use_sliding_window", True))
    if uses_window or any(each != "full_attention" for each in layer_types):
        raise invalid("--model", "a model without a sliding window", f"one of {window} in {name}")
    keys = {size: key for size, (key, _) in _SIZES.items()}
    sizes = {size: entries[key] for size, key in keys.items() if type(entries.get(key)) is int}
    is_tied = bool(entries.get("tie_word_embeddings", False))
    return _shape(name, sizes, keys, tied_embeddings=is_tied, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")


def _shape(name: str, sizes: dict[str, int], names: Mapping[str, str], **options: bool) -> ModelShape:
    """Fill in what both formats omit: as many key/value heads as heads, and heads that fill the hidden size."""
    for size, given_name in names.items():
        if size not in sizes and size not in ("num_kv_heads", "head_dim"):
            raise invalid("--model", f"a file with {given_name}", name)
    heads, hidden_size = sizes["num_heads"], sizes["hidden_size"]
    if "head_dim" not in sizes and (heads < 1 or hidden_size % heads):
        rule = f"a file with {names['head_dim']}, or of heads that fill the hidden size"
        raise invalid("--model", rule, f"{heads} heads of {hidden_size}")
    return ModelShape(name=name, **{"num_kv_heads": heads, "head_dim": hidden_size // max(heads, 1)} | sizes, **options)


def _integer(flag: str, values: tuple[str, ...]) -> int:
    try:
        return int(values[0])
    except (ValueError, IndexError):
        raise invalid(flag, "a whole number", " ".join(values) or "nothing") from None


PRESETS = {
    name: _of_hugging_face(entries, name)
    for name, entries in read_json("models", Path(__file__).with_name("models.json")).items()
}
"""Models by name: what ``config.json`` beside the published weights says of the shape."""
