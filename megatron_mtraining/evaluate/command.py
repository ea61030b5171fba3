"""The command line ``mtraining evaluate``.

    mtraining evaluate MODEL --tasks niah,copy --lengths 4K,8K --inference dense,mtraining --text book.txt --out OUT
    torchrun --nproc-per-node 8 -m megatron_mtraining evaluate MODEL ...         # samples divided over the GPUs
    mtraining evaluate MODEL ... --prepare FOLDER; mtraining evaluate MODEL ... --prepared FOLDER --out OUT

Each model reads each sample with each kind of inference, which is how the prompt is read; tokens are generated with
dense attention. An interrupted run continues where it ended, and gives the same results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ..arguments import CommandParser, add_arguments, config_from_args
from ..config import MTrainingConfig
from ..console import check_folder, list_of, num_tokens, whole_number
from ..errors import InvalidError, invalid
from . import inference, infinitebench, ruler
from .benchmarks import BENCHMARKS, make_samples
from .model import Evaluated, load_config, load_tokenizer
from .report import write_report
from .results import Request, ResultFile
from .sample import Sample, check_samples, read_samples, write_samples
from .source import Source


def main(argv: Sequence[str]) -> None:
    """Evaluate, and write results, tables and pictures into ``--out``; or with ``--prepare`` the samples alone."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _check(options)
        if options.prepare is not None:
            _prepare(options)
        else:
            _evaluate(options)
    except (ImportError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mtraining evaluate", description=__doc__)
    parser.add_argument("models", metavar="MODEL", type=Path, nargs="+", help="Hugging Face folders")
    parser.add_argument(
        "--tasks",
        dest="benchmarks",
        type=list_of(str, tuple(BENCHMARKS)),
        default=["niah"],
        metavar="NAMES",
        help=f"some of {', '.join(BENCHMARKS)}; default: niah",
    )
    parser.add_argument(
        "--lengths", type=list_of(num_tokens(2**24)), default=[4096], metavar="N,...", help="tokens, as 4K,8K"
    )
    parser.add_argument(
        "--inference",
        type=list_of(str, inference.NAMES),
        default=["dense", "mtraining"],
        metavar="NAMES",
        help=f"some of {', '.join(inference.NAMES)}; default: dense,mtraining. mtraining: the configuration saved with "
        "the model, or that of --mtraining-... flags",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of results, tables and pictures")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE", help="texts, or .npy files of tokens"
    )
    parser.add_argument("--samples", type=whole_number(1, 10**6), default=4, help="samples of each setting; default: 4")
    parser.add_argument("--seed", type=whole_number(0, 2**31), default=0)
    parser.add_argument("--depths", type=whole_number(1, 1000), default=5, help="depths of the needle; default: 5")
    parser.add_argument("--needles", type=whole_number(1, 32), default=1, help="needles, one of which is asked for")
    parser.add_argument(
        "--infinitebench", type=Path, metavar="FOLDER", help="folder of InfiniteBench's published files"
    )
    parser.add_argument(
        "--ruler", type=Path, metavar="FOLDER", help="folder of the files that lm-eval would download for RULER"
    )
    parts = {"infinitebench": infinitebench.PARTS, "ruler": ruler.PARTS}
    parser.add_argument(
        "--parts",
        type=list_of(str, [name for each in parts.values() for name in each]),
        metavar="NAMES",
        help="; ".join(f"of {name}: some of {', '.join(each)}" for name, each in parts.items())
        + f"; default: {', '.join(infinitebench.GENERATED)} and all of ruler",
    )
    parser.add_argument("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder of the tokenizer; default: the model's"
    )
    parser.add_argument(
        "--stretch-positions", action="store_true", help="stretch positions of a model by YaRN where a length needs it"
    )
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="evaluate every Nth sample, from the Ith; from 0/N")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    prepared = parser.add_mutually_exclusive_group()
    prepared.add_argument("--prepare", type=Path, metavar="FOLDER", help="write all samples, and evaluate nothing")
    prepared.add_argument("--prepared", type=Path, metavar="FOLDER", help="read the samples that --prepare wrote")
    return add_arguments(parser)


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I below N, such as 0/8, got {text:.40}.")
    return int(match[1]), int(match[2])


def _check(options: argparse.Namespace) -> None:
    names = [folder.resolve().name for folder in options.models]
    if len(set(names)) < len(names):
        raise invalid("MODEL", "folders with different names", ", ".join(names))
    if options.prepare is None and options.out is None:
        raise InvalidError("--out must be given, got nothing. Give a folder for the results, or --prepare.")
    given = {"--infinitebench": options.infinitebench and infinitebench.NAME, "--ruler": options.ruler and ruler.NAME}
    for name in options.parts or ():
        given[f"--parts {name}"] = ruler.NAME if name in ruler.PARTS else infinitebench.NAME
    for flag, benchmark in given.items():
        if benchmark and benchmark not in options.benchmarks:
            raise InvalidError(f"unsupported: {flag} without {benchmark} in --tasks. Add it, or leave the flag out.")


def _make(options: argparse.Namespace, tokenizer: object) -> list[Sample]:
    source = Source(
        tokenizer,
        texts=options.text,
        samples=options.samples,
        seed=options.seed,
        chat=options.chat,
        depths=options.depths,
        needles=options.needles,
        infinitebench=options.infinitebench,
        ruler=options.ruler,
        parts=options.parts or (),
    )
    return list(make_samples(source, options.benchmarks, options.lengths))


