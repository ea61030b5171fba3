"""The launch config of a training run, made from the model's folder, the data's report and the settings."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.errors import invalid

from .model_folder import model_flags, read_model_config
from .prepare_data import data_paths
from .settings import Settings


def launch_config(settings: Settings, *, has_gpu: bool, has_transformer_engine: bool) -> dict[str, Any]:
    """Return the launch config of pretrain_gpt.py; flags of the settings win over those made here.

    Args:
        settings: of all commands.
        has_gpu: whether the ranks are GPUs, else CPU processes.
        has_transformer_engine: whether Megatron's layers are TransformerEngine's.

    Raises:
        ValueError: no prepared model or data.
    """
    train = settings.train
    if not (settings.model_folder / "config.json").is_file():
        raise invalid("the model", "prepared", f"no {settings.model_folder}", "Run prepare_model first.")
    config = read_model_config(settings.model_folder)
    held_out = data_paths(settings.data_folder, "held_out")
    flags: dict[str, Any] = {
        **model_flags(config),
        "--seq-length": train.seq_length,
        # The prepared data are numbers of tokens: training needs their count only.
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": config["vocab_size"],
        "--padded-vocab-size": config["vocab_size"],
        "--train-data-path": data_paths(settings.data_folder, "train"),
        "--valid-data-path": held_out or data_paths(settings.data_folder, "train"),
        "--data-cache-path": str((settings.run_folder / "data_cache").resolve()),
        "--no-create-attention-mask-in-dataloader": True,
        "--context-parallel-size": train.ranks,
        "--micro-batch-size": 1,
        "--global-batch-size": train.global_batch_size,
        "--train-iters": train.steps,
        "--lr": train.learning_rate,
        "--min-lr": train.min_learning_rate,
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": train.warmup_steps,
        "--weight-decay": train.weight_decay,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.95,
        "--clip-grad": 1.0,
        "--seed": train.seed,
        "--calculate-per-token-loss": True,
        "--log-interval": 1,
        "--eval-iters": 0,
        "--eval-interval": 1000000,
        "--ckpt-format": "torch_dist",
        "--save-interval": train.save_every,
        "--save": str(checkpoint_folder(settings).resolve()),
        **_device_flags(has_gpu=has_gpu, has_transformer_engine=has_transformer_engine),
        **attention_flags(settings, has_gpu=has_gpu, has_transformer_engine=has_transformer_engine),
        **_load_flags(settings),
        **train.flags,
    }
    return {"ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1, **train.environment}, "MODEL_ARGS": flags}


def checkpoint_folder(settings: Settings) -> Path:
    """Return the folder of a run's checkpoints."""
    return settings.run_folder / "checkpoints"


def devices() -> dict[str, bool]:
    """Return what this machine has, as the arguments of :func:`launch_config`."""
    import torch

    has_gpu = torch.cuda.is_available()
    has_transformer_engine = has_gpu and importlib.util.find_spec("transformer_engine") is not None
    return {"has_gpu": has_gpu, "has_transformer_engine": has_transformer_engine}


def _device_flags(*, has_gpu: bool, has_transformer_engine: bool) -> dict[str, Any]:
    if not has_gpu:
        unfused = "rope persist-layer-norm gradient-accumulation masked-softmax bias-swiglu bias-dropout".split()
        suffix = {"persist-layer-norm": "", "rope": "-fusion"}
        flags = {f"--no-{name}{suffix.get(name, '-fusion')}": True for name in unfused}
        cpu = {"--distributed-backend": "gloo", "--use-cpu-initialization": True, "--num-workers": 0}
        return {**flags, **cpu, "--transformer-impl": "local"}
    flags = {
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": 1,
        "--transformer-impl": "transformer_engine" if has_transformer_engine else "local",
        "--log-throughput": True,
    }
    if importlib.util.find_spec("apex") is None:
        flags["--no-gradient-accumulation-fusion"] = True
    if not has_transformer_engine:
        flags["--no-persist-layer-norm"] = True
    return flags


def attention_flags(settings: Settings, *, has_gpu: bool, has_transformer_engine: bool) -> dict[str, Any]:
    """Return the flags that choose attention.

    Without TransformerEngine, Megatron's own dense attention holds seq x seq scores and knows one rank only; this
    package's to every key is taken then.
    """
    if settings.train.attention == "mtraining":
        return {"--attention-backend": "mtraining"}
    if not has_transformer_engine and (has_gpu or settings.train.ranks > 1):
        return {"--attention-backend": "mtraining", "--mtraining-pattern": "dense"}
    return {"--attention-backend": "auto"} if has_gpu else {}


def changed_fields(config: MTrainingConfig) -> dict[str, Any]:
    """Return the fields of an attention's configuration that differ from their defaults."""
    default = MTrainingConfig()
    names = [each.name for each in dataclasses.fields(MTrainingConfig)]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def _load_flags(settings: Settings) -> dict[str, Any]:
    """Return the flags that continue a run, or begin one with the weights of the prepared model."""
    from .bridge import latest_iteration

    checkpoints = checkpoint_folder(settings)
    if latest_iteration(checkpoints) is not None:
        return {"--load": str(checkpoints.resolve())}
    return {"--load": str(settings.megatron_folder.resolve()), "--finetune": True}
