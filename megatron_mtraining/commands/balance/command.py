"""``mtraining balance``: an index, or every selection on a model's layers, over layouts, schedules and ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from ...arguments import CommandParser, add_arguments, config_from_args
from ...config import INDEX_SHARINGS, LAYOUTS, SCHEDULES, MTrainingConfig
from ...console import check_folder, list_of, num_tokens, number, print_lines, whole_number
from ...errors import InvalidError, invalid
from ...metrics import Recording, density
from ...planner.clock import CallSizes
from ...planner.profile import load_profile
from ...recall.layers import load_layer, read_tokens, run_model
from ...recall.measure import selections
from ...types import VerticalSlashIndex
from .layers import LEGEND as LAYER_LEGEND
from .layers import LayerReplayer
from .replay import GATHERED, IN_RING, TOKEN_STRIPED, Replay, Replayer
from .report import LEGEND, ablation_lines, table_lines, write_json, write_layers
from .synthetic import IndexShape, synthetic_index

_DESCRIPTION = """\
Counts work, traffic and waiting of each rank for an index, over layouts, schedules and numbers of ranks. Counts are
exact; times are predicted from a profile. No GPU is needed; docs/balance.md has the definitions.

  mtraining balance INDEX.json --world 4,8,32,128,1024 --node 8
  mtraining balance clustered --seq 512K --world 32 --schedules hierarchical,flat
  mtraining balance INDEX.json --profile measured.json --output outputs/balance

Of layers, with queries and keys of their own, every selection of mtraining recall is counted, block lists included:

  mtraining balance --model FOLDER --text book.txt --length 16384 --world 32
  mtraining balance --load layer1.pt layer2.pt --world 32 --selections xattention"""

DEFAULT_WORLDS = (4, 8, 32, 128, 1024)
SHORTEST_DEFAULT_SEQ = 524288
DRAWN_RANKS = 32
"""Ranks of the figures of one ring, as many as the paper had."""

DRAWN_FIRST = ("striped", "node_striped", "rotated", "zigzag", "contiguous")
"""The package's layouts in the order of table and figures."""

