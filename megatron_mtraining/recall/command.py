"""The command line ``mtraining recall``.

    mtraining recall --model FOLDER --text book.txt --length 65536
    mtraining recall --load layer1.pt layer2.pt            # query and key of layers, from a Megatron run for example
    mtraining recall --load layer1.pt --mtraining-index-sharing kv_group      # and the selection of a run's flags

Every layer of the model reads the text with dense attention. On its queries and keys each selection chooses, and the
share of dense attention on the chosen keys is measured at rows that no selection looked at.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from ..arguments import CommandParser, add_arguments, config_from_args
from ..config import MTrainingConfig
from ..errors import InvalidError, as_integer, invalid
from .layers import load_layer, read_tokens, run_model
from .measure import TARGETS, Measurement, propose, selections
from .report import advice, as_dict, figure, layer_table, table

LEGEND = (
    "density: computed pairs as a share of the causal ones; recall: share of dense attention on selected keys, mean "
    "over layers and heads, at rows of the last three quarters that no selection probed."
)


def main(argv: Sequence[str]) -> None:
    """Measure, print the table, and write ``recall.json`` and ``recall.png`` where ``--out`` asks for them."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _run(options)
    except (ImportError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mtraining recall", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder (needs the extra hf)")
    source.add_argument("--load", type=Path, nargs="+", metavar="FILE", help="files of torch.save, one for each layer")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts for --model, or .npy files of tokens: [tokens] or [texts, tokens]",
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of a text that are read")
    parser.add_argument("--max-texts", type=int, default=1, help="texts that are read")
    parser.add_argument("--rows", type=int, default=64, help="held-out rows to measure")
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS), help="target_recall of selections")
    parser.add_argument("--goal", type=float, default=0.95, help="recall that the proposal must reach")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for recall.json and recall.png")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return add_arguments(parser)


def _run(options: argparse.Namespace) -> None:
    as_integer("--rows", options.rows, least=1)
    as_integer("--max-texts", options.max_texts, least=1)
    if not 0 < options.goal <= 1:
        raise invalid("--goal", "in (0, 1]", options.goal)
    if options.model is not None and not options.text:
        raise InvalidError("--text must be given with --model, got nothing. Give a text or a .npy file of tokens.")
    calls = [load_layer(path, i + 1) for i, path in enumerate(options.load or ())]
    length = calls[0].query.shape[1] if calls else as_integer("--length", options.length, least=2)
    configs = selections(length=length, targets=tuple(options.targets))
    own = replace(config_from_args(options), dense_below=0)
    if own != replace(MTrainingConfig(), dense_below=0):
        configs["these flags"] = own
    measurement = Measurement(configs, options.rows)
    with torch.no_grad():
        for call in calls:
            measurement.take(replace(call, query=call.query.to(options.device), key=call.key.to(options.device)))
    if options.model is not None:
        texts = islice(read_tokens(options.text, options.model, length=length), options.max_texts)
        run_model(options.model, texts, length=length, device=options.device, take=measurement.take)
    summaries = {name: measurement.summary(name) for name in configs}
    proposal = propose(configs, summaries, goal=options.goal)
    result = as_dict(configs, summaries, proposal)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        parts = table(summaries), LEGEND, layer_table(summaries), advice(proposal, goal=options.goal)
        print("\n\n".join(parts))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "recall.json").write_text(json.dumps(result, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            figure(configs, summaries, options.out / "recall.png")
