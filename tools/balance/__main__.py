"""Replay a recorded index over layouts, schedules and numbers of ranks: work, traffic and waiting of each rank.

    python -m tools.balance tools/bench/data/tiny_gpt.json --world 4,8,32,128,1024 --node 8
    python -m tools.balance clustered --seq 524288 --world 32 --schedules hierarchical,flat
    python -m tools.balance INDEX.json --profile measured.json --output outputs/balance

Counts are exact; times are predicted from a profile. No GPU is needed. See docs/balance.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megatron_mtraining.config import INDEX_SHARINGS, LAYOUTS, SCHEDULES
from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import Recording, density
from megatron_mtraining.planner.clock import CallSizes
from megatron_mtraining.planner.profile import Profile, load_profile
from megatron_mtraining.types import VerticalSlashIndex
from tools.bench.indices import IndexShape, synthetic_index
from tools.bench.problem import Problem
from tools.folders import check_folder

from .replay import GATHERED, IN_RING, TOKEN_STRIPED, Replay, Replayer
from .report import LEGEND, ablation_lines, table_lines, write_json

SHORTEST_DEFAULT_SEQ = 524288
DRAWN_RANKS = 32
"""Ranks of the figures of one ring, as many as the paper had."""

DRAWN_FIRST = ("striped", "node_striped", "rotated", "zigzag", "contiguous")
"""The package's layouts in the order of table and figures."""

SYNTHETIC = {"random": 1, "clustered": 16}
"""Neighbours in a run of distances or columns, as in tools.bench."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.balance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", help="a file of tools.bench.record, or random or clustered as in tools.bench")
    parser.add_argument("--world", default="4,8,32,128,1024", help="numbers of ranks, comma-separated")
    parser.add_argument("--node", type=int, default=8, help="ranks in a node")
    parser.add_argument("--seq", type=int, help="tokens; default: the recorded length, stretched to 524288 or more")
    parser.add_argument("--stretch", choices=("starts", "scattered"), default="starts", help="see docs/balance.md")
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--index-sharing", choices=INDEX_SHARINGS, default="head", help="kv_group: heads of a group share a list"
    )
    parser.add_argument("--layouts", default=",".join((*DRAWN_FIRST, TOKEN_STRIPED)), help="token_striped is a model")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--profile", default="h200", help="h200, h100, a100, or a JSON file of a Profile's fields")
    parser.add_argument("--inner-gb-s", type=float, help="overrides the profile: GB/s of a rank inside its node")
    parser.add_argument("--outer-gb-s", type=float, help="overrides the profile: GB/s of a rank between nodes")
    parser.add_argument("--output", type=Path, default=Path("outputs/balance"), help="folder of balance.json and PNGs")
    parser.add_argument("--no-figures", action="store_true", help="draw nothing")
    return parser.parse_args(argv)


def index_of(arguments: argparse.Namespace) -> tuple[VerticalSlashIndex, CallSizes]:
    """Return the index at the length that was asked for."""
    recording = None if arguments.index in SYNTHETIC else Recording.load(Path(arguments.index))
    shortest = SHORTEST_DEFAULT_SEQ if recording is None else recording.seq_len
    seq_len = arguments.seq if arguments.seq is not None else -(-SHORTEST_DEFAULT_SEQ // shortest) * shortest
    problem = Problem(
        seq_len=seq_len,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        index_sharing=arguments.index_sharing,
    )
    if recording is None:
        index = synthetic_index(problem, IndexShape(run=SYNTHETIC[arguments.index]))
    else:
        scatter = torch.Generator().manual_seed(0) if arguments.stretch == "scattered" else None
        index = recording.index(seq_len=seq_len, num_heads=problem.num_lists, scatter=scatter)
    sizes = CallSizes(
        seq_len=seq_len,
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        num_lists=problem.num_lists,
    )
    return index.per_head(arguments.heads), sizes


def profile_of(arguments: argparse.Namespace) -> Profile:
    """Return the profile with the links that were asked for."""
    profile = load_profile(arguments.profile)
    return profile.with_links(inner_gb_s=arguments.inner_gb_s, outer_gb_s=arguments.outer_gb_s)


def worlds_of(text: str) -> list[int]:
    """Return the numbers of ranks, ascending."""
    try:
        worlds = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise invalid("--world", "comma-separated whole numbers", repr(text)) from None
    if worlds[0] < 1:
        raise invalid("--world", "at least 1", worlds[0])
    return worlds


def names_of(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Return comma-separated names, each one known, none twice."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise invalid(flag, f"some of {', '.join(known)}", repr(name))
    return names


def ablation_of(replayer: Replayer, cp_size: int) -> list[tuple[str, Replay]]:
    """Replay what the paper calls ours, each part of it taken away, and dense attention."""

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
        raise invalid(
            "matplotlib", "installed to draw figures", f"{error}", "pip install matplotlib, or give --no-figures."
        ) from None
    schedule = replays[0].ring.kind
    over_ranks = [replay for replay in replays if replay.ring.kind == schedule]
    of_one = [replay for replay in over_ranks if replay.ring.cp_size == drawn and replay.verticals == GATHERED]
    names = ("work_by_rank_and_step", "balance_of_ranks_and_steps", "imbalance_over_ranks", "ablation")
    paths = [folder / f"{name}.png" for name in names]
    figures.draw_heat(of_one, paths[0])
    figures.draw_bars(of_one, paths[1])
    figures.draw_over_ranks(over_ranks, paths[2])
    figures.draw_ablation(ablation, paths[3])
    return paths


def main(argv: list[str] | None = None) -> None:
    """Print the table, write it, and draw it."""
    arguments = parse_arguments(argv)
    try:
        worlds = worlds_of(arguments.world)
        layouts = names_of("--layouts", arguments.layouts, (*LAYOUTS, TOKEN_STRIPED))
        schedules = names_of("--schedules", arguments.schedules, SCHEDULES)
        profile = profile_of(arguments)
        check_folder("--output", arguments.output)
        index, sizes = index_of(arguments)
        replayer = Replayer(index=index, sizes=sizes, profile=profile, node_size=arguments.node)
        kept = float(density(index, seq_len=sizes.seq_len).mean())
        print(
            f"{arguments.index}: {sizes.seq_len} tokens, {sizes.num_heads}/{sizes.num_kv_heads} heads, head_dim "
            f"{sizes.head_dim}, {100 * kept:.2f} % kept\nprofile: {profile.source}\n{LEGEND}"
        )
        replays = []
        for cp_size in worlds:
            of_one = list(replayer.replays(cp_size, layouts, schedules))
            print("\n".join(table_lines(of_one)), flush=True)
            replays += of_one
        drawn = min(worlds, key=lambda cp_size: abs(cp_size - DRAWN_RANKS))
        ablation = ablation_of(replayer, drawn)
        print("\n".join(ablation_lines(ablation)))
        setting = {
            "command": ["python", "-m", "tools.balance", *(sys.argv[1:] if argv is None else argv)],
            "index": arguments.index,
            "density": kept,
            "tokens": sizes.seq_len,
        }
        write_json(
            arguments.output / "balance.json", setting=setting, profile=profile, replays=replays, ablation=ablation
        )
        written = [] if arguments.no_figures else draw(replays, ablation, drawn, arguments.output)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print("\n" + "\n".join(map(str, [arguments.output / "balance.json", *written])))


if __name__ == "__main__":
    main()