SYNTHETIC = {"random": 1, "clustered": 16}
"""Neighbours in a run of distances or columns, as in tools.bench."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.heads % options.kv_heads:
        parser.error(str(invalid("--heads", f"a multiple of --kv-heads {options.kv_heads}", options.heads)))
    return options


def _parser() -> CommandParser:
    parser = CommandParser(prog="mtraining balance", description=_DESCRIPTION)
    add, size = parser.add_argument, whole_number(1, 2**20)
    source = parser.add_mutually_exclusive_group(required=True)
    text = "a recorded index (metrics.Recording), or random or clustered: synthetic ones"
    source.add_argument("index", nargs="?", help=text)
    source.add_argument("--load", type=Path, nargs="+", metavar="FILE", help="query and key of a layer each, as recall")
    source.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder (needs the extra hf)")
    of_layers = parser.add_argument_group("layers, with --load or --model")
    text = "a text for --model, or .npy file of tokens, of which the first text counts"
    of_layers.add_argument("--text", type=Path, metavar="FILE", help=text)
    of_layers.add_argument("--length", type=num_tokens(2**26), default=8192, help="tokens of the text (8192)")
    text = "layers of the model, from 1, comma-separated; default: all"
    of_layers.add_argument("--layers", type=list_of(whole_number(1, 10**4)), help=text)
    text = "dense, or those of mtraining recall, comma-separated; default: all, and that of --mtraining-* flags"
    of_layers.add_argument("--selections", type=list_of(str), help=text)
    text = "numbers of ranks, comma-separated; default: 4,8,32,128,1024, of layers 32"
    add("--world", type=list_of(size), help=text)
    add("--node", type=size, default=8, help="ranks in a node (8)")
    add("--seq", type=num_tokens(2**26), help="tokens; default: the recorded length, stretched to 512K or more")
    add("--stretch", choices=("starts", "scattered"), default="starts", help="see docs/balance.md")
    add("--heads", type=size, default=16, help="query heads (16)")
    add("--kv-heads", type=size, default=2, help="key/value heads (2)")
    add("--head-dim", type=size, default=128, help="(128)")
    add("--index-sharing", choices=INDEX_SHARINGS, default="head", help="kv_group: heads of a group share a list")
    layouts = list_of(str, (*LAYOUTS, TOKEN_STRIPED))
    add("--layouts", type=layouts, help="comma-separated; default: all, of layers those that a ring runs on")
    add("--schedules", type=list_of(str, SCHEDULES), default=SCHEDULES, help="comma-separated; default: all")
    add("--profile", default="h200", help="h200, h100, a100, or a JSON file of a Profile's fields")
    add("--inner-gb-s", type=number(1e-3, 1e6), help="overrides the profile: GB/s of a rank inside its node")
    add("--outer-gb-s", type=number(1e-3, 1e6), help="overrides the profile: GB/s of a rank between nodes")
    add("--output", type=Path, default=Path("outputs/balance"), help="folder of balance.json and PNGs")
    add("--no-figures", dest="without_plots", action="store_true", help="draw nothing")
    return add_arguments(parser)


def index_of(options: argparse.Namespace) -> tuple[VerticalSlashIndex, CallSizes]:
    """Return the index at the requested length."""
    num_lists = options.kv_heads if options.index_sharing == "kv_group" else options.heads
    if options.index in SYNTHETIC:
        seq_len = options.seq or SHORTEST_DEFAULT_SEQ
        shape = IndexShape(run=SYNTHETIC[options.index])
        index = synthetic_index(shape, seq_len=seq_len, num_lists=num_lists)
    else:
        recording = Recording.load(Path(options.index))
        seq_len = options.seq or -(-SHORTEST_DEFAULT_SEQ // recording.seq_len) * recording.seq_len
        scatter = torch.Generator().manual_seed(0) if options.stretch == "scattered" else None
        index = recording.index(seq_len=seq_len, num_heads=num_lists, scatter=scatter)
    heads = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "head_dim": options.head_dim}
    return index.per_head(options.heads), CallSizes(seq_len=seq_len, **heads, num_lists=num_lists)


def ablation_of(replayer: Replayer, cp_size: int) -> list[tuple[str, Replay]]:
    """Replay the paper's method, each part of it taken away, and dense attention."""

    def one(layout: str, schedule: str, verticals: str = GATHERED) -> Replay:
        return next(r for r in replayer.replays(cp_size, [layout], [schedule]) if r.verticals == verticals)

    return [
        ("striped, hierarchical (ours)", one("striped", "hierarchical")),
        ("node_striped instead of striped", one("node_striped", "hierarchical")),
        ("node_striped, gather", one("node_striped", "gather")),
        ("rotated instead of striped", one("rotated", "hierarchical")),
        ("verticals inside the ring", one("striped", "hierarchical", IN_RING)),
        ("w/ ZigZag", one("zigzag", "hierarchical")),
        ("w/o hierarchical", one("striped", "flat")),
        ("dense, ZigZag, hierarchical", replayer.dense(cp_size, layout="zigzag", schedule="hierarchical")),
        ("dense, ZigZag, flat", replayer.dense(cp_size, layout="zigzag", schedule="flat")),
    ]


def draw(replays: list[Replay], ablation: list[tuple[str, Replay]], drawn: int, folder: Path) -> list[Path]:
    """Draw the four figures of the first schedule that was asked for and write them."""
    try:
        from . import figures
    except ModuleNotFoundError as error:
        remedy = "Run pip install 'megatron-mtraining[demo]', or give --no-figures."
        raise invalid("matplotlib", "installed to draw figures", f"{error}", remedy) from None
    schedule = replays[0].ring.kind
    over_ranks = [replay for replay in replays if replay.ring.kind == schedule]
    of_one = [replay for replay in over_ranks if replay.ring.cp_size == drawn and replay.verticals == GATHERED]
    names = ("work_by_rank_and_step", "balance_of_ranks_and_steps", "imbalance_over_ranks", "ablation")
    paths = [folder / f"{name}.png" for name in names]
    figures.draw_heat(of_one, paths[0])
    figures.draw_imbalance(of_one, paths[1])
    figures.draw_over_ranks(over_ranks, paths[2])
    figures.draw_ablation(ablation, paths[3])
    return paths


