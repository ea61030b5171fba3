"""Print the share of attention that each estimator recalls on rows it has not looked at, against the pairs it keeps.

python -m tools.recall                      # planted sinks, verticals, slashes and locality
python -m tools.recall --index-sharing kv_group
python -m tools.recall --slash-run-length 2
python -m tools.recall --load qk.pt         # query and key of a real layer, from torch.save({"query": ..., "key": ...})
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_mtraining import select
from megatron_mtraining.config import INDEX_SHARINGS, MTrainingConfig
from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import attention_recall, density, held_out_rows
from megatron_mtraining.metrics.lists import slash_runs
from megatron_mtraining.selection import estimator_names
from megatron_mtraining.tensors import check_query_and_key

LEGEND = (
    "kept: % of causal pairs computed; recall: % of attention mass on kept keys at held-out rows, mean over heads "
    "(worst head); columns and distances: per list, always-kept ones included; runs: of neighbours among distances; "
    "p: vertical_top_p/slash_top_p."
)

BUDGETS = [(0.3, 0.5), (0.3, 0.7), (0.5, 0.8), (0.9, 0.9)]
"""(vertical_top_p, slash_top_p)."""

SHORTEST, NARROWEST = 130, 3
"""Tokens and head_dim of a synthetic layer: room for distances from 64 to half of them, and a pair that turns."""

COUNTS = (
    "num_probe_rows",
    "num_probe_windows",
    "sink_tokens",
    "local_blocks",
    "max_vertical",
    "max_slash",
    "slash_run_length",
)
"""Fields that are flags."""

NUM_ROTATED_SHARE = 0.75
"""Share of head_dim that turns with the position in the synthetic data; the rest carries content."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Query and key of one layer."""

    query: Tensor
    """Query ``[batch, seq, num_heads, head_dim]``."""

    key: Tensor
    """Key ``[batch, seq, num_kv_heads, head_dim]``."""

    softmax_scale: float | None = None
    cu_seqlens: Tensor | None = None

    @property
    def options(self) -> dict[str, float | Tensor | None]:
        """Arguments of selection and recall beside the tensors."""
        return {"softmax_scale": self.softmax_scale, "cu_seqlens": self.cu_seqlens}


def rotate(tensor: Tensor, position: Tensor) -> Tensor:
    """Rotate ``[..., seq, dims]`` to ``position`` ``[seq]`` by rotary embedding: pairs of halves at geometric rates."""
    half = tensor.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half, device=position.device) / half)
    first, second = tensor.split(half, dim=-1)
    return torch.cat((first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), dim=-1)


