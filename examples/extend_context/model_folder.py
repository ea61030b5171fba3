"""A Hugging Face folder with the YaRN entry of the longer context, and the flags of pretrain_gpt.py that it stands for.

Nothing here imports transformers or Megatron: a folder's config.json says it all.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_mtraining.errors import invalid

from .settings import ModelSettings

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""``model_type`` of Llama and SmolLM2, Qwen2 and Qwen2.5, and Qwen3."""

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = ("tokenizer*", "*.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_COPIED = (*_WEIGHTS, *_TOKENIZER, "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*")


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder.

    Raises:
        ValueError: no model there, or one that these commands do not convert.
    """
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise invalid("model.source", "a Hugging Face model's folder", f"{folder} without config.json") from error
    except (OSError, ValueError) as error:
        raise invalid("config.json", "readable JSON", f"{path}: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES:
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise invalid("model_type in config.json", f"one of {', '.join(MODEL_TYPES)}", f"{found!r} in {path}")
    if config.get("use_sliding_window"):
        raise invalid("use_sliding_window in config.json", "false", "true", "Such a model has no full attention.")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise invalid(f"{name} in config.json", "false", "true", "Megatron's flags have no such bias alone.")
    if "quantization_config" in config:
        raise invalid("the model", "of unquantised weights", f"quantization_config in {path}")
    return config


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary entry of a config.json, ``rope_theta`` included, of transformers 4 or 5."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def extended_config(config: dict[str, Any], model: ModelSettings) -> dict[str, Any]:
    """Return the config.json of the extended model, in a form that transformers 4 and 5 read.

    Every field of the YaRN entry is written: Megatron-Bridge fails on omitted betas, and readers differ in defaults.
    ``attention_factor`` stays out: Bridge drops it silently. Both sides take ``0.1 ln(factor) + 1`` by themselves.

    Raises:
        ValueError: a model that is scaled already, or a length that is no extension.
    """
    rope = rope_of(config)
    if "attention_factor" in rope or "mscale" in rope or "mscale_all_dim" in rope:
        names = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if name in rope]
        raise invalid(
            "the rotary entry of config.json", "without a factor on the scores", ", ".join(names),
            "Megatron-Bridge would drop it silently. Start from the model before it was extended.",
        )  # fmt: skip
    if rope["rope_type"] != "default":
        remedy = "Start from the model before it was extended."
        raise invalid("rope_type in config.json", "default, for a model to extend", repr(rope["rope_type"]), remedy)
    original = model.original_length or int(config["max_position_embeddings"])
    if model.length <= original:
        raise invalid("model.length", f"above the model's own {original} tokens", model.length)
    theta = float(rope["rope_theta"])
    extended = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    extended["max_position_embeddings"] = model.length
    extended["rope_theta"] = theta
    extended["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": model.length / original,
        "original_max_position_embeddings": original,
        "beta_fast": float(model.beta_fast),
        "beta_slow": float(model.beta_slow),
        "truncate": bool(model.truncate),
        "rope_theta": theta,
    }
    return extended


def write_model_folder(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Write a folder with the files of ``source``, weights linked where that is possible, and another config.json.

    Raises:
        ValueError: weights that are no safetensors.
    """
    if not any(source.glob("*.safetensors")):
        remedy = "Save them so with transformers: model.save_pretrained(folder)."
        raise invalid("model.source", "of weights as safetensors", f"{source} without them", remedy)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        if path.suffix == ".safetensors":
            _link_or_copy(path.resolve(), partial / path.name)
        else:
            shutil.copyfile(path, partial / path.name)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = partial / "tokenizer_config.json"
    if tokenizer.is_file():
        content = json.loads(tokenizer.read_text()) | {"model_max_length": config["max_position_embeddings"]}
        tokenizer.write_text(json.dumps(content, indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    os.replace(partial, target)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def model_flags(config: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of pretrain_gpt.py (Megatron core 0.19 and later) that describe an extended model.

    Args:
        config: a config.json that :func:`extended_config` made.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = rope_of(config)
    flags: dict[str, Any] = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": heads,
        "--group-query-attention": True,
        "--num-query-groups": config.get("num_key_value_heads") or heads,
        "--kv-channels": head_dim,
        "--normalization": "RMSNorm",
        "--norm-epsilon": config["rms_norm_eps"],
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--add-qkv-bias": config["model_type"] == "qwen2",
        "--qk-layernorm": config["model_type"] == "qwen3",
        "--init-method-std": config.get("initializer_range", 0.02),
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", False),
        "--max-position-embeddings": config["max_position_embeddings"],
        "--position-embedding-type": "yarn",
        "--rotary-base": _integer(rope["rope_theta"]),
        "--rotary-scaling-factor": rope["factor"],
        "--yarn-original-max-position-embeddings": rope["original_max_position_embeddings"],
        "--yarn-beta-fast": rope["beta_fast"],
        "--yarn-beta-slow": rope["beta_slow"],
        "--mscale": 1.0,
        "--mscale-all-dim": 0.0,
        "--no-rope-fusion": True,
    }
    rounding = "yarn-correction-range-round-to-int"
    flags[f"--{rounding}" if rope["truncate"] else f"--no-{rounding}"] = True
    return flags


def _integer(theta: float) -> int:
    """Return ``rope_theta`` as the integer that ``--rotary-base`` takes."""
    if theta != int(theta):
        raise invalid("rope_theta in config.json", "an integer, as --rotary-base takes", theta)
    return int(theta)
