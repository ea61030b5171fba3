"""``export``: a trained checkpoint to a Hugging Face folder, compared with Megatron's logits and evaluated."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch

from megatron_mtraining.arguments import add_arguments, config_from_args
from megatron_mtraining.errors import invalid

from .held_out import Losses, document_losses, has_held_out, held_out_tokens, mtraining_words
from .launch_config import changed_fields, checkpoint_folder, devices
from .settings import Settings
from .tokens import write_atomically
from .train import table

if TYPE_CHECKING:
    from .bridge import MegatronModel

RESULT = "export.json"
_LOGIT_POSITIONS = 2048
"""Positions whose logits are there at a time: those of a whole long sequence are larger than the model."""


def export(settings: Settings) -> str:
    """Write the Hugging Face folder of a run's latest checkpoint; return a sentence about it.

    Raises:
        ValueError: no checkpoint, or logits that differ after the conversion.
    """
    from .bridge import latest_iteration

    iteration = latest_iteration(checkpoint_folder(settings))
    if iteration is None:
        raise invalid("the run", "trained", f"no checkpoint in {checkpoint_folder(settings)}", "Run train first.")
    target = settings.export_folder
    result = target / RESULT
    before = json.loads(result.read_text()) if result.is_file() else {}
    if before.get("iteration") == str(iteration):
        return before["sentence"]
    sentence, model = convert(settings, iteration, target)
    losses = {}
    if has_held_out(settings):
        documents = held_out_tokens(settings)
        losses = {"before": hf_losses(settings.model_folder, documents), "after": hf_losses(target, documents)}
        print(table(*losses.values()))
        sentence += f"; held-out loss by transformers {losses['before'].mean:.4f} -> {losses['after'].mean:.4f}"
        has = devices()
        if has["has_transformer_engine"] or not has["has_gpu"]:  # else Megatron would hold seq x seq scores
            losses["after_by_megatron"] = document_losses(documents, lambda each: model.losses(_batch(each))[0])
            sentence += f", by Megatron {losses['after_by_megatron'].mean:.4f}"
    content = {"iteration": str(iteration), "sentence": sentence}
    content |= {name: dataclasses.asdict(each) for name, each in losses.items()}
    write_atomically(result, json.dumps(content))
    return sentence


def convert(settings: Settings, iteration: Path, target: Path) -> tuple[str, MegatronModel]:
    """Write the folder, load it in transformers, and compare both on real text.

    Returns:
        A sentence about it, and the model as Megatron has it, with attention to every key.
    """
    from .bridge import MegatronModel, start_megatron
    from .verify import compare, real_text

    start_megatron()
    model = MegatronModel(settings.model_folder, load_weights=False)
    model.load(iteration)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_hf(partial)
    for path in settings.model_folder.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
            shutil.copyfile(path, partial / path.name)
    save_attention(settings.run_folder / "launch.yaml", partial / "config.json")
    tokens = real_text(partial, settings.model.verify_text, settings.model.verify_tokens)
    found = compare(partial, model, tokens)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    return f"{target} of {iteration.name} loaded in transformers, {found}", model


def save_attention(launch: Path, config: Path) -> None:
    """Write the attention of a run's launch config into ``config.json``, where ``mtraining evaluate`` reads it.

    A sparse run's are the fields that differ from the defaults; a dense run has none.
    """
    import yaml

    flags = yaml.safe_load(launch.read_text())["MODEL_ARGS"]
    trained = config_from_args(add_arguments(argparse.ArgumentParser()).parse_args(mtraining_words(flags)))
    attention = {} if trained.pattern == "dense" else changed_fields(trained)
    content = json.loads(config.read_text()) | {"mtraining": attention}
    config.write_text(json.dumps(content, indent=2) + "\n")


@torch.no_grad()
def hf_losses(folder: Path, documents: numpy.ndarray) -> Losses:
    """Return the losses of token numbers ``[documents, tokens]`` by the model of a Hugging Face folder."""
    from .verify import load_hf

    model = load_hf(folder)

    def losses_of(document: numpy.ndarray) -> torch.Tensor:
        tokens = _batch(document).to(model.device)
        hidden = model.model(tokens[:, :-1]).last_hidden_state[0]
        parts = zip(hidden.split(_LOGIT_POSITIONS), tokens[0, 1:].split(_LOGIT_POSITIONS), strict=True)
        each = [torch.nn.functional.cross_entropy(model.lm_head(h).float(), t, reduction="none") for h, t in parts]
        return torch.cat(each)

    return document_losses(documents, losses_of)


def _batch(document: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(document)[None]