def synthetic_sample(
    *, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, generator: torch.Generator
) -> Sample:
    """Make a layer whose structure is known: noise with four planted kinds of score. On the generator's device.

    Every query likes the first four tokens (sinks) and near keys (locality), each head a few distances of its own
    (slashes), and each stretch of 512 queries the few keys of its topic (verticals, which change along the document).
    """
    rotated = int(head_dim * NUM_ROTATED_SHARE) // 2 * 2
    content = head_dim - rotated
    device = generator.device

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    position = torch.arange(seq_len, device=device)
    direction = randn(num_kv_heads, 1, rotated)
    direction *= 2.0 * head_dim**0.25 / direction.norm(dim=-1, keepdim=True)
    topics = randn(8, content)
    topics *= 2.5 * head_dim**0.25 / topics.norm(dim=-1, keepdim=True)
    sink = randn(content)
    sink *= 2.5 * head_dim**0.25 / sink.norm()

    key = randn(num_kv_heads, seq_len, head_dim)
    key[..., :rotated] += rotate(direction.expand(-1, seq_len, -1), position)
    topic_of_key = torch.randint(0, 8, (seq_len,), generator=generator, device=device)
    is_vertical = torch.rand(seq_len, generator=generator, device=device) < 0.01
    key[:, is_vertical, rotated:] += topics[topic_of_key[is_vertical]]
    key[:, :4, rotated:] += sink

    query = randn(num_heads, seq_len, head_dim)
    direction = direction.repeat_interleave(num_heads // num_kv_heads, dim=0).expand(-1, seq_len, -1)
    query[..., :rotated] += rotate(direction, position)
    for head in range(num_heads):
        for distance in torch.randint(64, seq_len // 2, (3,), generator=generator, device=device).tolist():
            query[head, :, :rotated] += rotate(direction[head], position - distance)
    topic_of_query = torch.randint(0, 8, (num_heads, -(-seq_len // 512)), generator=generator, device=device)
    query[..., rotated:] += topics[topic_of_query.repeat_interleave(512, dim=1)[:, :seq_len]] + sink
    return Sample(query=query.transpose(0, 1)[None], key=key.transpose(0, 1)[None])


def load_sample(path: str) -> Sample:
    """Load a file of ``query`` and ``key``, and where they are known ``softmax_scale`` and ``cu_seqlens``.

    Raises:
        ValueError: it is none.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise invalid("--load", "a file that can be read", f"{path}: {error.strerror}") from None
    except (RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # an empty file's error says nothing
        raise invalid("--load", "a file that torch.save wrote", f"{path}: {reason}") from None
    saved = saved if isinstance(saved, dict) else {}
    missing = [name for name in ("key", "query") if not isinstance(saved.get(name), Tensor)]
    if missing:
        got = f"{path} without {' and '.join(missing)}"
        raise invalid("--load", "a file with a dict of the tensors query and key", got)
    return Sample(**{name: saved[name] for name in ("query", "key", "softmax_scale", "cu_seqlens") if name in saved})


def variants(base: MTrainingConfig) -> Iterator[tuple[str, MTrainingConfig]]:
    """Yield the rows of the table: nothing but what is always kept, then each estimator under each budget."""
    yield "always kept only", replace(base, max_vertical=0, max_slash=0)
    for name in estimator_names():
        chosen = replace(base, estimator=name)
        for vertical_top_p, slash_top_p in BUDGETS:
            label = f"{name} p {vertical_top_p}/{slash_top_p}"
            yield label, replace(chosen, vertical_top_p=vertical_top_p, slash_top_p=slash_top_p)
        one_run = min(base.max_slash, base.slash_run_length)
        yield (
            f"{name} p 0.5/0.8, caps / 4",
            replace(chosen, max_vertical=base.max_vertical // 4, max_slash=max(base.max_slash // 4, one_run)),
        )
        yield f"{name} no verticals, p -/0.8", replace(chosen, max_vertical=0)


def table_row(label: str, config: MTrainingConfig, sample: Sample, rows: tuple[int, ...]) -> str:
    """Select, measure and format one line."""
    index = select(sample.query, sample.key, config, **sample.options)
    recall = attention_recall(sample.query, sample.key, index, rows=rows, **sample.options).mean(dim=(0, 2))
    kept = density(index, seq_len=sample.query.shape[1], cu_seqlens=sample.cu_seqlens).mean()
    columns, distances, runs = (
        each.float().mean() for each in (index.num_vertical, index.num_slash, slash_runs(index))
    )
    return (
        f"{label:38} {100 * kept:6.1f} %  {100 * recall.mean():6.1f} % ({100 * recall.min():5.1f})"
        f"  {columns:8.0f}  {distances:9.1f}  {runs:5.1f}"
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; budgets that are not given are the configuration's defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = MTrainingConfig.algorithm_1(num_probe_windows=8)
    parser.add_argument("--load", metavar="FILE", help="saved query and key instead of synthetic ones")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of the synthetic layer")
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=128, help="held-out rows to measure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index-sharing", choices=INDEX_SHARINGS, default=default.index_sharing)
    for name in COUNTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    return parser.parse_args(argv)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse sizes that the synthetic layer cannot have.

    Raises:
        ValueError: naming the flag.
    """
    for flag, value, least in (
        ("--rows", arguments.rows, 1),
        ("--seq-len", arguments.seq_len, SHORTEST),
        ("--num-heads", arguments.num_heads, 1),
        ("--num-kv-heads", arguments.num_kv_heads, 1),
        ("--head-dim", arguments.head_dim, NARROWEST),
    ):
        if value < least:
            raise invalid(flag, f"at least {least}", value)
    if arguments.num_heads % arguments.num_kv_heads:
        raise invalid("--num-heads", f"a multiple of --num-kv-heads {arguments.num_kv_heads}", arguments.num_heads)
    if not 0 <= arguments.seed < 2**63:
        raise invalid("--seed", "from 0 to 2 ** 63 - 1", arguments.seed)


def config_of(arguments: argparse.Namespace) -> MTrainingConfig:
    """Return the configuration that is asked for; every document is estimated.

    Raises:
        ValueError: naming the flag.
    """
    names = ("index_sharing", *COUNTS)
    try:
        config = MTrainingConfig.algorithm_1(**{name: getattr(arguments, name) for name in names}, dense_below=0)
        for estimator in estimator_names():
            replace(config, estimator=estimator)  # has rules of its own
    except ValueError as error:  # which names the field first
        field, rule = str(error).split(" ", 1)
        raise ValueError(f"--{field.replace('_', '-')} {rule}") from None
    return config


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    arguments = parse_arguments(argv)
    try:
        print_table(arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def print_table(arguments: argparse.Namespace) -> None:
    """Select and measure each variant.

    Raises:
        ValueError: an argument, or the file that was given, does not fit.
    """
    check_arguments(arguments)
    base = config_of(arguments)
    sample = (
        load_sample(arguments.load)
        if arguments.load is not None
        else synthetic_sample(
            seq_len=arguments.seq_len,
            num_heads=arguments.num_heads,
            num_kv_heads=arguments.num_kv_heads,
            head_dim=arguments.head_dim,
            generator=torch.Generator().manual_seed(arguments.seed),
        )
    )
    check_query_and_key(sample.query, sample.key, packed=sample.cu_seqlens is not None)
    seq_len = sample.query.shape[1]
    looks = [replace(base, estimator=name) for name in estimator_names()]
    rows = held_out_rows(*looks, seq_len=seq_len, count=arguments.rows, cu_seqlens=sample.cu_seqlens)
    if not rows:
        raise invalid("--num-probe-rows", f"so few that some of the {seq_len} rows are held out", base.num_probe_rows)
    shapes = f"{tuple(sample.query.shape)} query, {tuple(sample.key.shape)} key"
    print(f"{shapes}, {base.num_probe_rows} probe rows, a list for each {base.index_sharing}")
    print(f"{'selection':38} {'kept':>8}  {'recall (worst head)':>17}  {'columns':>8}  {'distances':>9}  {'runs':>5}")
    for label, config in variants(base):
        print(table_row(label, config, sample, rows))
    print(LEGEND)


if __name__ == "__main__":
    main()
