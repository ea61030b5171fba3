"""A model's sizes from a preset, a launch config of Megatron's flags, a ``config.json`` or single flags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import invalid
from ..launch_config import read_launch_config
from .model import PRESETS, SIZES, ModelShape

_FLAGS = dict(
    zip(
        SIZES,
        "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels "
        "--padded-vocab-size".split(),
        strict=True,
    )
)
"""Megatron's flag for each size."""

_KEYS = dict(
    zip(
        SIZES,
        "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "vocab_size".split(),
        strict=True,
    )
)
"""The key of a Hugging Face configuration for each size."""

_MISTRAL, _QWEN2, _QWEN3 = "mistral", "qwen2", "qwen3"
_KINDS = ("llama", _MISTRAL, _QWEN2, _QWEN3)
"""Model types of one shape: RMSNorm, a gated MLP, biases of queries, keys and values in qwen2 only, norms of queries
and keys in qwen3 only. Source: ``modeling_<type>.py`` of the transformers package."""

_OTHER_ATTENTION = ("kv_lora_rank", "q_lora_rank", "attention_dropout")
_BIASES = ("mlp_bias", "attention_bias")
_DEFAULT_WINDOW = 4096
"""``sliding_window`` of mistral and of qwen where a file leaves it out. Source: ``configuration_<type>.py`` of
transformers."""

_NOT_PREDICTED = ("--num-experts", "--mtp-num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern")
_UNSUPPORTED = (
    "--multi-latent-attention --experimental-attention-variant --use-legacy-models --window-size --mrope-section "
    "--fp8-dot-product-attention --fp8-multi-head-attention --qk-clip --log-max-attention-logit --batch-invariant-mode "
    "--flash-decode --hybrid-context-parallel --dynamic-context-parallel --reset-attention-mask --use-kitchen-attention"
).split()
"""Flags that training refuses: megatron/unsupported.py. A test compares."""

_VALUES = {
    "--attention-dropout": ("0", r"0*\.?0*(e[+-]?\d+)?"),
    "--softmax-type": ("vanilla", "vanilla"),
    "--position-embedding-type": ("rope, yarn, learned_absolute or none", "rope|yarn|learned_absolute|none"),
    "--transformer-impl": ("local or transformer_engine", "local|transformer_engine"),
    "--mtraining-pattern": ("vertical_slash, the one that is predicted", "vertical_slash"),
}
"""Flags of which training or the planner takes some values: the rule, and a regular expression for it."""


def model_of(name: str | None, sizes: Mapping[str, int | None]) -> ModelShape:
    """Return the model that a command line names.

    Args:
        name: a preset, a file (``.json``: Hugging Face, else a run file), or None where ``sizes`` has all.
        sizes: fields of :class:`ModelShape`; those that are not None win.

    Raises:
        ValueError: an unknown name, a file without a size, or a kind of model that is not planned.
    """
    given = {field: size for field, size in sizes.items() if size is not None}
    if name is None:
        return ModelShape(name="custom", **given)
    if name in PRESETS:
        return replace(PRESETS[name], **given)
    if not Path(name).is_file():
        raise invalid("--model", f"one of {', '.join(PRESETS)}, or a file", repr(name))
    if name.endswith(".json"):
        return _of_hugging_face(Path(name), given)
    return model_of_flags(run_flags(name), name=Path(name).stem, sizes=given)


def run_flags(name: str | None) -> dict[str, tuple[str, ...]]:
    """Return the flags of a run file, each with its words; none where ``name`` is no such file.

    Raises:
        ValueError: a file that cannot be read as one.
    """
    is_launch_config = name is not None and name not in PRESETS and not name.endswith(".json") and Path(name).is_file()
    return read_launch_config(name).flags if is_launch_config else {}


def model_of_flags(
    flags: Mapping[str, tuple[str, ...]], *, name: str, sizes: Mapping[str, int] | None = None
) -> ModelShape:
    """Return the model that Megatron builds from ``flags``, each with its words.

    Raises:
        ValueError: a size that no flag gives, or mixture of experts, or latent attention.
    """
    _check_flags(flags, name)
    found = {field: _integer(flag, flags[flag]) for field, flag in _FLAGS.items() if flag in flags}
    if "vocab_size" not in found and "--vocab-size" in flags:
        # The tokenizer that takes this flag adds one token for the end of a document.
        found["vocab_size"] = _integer("--vocab-size", flags["--vocab-size"]) + 1
    if "--group-query-attention" not in flags:
        found.pop("num_kv_heads", None)
    return _with_defaults(
        {**found, **(sizes or {})},
        name=name,
        names=_FLAGS,
        tied_embeddings="--untie-embeddings-and-output-weights" not in flags,
        gated_mlp="--swiglu" in flags,
        qkv_bias="--add-qkv-bias" in flags,
        linear_bias="--disable-bias-linear" not in flags,
        qk_norm="--qk-layernorm" in flags,
        layer_norm=flags.get("--normalization", ("LayerNorm",))[0] == "LayerNorm",
    )


