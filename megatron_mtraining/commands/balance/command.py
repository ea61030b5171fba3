"""``mtraining balance``: an index replayed over layouts, schedules and numbers of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...arguments import CommandParser
from ...config import INDEX_SHARINGS, LAYOUTS, SCHEDULES
from ...console import check_folder, list_of, num_tokens, number, print_lines, whole_number
from ...errors import invalid
from ...metrics import Recording, density
from ...metrics.synthetic import IndexShape, synthetic_index
from ...planner.clock import CallSizes
from ...planner.profile import load_profile
from ...types import VerticalSlashIndex
from .replay import GATHERED, IN_RING, TOKEN_STRIPED, Replay, Replayer
from .report import LEGEND, ablation_lines, table_lines, write_json

_DESCRIPTION = """\
Counts work, traffic and waiting of each rank for an index, over layouts, schedules and numbers of ranks. Counts are
exact; times are predicted from a profile. No GPU is needed; docs/balance.md has the definitions.

  mtraining balance INDEX.json --world 4,8,32,128,1024 --node 8
  mtraining balance clustered --seq 512K --world 32 --schedules hierarchical,flat
  mtraining balance INDEX.json --profile measured.json --output outputs/balance"""

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
    add("index", help="a recorded index (metrics.Recording), or random or clustered: synthetic ones")
    add("--world", type=list_of(size), default=[4, 8, 32, 128, 1024], help="numbers of ranks, comma-separated")
    add("--node", type=size, default=8, help="ranks in a node (8)")
    add("--seq", type=num_tokens(2**26), help="tokens; default: the recorded length, stretched to 512K or more")
    add("--stretch", choices=("starts", "scattered"), default="starts", help="see docs/balance.md")
    add("--heads", type=size, default=16, help="query heads (16)")
    add("--kv-heads", type=size, default=2, help="key/value heads (2)")
    add("--head-dim", type=size, default=128, help="(128)")
    add("--index-sharing", choices=INDEX_SHARINGS, default="head", help="kv_group: heads of a group share a list")
    layouts = list_of(str, (*LAYOUTS, TOKEN_STRIPED))
    add("--layouts", type=layouts, default=[*DRAWN_FIRST, TOKEN_STRIPED], help="comma-separated; default: all")
    add("--schedules", type=list_of(str, SCHEDULES), default=SCHEDULES, help="comma-separated; default: all")
    add("--profile", default="h200", help="h200, h100, a100, or a JSON file of a Profile's fields")
    add("--inner-gb-s", type=number(1e-3, 1e6), help="overrides the profile: GB/s of a rank inside its node")
    add("--outer-gb-s", type=number(1e-3, 1e6), help="overrides the profile: GB/s of a rank between nodes")
    add("--output", type=Path, default=Path("outputs/balance"), help="folder of balance.json and PNGs")
    add("--no-figures", dest="without_plots", action="store_true", help="draw nothing")
    return parser


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
        print_lines(_lines(options, argv))
    except ValueError as error:
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
    for cp_size in sorted(options.world):
        of_one = list(replayer.replays(cp_size, options.layouts, options.schedules))
        yield from table_lines(of_one)
        replays += of_one
    drawn = min(sorted(options.world), key=lambda cp_size: abs(cp_size - DRAWN_RANKS))
    ablation = ablation_of(replayer, drawn)
    yield from ablation_lines(ablation)
    setting = {"command": ["mtraining", "balance", *argv], "index": options.index}
    setting |= {"density": share, "tokens": sizes.seq_len}
    path = options.output / "balance.json"
    write_json(path, setting=setting, profile=profile, replays=replays, ablation=ablation)
    yield from ("", str(path))
    yield from ([] if options.without_plots else map(str, draw(replays, ablation, drawn, options.output)))
