"""Loss on the longest held-out documents, by position: a process of its own, so that its memory is free afterwards.

``python -m examples.extend_context.held_out SETTINGS.json RESULT.json=CHECKPOINT ...`` is what
:func:`losses_in_process` runs. The model attends as in training: ``train.attention``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from .launch_config import attention_flags, devices
from .prepare_data import data_paths, read_report
from .progress import Progress
from .settings import Settings, settings_from
from .tokens import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_mtraining import MTrainingConfig

NUM_PARTS = 8
"""Equal parts of the sequence whose losses are reported."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses in nats a token."""

    mean: float
    by_position: list[tuple[int, int, float]]
    """First position, the one after the last, and their mean loss."""

    documents: int
    tokens: int
    """Tokens of each document that were evaluated."""


def has_held_out(settings: Settings) -> bool:
    """True where a held-out document is long enough to be evaluated by position."""
    longest = max(source["held_out"]["longest"] for source in read_report(settings.data_folder)["sources"])
    return settings.train.held_out_documents > 0 and min(longest, settings.train.seq_length + 1) > NUM_PARTS


def held_out_tokens(settings: Settings) -> numpy.ndarray:
    """Return the first ``seq_length + 1`` tokens of the longest held-out documents, ``[documents, tokens]``.

    Where none is that long, the longest alone.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefixes = data_paths(settings.data_folder, "held_out")[1::2]
    wanted = settings.train.seq_length + 1
    heads = []
    for prefix in prefixes:
        data_set = IndexedDataset(prefix)
        for document in range(min(len(data_set), settings.train.held_out_documents)):  # the longest are first
            length = int(data_set.sequence_lengths[document])
            heads.append(numpy.asarray(data_set.get(document, 0, min(length, wanted)), dtype=numpy.int64))
    heads = sorted(heads, key=len, reverse=True)[: settings.train.held_out_documents]
    return numpy.stack([head for head in heads if len(head) == wanted] or heads[:1])


def summarise(losses: numpy.ndarray) -> Losses:
    """Return the summary of losses ``[documents, positions]``."""
    bounds = numpy.linspace(0, losses.shape[1], NUM_PARTS + 1).astype(int).tolist()
    parts = [(a, b, float(losses[:, a:b].mean())) for a, b in zip(bounds, bounds[1:], strict=False)]
    return Losses(float(losses.mean()), parts, *losses.shape)


def losses_in_process(settings: Settings, checkpoints: dict[Path, Path]) -> list[Losses] | None:
    """Return the losses with the weights of each checkpoint, or None where nothing was held out.

    Args:
        settings: of all commands.
        checkpoints: Megatron checkpoints, of which the latest iteration counts, by the JSON file of their losses. A
            file that an earlier run wrote with the same settings is read only.
    """
    if not has_held_out(settings):
        return None
    wanted = dataclasses.asdict(settings)
    identity = {name: wanted["train"][name] for name in ("seq_length", "held_out_documents", "attention", "flags")}
    identity = json.loads(json.dumps(identity | {"data": wanted["data"]}))
    missing = {result: checkpoint for result, checkpoint in checkpoints.items() if _identity(result) != identity}
    if missing:
        given = next(iter(missing)).with_name("held_out.settings.json")
        write_atomically(given, json.dumps(wanted))
        pairs = [f"{result}={checkpoint}" for result, checkpoint in missing.items()]
        subprocess.run([sys.executable, "-m", __spec__.name, str(given), *pairs], check=True, cwd=Path.cwd())
        given.unlink()
        for result in missing:
            write_atomically(result, json.dumps(json.loads(result.read_text()) | {"identity": identity}))
    return [read_losses(result) for result in checkpoints]


def read_losses(result: Path) -> Losses:
    """Return the losses of a JSON file."""
    return Losses(**{name: value for name, value in json.loads(result.read_text()).items() if name != "identity"})


def _identity(result: Path) -> dict | None:
    return json.loads(result.read_text()).get("identity") if result.is_file() else None


def main(arguments: list[str] | None = None) -> None:
    """Evaluate checkpoints."""
    import torch

    from .bridge import MegatronModel, latest_iteration, start_megatron

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path)
    parser.add_argument("pairs", nargs="+", metavar="RESULT=CHECKPOINT")
    options = parser.parse_args(arguments)
    settings = settings_from(json.loads(options.settings.read_text()))
    config = attention_config(settings)
    start_megatron(config)
    model = MegatronModel(settings.model_folder, load_weights=False, sparse=config is not None)
    documents = held_out_tokens(settings)
    for pair in options.pairs:
        result, _, checkpoint = pair.partition("=")
        model.load(latest_iteration(Path(checkpoint)) or Path(checkpoint))
        losses = document_losses(documents, lambda document: model.losses(torch.from_numpy(document)[None])[0])
        write_atomically(Path(result), json.dumps(dataclasses.asdict(losses)))


def document_losses(documents: numpy.ndarray, losses_of: Callable[[numpy.ndarray], Tensor]) -> Losses:
    """Return the summary of the losses of token numbers ``[documents, tokens]``, a document at a time.

    Args:
        documents: token numbers.
        losses_of: function from a document to the losses of its tokens from the second on.
    """
    progress = Progress("held-out loss", len(documents), "documents")
    losses = []
    for number, document in enumerate(documents, start=1):
        losses.append(losses_of(document).float().cpu().numpy())
        progress.update(number, f"{float(losses[-1].mean()):.4f}")
    progress.close()
    return summarise(numpy.stack(losses))


def attention_config(settings: Settings) -> MTrainingConfig | None:
    """Return the configuration of this package's attention that a run has by its flags, None for Megatron's own."""
    from megatron_mtraining.megatron import add_arguments, config_from_args

    flags = attention_flags(settings, **devices()) | settings.train.flags
    if flags.get("--attention-backend") != "mtraining":
        return None
    return config_from_args(add_arguments(argparse.ArgumentParser()).parse_args(mtraining_words(flags)))


def mtraining_words(flags: dict) -> list[str]:
    """Return the words of this package's flags among those of a launch config."""
    words = []
    for flag, value in flags.items():
        if flag.startswith("--mtraining-") and value is not False:
            values = [] if value is True or value is None else value if isinstance(value, list) else [value]
            words += [flag, *map(str, values)]
    return words


if __name__ == "__main__":
    main()