def _check_flags(flags: Mapping[str, tuple[str, ...]], name: str) -> None:
    """Refuse a model that training refuses, or that is not planned."""
    for flag in (*_NOT_PREDICTED, *_UNSUPPORTED):
        if flag in flags:
            raise invalid("--model", "a model of dense layers and plain attention", f"{flag} in {name}")
    for flag, (rule, pattern) in _VALUES.items():
        words = " ".join(flags.get(flag, ()))
        if flag in flags and not (words and re.fullmatch(pattern, words)):
            raise invalid(flag, rule, f"{words or 'nothing'} in {name}")


def _of_hugging_face(path: Path, sizes: Mapping[str, int]) -> ModelShape:
    try:
        entries = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise invalid("--model", "a readable config.json", f"{path}: {error}") from None
    if not isinstance(entries, dict):
        raise invalid("--model", "a config.json with a mapping", f"{path} with {type(entries).__name__}")
    _check_kind(entries, path)
    kind = entries["model_type"]
    found = {field: entries[key] for field, key in _KEYS.items() if type(entries.get(key)) is int}
    return _with_defaults(
        {**found, **sizes},
        name=str(entries.get("_name_or_path") or path.parent.name or path.stem),
        names=_KEYS,
        tied_embeddings=bool(entries.get("tie_word_embeddings", False)),
        qkv_bias=kind == _QWEN2,
        qk_norm=kind == _QWEN3,
    )


def _check_kind(entries: Mapping[str, Any], path: Path) -> None:
    """Refuse a model of another shape than those of :data:`_KINDS`."""
    kind = entries.get("model_type")
    experts = [key for key in entries if "expert" in key or key.startswith("moe_")]
    refused = (
        ("a model of dense layers", experts),
        ("a model of plain attention", _OTHER_ATTENTION),
        # Attention of qwen2 has the biases that are planned, whatever this key says.
        ("a model without such biases", [key for key in _BIASES if (kind, key) != (_QWEN2, "attention_bias")]),
    )
    for rule, keys in refused:
        for key in keys:
            if entries.get(key):
                raise invalid("--model", rule, f"{key} {entries[key]} in {path}")
    if kind not in _KINDS:
        remedy = "Give sizes by flags instead if it has their shape: --layers, --hidden, ..."
        raise invalid("--model", f"of model_type {', '.join(_KINDS)}", f"{kind!r} in {path}", remedy)
    window = _active_window(entries)
    if window is not None:
        remedy = "Training refuses it too. Without one: sliding_window null (mistral), or use_sliding_window false."
        raise invalid("--model", "a model without a sliding window", f"{window} in {path}", remedy)


def _active_window(entries: Mapping[str, Any]) -> str | None:
    """Return the sliding window that transformers would give some layer; None where all layers attend to everything.

    Mistral's holds in every layer; Qwen's with ``use_sliding_window`` from layer ``max_window_layers`` on. Any other
    window in a file counts unless the same file says ``use_sliding_window`` false: some programs read it.
    """
    kind, layer_types = entries["model_type"], entries.get("layer_types")
    other = [each for each in layer_types if each != "full_attention"] if isinstance(layer_types, list) else []
    if other:
        return f"layer_types with {other[0]}"
    window = entries.get("sliding_window", _DEFAULT_WINDOW if kind == _MISTRAL else None)
    is_used = kind == _MISTRAL or entries.get("use_sliding_window", True)
    if kind in (_QWEN2, _QWEN3) and entries.get("use_sliding_window"):
        window = entries.get("sliding_window", _DEFAULT_WINDOW)
        first, num_layers = entries.get("max_window_layers", 28), entries.get("num_hidden_layers")
        starts_late = isinstance(first, int) and isinstance(num_layers, int) and first >= num_layers
        is_used = layer_types is None and not starts_late
    return f"sliding_window {window}" if window is not None and is_used else None


def _with_defaults(found: dict[str, int], *, name: str, names: Mapping[str, str], **options: Any) -> ModelShape:
    """Fill in what both formats leave out: as many key/value heads as heads, and heads that fill the hidden size."""
    for field, given_name in names.items():
        if field not in found and field not in ("num_kv_heads", "head_dim"):
            raise invalid("--model", f"a file with {given_name}", name, "Or give that size beside it.")
    found.setdefault("num_kv_heads", found["num_heads"])
    if "head_dim" not in found:
        if found["num_heads"] < 1 or found["hidden_size"] % found["num_heads"]:
            heads = f"{found['num_heads']} heads of {found['hidden_size']}"
            raise invalid("--model", f"a file with {names['head_dim']}, or of heads that fill the hidden size", heads)
        found["head_dim"] = found["hidden_size"] // found["num_heads"]
    return ModelShape(name=name, **found, **options)


def _integer(flag: str, words: tuple[str, ...]) -> int:
    try:
        return int(words[0])
    except (ValueError, IndexError):
        raise invalid(flag, "a whole number", " ".join(words) or "nothing") from None