def _tokenizer(options: argparse.Namespace, folder: Path) -> object:
    return load_tokenizer(options.tokenizer or folder)


def _prepare(options: argparse.Namespace) -> None:
    tokenizer = _tokenizer(options, options.models[0])
    check_folder("--prepare", options.prepare)
    count = write_samples(options.prepare, _make(options, tokenizer))
    print(f"{count} samples in {options.prepare}")


def _evaluate(options: argparse.Namespace) -> None:
    check_folder("--out", options.out)
    shard, num_shards = options.shard or (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    tokenizers, samples = _samples(options)
    loaded = [load_config(folder, samples, stretch=options.stretch_positions) for folder in options.models]
    own = config_from_args(options)
    own = None if own == MTrainingConfig() else own
    file = ResultFile(options.out, shard, num_shards)
    requests: list[Request] = []
    facts: dict[str, object] = {"version": _version(), "models": {}, "inference": {}}
    for folder, (config, factor), tokenizer in zip(options.models, loaded, tokenizers, strict=True):
        check_samples(samples, vocab_size=config.get_text_config().vocab_size)
        if factor > 1 and not shard:
            print(f"positions of {folder.name} stretched by YaRN, factor {factor}", file=sys.stderr)
        model = Evaluated.load(folder, config, tokenizer, own, device=device)
        facts["models"][model.name] = model.facts | {"stretched": factor}
        requests += _run_model(model, samples, options.inference, file, (shard, num_shards), facts["inference"])
        del model
    results = file.read()
    missing = sum(request.digest not in results for request in requests)
    if missing:
        print(f"{missing} of {len(requests)} results are missing: the shard that ends last writes the report.")
        return
    print(write_report(options.out, requests, results, facts))


def _samples(options: argparse.Namespace) -> tuple[list[object], list[Sample]]:
    """Return the tokenizer of each model, and the samples.

    Raises:
        ValueError: the models' tokenizers differ, or one is missing that is needed.
    """
    if options.prepared is not None:
        samples = [each for each in read_samples(options.prepared) if _is_asked_for(each, options)]
        if not samples:
            raise invalid("--prepared", "a folder with samples of --tasks and --lengths", options.prepared)
        if not any(sample.max_new_tokens for sample in samples):
            return [None] * len(options.models), samples
    tokenizers = [_tokenizer(options, folder) for folder in options.models]
    if any(each.get_vocab() != tokenizers[0].get_vocab() for each in tokenizers):
        raise invalid("MODEL", "folders with the same vocabulary", "others", "Evaluate them one by one.")
    return tokenizers, samples if options.prepared is not None else _make(options, tokenizers[0])


def _is_asked_for(sample: Sample, options: argparse.Namespace) -> bool:
    return sample.length in options.lengths and sample.benchmark.partition("/")[0] in options.benchmarks


def _run_model(
    model: Evaluated,
    samples: Sequence[Sample],
    names: Sequence[str],
    file: ResultFile,
    shard: tuple[int, int],
    configs: dict[str, object],
) -> list[Request]:
    """Evaluate this shard's samples that have no result yet; return the requests of all shards."""
    requests, mine = [], []
    for i, sample in enumerate(samples):
        for name in names:
            config = inference.config_of(name, model.own, length=sample.length)
            configs.setdefault(f"{model.name}, {name}, {sample.length}", asdict(config))
            facts = json.dumps([_version(), model.facts, asdict(config)], sort_keys=True)
            request = Request(model.name, name, sample, sample.digest(model.name, name, facts))
            requests.append(request)
            if i % shard[1] == shard[0]:
                mine.append((request, config))
    results, began, count = file.read(), time.perf_counter(), 0
    # Errors: samples of the same benchmark and inference that are as long or longer are not tried.
    too_long: dict[tuple[str, str], str] = {}
    for i, (request, config) in enumerate(mine):
        sample, key = request.sample, (request.sample.benchmark, request.inference)
        if "value" in results.get(request.digest, ()):
            continue
        _show(f"{i + 1} of {len(mine)}: {model.name}, {sample.benchmark}, {sample.length}")
        result = None if key in too_long else _evaluate_within_memory(model, sample, config)
        if result is None:
            too_long.setdefault(key, _out_of_memory(model, request))
        file.append(request, {"error": too_long[key]} if result is None else result)
        count += result is not None
    _show("")
    print(f"{model.name}: {count} results in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return requests


def _evaluate_within_memory(model: Evaluated, sample: Sample, config: MTrainingConfig) -> dict[str, object] | None:
    """Return the result, or None where the device has not enough memory."""
    try:
        return model.evaluate(sample, config)
    except torch.OutOfMemoryError:
        pass  # behind this block the error no longer refers to tensors
    torch.cuda.empty_cache()
    return None


def _out_of_memory(model: Evaluated, request: Request) -> str:
    rule = f"small enough for the memory of {model.model.device}"
    got = f"{request.sample.length} ({model.name}, {request.sample.benchmark}, {request.inference})"
    remedy = "Lower it, or run the same command on a GPU with more memory, which measures what is missing."
    return str(invalid("--lengths", rule, got, remedy))


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _version() -> str:
    try:
        return importlib.metadata.version("megatron-mtraining")
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return "source"
