"""``export``: a trained checkpoint to a Hugging Face folder, compared with Megatron's logits and evaluated."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy
import torch

from megatron_mtraining.errors import invalid

from .held_out import Losses, held_out_tokens, summarise
from .launch_config import checkpoint_folder
from .settings import Settings
from .tokens import write_atomically
from .train import table

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
    sentence = convert(settings, iteration, target)
    losses = evaluate(settings, target)
    if losses is not None:
        print(table(*losses))
        sentence += f"; held-out loss by transformers {losses[0].mean:.4f} -> {losses[1].mean:.4f}"
    write_atomically(result, json.dumps({"iteration": str(iteration), "sentence": sentence}))
    return sentence


def convert(settings: Settings, iteration: Path, target: Path) -> str:
    """Write the folder, load it in transformers, and compare both on real text."""
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
    tokens = real_text(partial, settings.model.verify_text, settings.model.verify_tokens)
    found = compare(partial, model, tokens)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    return f"{target} of {iteration.name} loaded in transformers, {found}"


def evaluate(settings: Settings, target: Path) -> tuple[Losses, Losses] | None:
    """Return held-out losses by transformers, with attention to every key: before and after training."""
    documents = held_out_tokens(settings)
    if documents is None:
        return None
    return hf_losses(settings.model_folder, documents), hf_losses(target, documents)


@torch.no_grad()
def hf_losses(folder: Path, documents: numpy.ndarray) -> Losses:
    """Return the losses of token numbers ``[documents, tokens]`` by the model of a Hugging Face folder."""
    from .verify import load_hf

    model = load_hf(folder)
    losses = []
    for document in torch.from_numpy(documents).to(model.device):
        hidden = model.model(document[None, :-1]).last_hidden_state[0]
        parts = zip(hidden.split(_LOGIT_POSITIONS), document[1:].split(_LOGIT_POSITIONS), strict=True)
        each = [torch.nn.functional.cross_entropy(model.lm_head(h).float(), t, reduction="none") for h, t in parts]
        losses.append(torch.cat(each).cpu().numpy())
    return summarise(numpy.stack(losses))
