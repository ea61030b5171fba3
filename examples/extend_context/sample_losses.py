"""Losses of the samples of ``mtraining evaluate`` inside Megatron, with the weights of a checkpoint of pretrain_gpt.py.

    mtraining evaluate MODEL --tasks perplexity,copy --lengths 32K --text book.txt --prepare SAMPLES
    python -m examples.extend_context.sample_losses MODEL CHECKPOINT --prepared SAMPLES --result losses.json

The first command needs no weights. The second one has the flags of this package's attention, and ``--dense``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.arguments import add_arguments, config_from_args
from megatron_mtraining.console import text_table
from megatron_mtraining.errors import InvalidError, invalid

from .progress import Progress
from .tokens import write_atomically


def main(arguments: list[str] | None = None) -> int:
    """Print mean losses by benchmark and length; return 0, or 2 after a sentence for what the user must change."""
    parser = argparse.ArgumentParser(prog="python -m examples.extend_context.sample_losses", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder, of which config.json counts")
    parser.add_argument("checkpoint", type=Path, help="Megatron checkpoint, of which the latest iteration counts")
    parser.add_argument("--prepared", type=Path, required=True, help="folder that mtraining evaluate --prepare wrote")
    parser.add_argument("--result", type=Path, help="JSON file of the loss of each sample")
    parser.add_argument("--dense", action="store_true", help="attend to every key, by Megatron's own attention")
    options = add_arguments(parser).parse_args(arguments)
    try:
        config = config_from_args(options)
        if options.dense and config != MTrainingConfig():
            parser.error("unsupported: --dense with --mtraining-... flags, which it ignores. Leave one of them out.")
        config = None if options.dense else replace(config, dense_below=0)
        losses = sample_losses(options.model, options.checkpoint, options.prepared, config)
    except InvalidError as error:
        print(f"sample_losses: {error}", file=sys.stderr)
        return 2
    if options.result is not None:
        write_atomically(options.result, json.dumps(losses, indent=1))
    groups: dict[tuple[str, int], list[float]] = {}
    for entry in losses:
        groups.setdefault((entry["benchmark"], entry["length"]), []).append(entry["value"])
    rows = [[*map(str, key), f"{statistics.mean(each):.4f}", str(len(each))] for key, each in groups.items()]
    print("\n".join(text_table(["benchmark", "length", "nats a token", "samples"], rows)))
    return 0


def sample_losses(
    model_folder: Path, checkpoint: Path, prepared: Path, config: MTrainingConfig | None
) -> list[dict[str, object]]:
    """Return benchmark, length and number of each sample without an answer, and what is measured on its losses.

    Args:
        model_folder: a Hugging Face folder.
        checkpoint: Megatron's, or one ``iter_`` folder of it.
        prepared: folder of samples.
        config: of sparse attention; None for Megatron's own.

    Raises:
        ValueError: the samples or the checkpoint cannot be read.
    """
    import torch

    from megatron_mtraining.evaluate.sample import read_samples
    from megatron_mtraining.evaluate.texts import measure

    from .bridge import MegatronModel, latest_iteration, start_megatron

    samples = [sample for sample in read_samples(prepared) if not sample.max_new_tokens]
    if not samples:
        raise invalid("--prepared", "a folder with samples of perplexity or copy", prepared)
    iteration = latest_iteration(checkpoint) or checkpoint
    if not (iteration / "metadata.json").is_file():
        raise invalid("CHECKPOINT", "a Megatron checkpoint", checkpoint)
    start_megatron(config)
    model = MegatronModel(model_folder, load_weights=False, sparse=config is not None)
    model.load(iteration)
    progress, found = Progress("losses", len(samples), "samples"), []
    for count, sample in enumerate(samples, start=1):
        losses = model.losses(torch.tensor(sample.tokens[None], dtype=torch.int64), with_last=True)[0]
        entry = {name: getattr(sample, name) for name in ("benchmark", "length", "number")}
        found.append(entry | sample.coordinates | measure(sample, losses.numpy()))
        progress.update(count, f"{found[-1]['value']:.4f}")
    progress.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