def main(argv: Sequence[str]) -> None:
    """Print the table, write it, and draw it; exit with status 2 and one sentence where that is impossible."""
    options = parse_arguments(argv)
    try:
        check_folder("--output", options.output)
        print_lines((_lines if options.index is not None else _lines_of_layers)(options, argv))
    except (ImportError, ValueError) as error:
        _parser().error(str(error))


def _lines(options: argparse.Namespace, argv: Sequence[str]) -> Iterator[str]:
    """Yield what is printed, and write and draw the same."""
    profile = load_profile(options.profile, inner_gb_s=options.inner_gb_s, outer_gb_s=options.outer_gb_s)
    index, sizes = index_of(options)
    replayer = Replayer(index=index, sizes=sizes, profile=profile, node_size=options.node)
    share = float(density(index, seq_len=sizes.seq_len).mean())
    heads = f"{sizes.num_heads}/{sizes.num_kv_heads} heads, head_dim {sizes.head_dim}"
    yield f"{options.index}: {sizes.seq_len} tokens, {heads}, density {100 * share:.2f} %"
    yield f"profile: {profile.source}"
    yield LEGEND
    replays: list[Replay] = []
    worlds, layouts = sorted(options.world or DEFAULT_WORLDS), options.layouts or [*DRAWN_FIRST, TOKEN_STRIPED]
    for cp_size in worlds:
        of_one = list(replayer.replays(cp_size, layouts, options.schedules))
        yield from table_lines(of_one)
        replays += of_one
    drawn = min(worlds, key=lambda cp_size: abs(cp_size - DRAWN_RANKS))
    ablation = ablation_of(replayer, drawn)
    yield from ablation_lines(ablation)
    setting = {"command": ["mtraining", "balance", *argv], "index": options.index}
    setting |= {"density": share, "tokens": sizes.seq_len}
    path = options.output / "balance.json"
    write_json(path, setting=setting, profile=profile, replays=replays, ablation=ablation)
    yield from ("", str(path))
    yield from ([] if options.without_plots else map(str, draw(replays, ablation, drawn, options.output)))


def _lines_of_layers(options: argparse.Namespace, argv: Sequence[str]) -> Iterator[str]:
    """Yield what is printed of layers, and write the same."""
    if options.model is not None and options.text is None:
        raise InvalidError("--text must be given with --model, got nothing. Give a text or a .npy file of tokens.")
    if TOKEN_STRIPED in (options.layouts or ()):
        raise InvalidError(f"unsupported: --layouts {TOKEN_STRIPED} with layers. Nothing runs on it; leave it out.")
    if options.layers and options.model is None:
        raise InvalidError("unsupported: --layers with --load. Give the files of these layers only.")
    calls = [load_layer(path, i + 1) for i, path in enumerate(options.load or ())]
    length = calls[0].query.shape[1] if calls else options.length
    replayer = LayerReplayer(
        layers=options.layers,
        configs=_selections(options, length),
        worlds=sorted(options.world or [DRAWN_RANKS]),
        layouts=options.layouts or DRAWN_FIRST,
        schedules=options.schedules,
        node_size=options.node,
    )
    with torch.no_grad():
        for call in calls:
            replayer.take(call)
    if options.model is not None:
        texts = read_tokens([options.text], options.model, length=length)
        run_model(options.model, islice(texts, 1), length=length, device="cpu", take=replayer.take)
    source = options.model or ", ".join(map(str, options.load))
    yield f"{source}: {length} tokens"
    yield LAYER_LEGEND
    yield from replayer.lines()
    setting = {"command": ["mtraining", "balance", *argv], "tokens": length, "source": str(source)}
    yield from ("", str(write_layers(options.output / "balance.json", setting=setting, replayer=replayer)))


def _selections(options: argparse.Namespace, length: int) -> dict[str, MTrainingConfig]:
    """Return the selections to count, by name: dense, those of ``mtraining recall``, and that of the flags if given."""
    configs = {"dense": MTrainingConfig(pattern="dense")}
    configs |= selections(length=length, targets=(MTrainingConfig().target_recall,))
    own = replace(config_from_args(options), dense_below=0)
    if own != replace(MTrainingConfig(), dense_below=0):
        configs["these flags"] = own
    names = options.selections or list(configs)
    if unknown := [name for name in names if name not in configs]:
        raise invalid("--selections", f"some of {', '.join(configs)}", ", ".join(unknown))
    return {name: configs[name] for name in names}
