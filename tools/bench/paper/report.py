"""The page and the file of a run: throughput, balance, simulated links, and who is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_mtraining.console import text_table

from .balance import GOAL, Balance
from .methods import METHODS
from .simulated import INNER_GB_S, NODE_SIZE, OUTER_GB_S, PAPER, RANKS

Row = dict[str, Any]
DENSE = ("dense", "TransformerEngine p2p")

LEGEND = """\
One attention layer, selection included, on random tensors with planted structure. Times are medians of the slowest
rank; `vs dense` is the time of the fastest dense method over the method's; `recall` is the share of dense attention on
selected keys at 8 held-out rows; memory is the peak beyond what was there before the call. Each method was compared
with a dense oracle, gradients too, before it was timed."""


def page(results: Row) -> str:
    """Return all of it as Markdown."""
    return "\n".join([*_head(results), *results_lines(results), *_missing(results["absent"])]) + "\n"


def results_lines(results: Row) -> Iterator[str]:
    """Yield the tables, for a page and for a terminal."""
    for ranks in sorted({row["ranks"] for row in results["rows"]}):
        for seq_len in sorted({row["seq"] for row in results["rows"] if row["ranks"] == ranks}):
            yield from _throughput(results["rows"], ranks, seq_len)
    yield from _balance(results["balance"])
    yield from _simulated(results["simulated"])


def _head(results: Row) -> Iterator[str]:
    yield f"# The paper's comparison on {results['hardware']}"
    yield ""
    yield f"`{results['command']}`"
    yield ""
    yield f"{results['date'][:10]}, torch {results['torch']}, commit {results['commit'][:12]}, {results['problem']}."
    yield ""
    yield LEGEND
    yield ""
    papers = "; ".join(f"{method.name}: {method.paper}" for method in METHODS)
    yield f"Rows of the paper: {papers}."


def _throughput(rows: Sequence[Row], ranks: int, seq_len: int) -> Iterator[str]:
    chosen = [row for row in rows if (row["ranks"], row["seq"]) == (ranks, seq_len)]
    dense = min((row["total_ms"] for row in chosen if row["method"] in DENSE), default=None)
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("method", lambda row: row["method"]),
        ("density %", lambda row: f"{100 * row['density']:.2f}"),
        ("recall", lambda row: f"{row['recall']:.3f}"),
        ("select ms", lambda row: f"{row['select_ms']:.2f}"),
        ("forward ms", lambda row: f"{row['forward_ms']:.2f}"),
        ("backward ms", lambda row: f"{row['backward_ms']:.2f}"),
        ("total ms", lambda row: f"{row['total_ms']:.2f}"),
        ("Mtokens/s", lambda row: f"{seq_len / row['total_ms'] / 1e3:.3f}"),
        ("vs dense", lambda row: "" if dense is None else f"{dense / row['total_ms']:.2f}"),
        ("extra MiB", lambda row: "" if row["extra_mib"] is None else f"{row['extra_mib']:.0f}"),
    ]
    yield from ["", f"## {ranks} rank{'s' * (ranks > 1)}, {seq_len} tokens", ""]
    yield from table(columns, chosen)


def _balance(balances: Sequence[Row]) -> Iterator[str]:
    if not balances:
        return

    def pair(name: str) -> Callable[[Row], str]:
        return lambda row: "{:.3f} / {:.3f}".format(*row[name])

    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("ranks", lambda row: str(row["ranks"])),
        ("tokens", lambda row: str(row["seq"])),
        ("method", lambda row: row["method"]),
        ("", lambda row: row["direction"]),
        ("worker", pair("worker_imbalance")),
        ("lockstep", pair("lockstep_imbalance")),
        ("of pairs", lambda row: f"{row['pair_worker_imbalance']:.3f} / {row['pair_lockstep_imbalance']:.3f}"),
        ("rank error", lambda row: f"{row['rank_error']:.1%}"),
        ("step error", lambda row: f"{row['step_error']:.1%}"),
        ("call ms", lambda row: f"{row['measured_ms']:.2f} / {row['predicted_ms']:.2f}"),
        ("call error", lambda row: f"{row['time_error']:+.1%}"),
        ("beside ms", lambda row: f"{row['beside_ms']:.3f}"),
        ("MHz", lambda row: " / ".join("" if mhz is None else f"{mhz:.0f}" for mhz in row["sm_mhz"])),
    ]
    yield from ["", "## Balance, measured / predicted", ""]
    yield "Time that each rank computes in each ring step, by events around it, beside a replay of the selected index"
    yield "with rates of a dry run: the same operations, as many and in the same order, on a rank's own keys in the"
    yield "striped layout, without a ring, in turns with the ring's calls. `of pairs`: counted, worker / lockstep."
    yield "Errors: of a rank's whole time, the worst; of a step, the worst, over the mean step; of a call with its"
    yield "transfers. `beside ms`: what a prediction adds to steps for transfers beside them, measured by a dry run"
    yield "with transfers. `MHz`: multiprocessors after the ring's calls / after dry runs."
    yield ""
    yield from table(columns, balances)
    worst = max(balances, key=lambda row: row["rank_error"])
    verdict = "within" if worst["rank_error"] <= GOAL else "not within"
    yield ""
    yield (
        f"Worst rank: {worst['rank_error']:.1%} ({worst['method']}, {worst['ranks']} ranks, {worst['seq']} tokens, "
        f"{worst['direction']}), {verdict} the {GOAL:.0%} aimed at."
    )


def _simulated(rows: Sequence[Row]) -> Iterator[str]:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("method", lambda row: row["method"]),
        ("worker", lambda row: f"{row['worker_imbalance']:.3f}"),
        ("lockstep", lambda row: f"{row['lockstep_imbalance']:.3f}"),
        ("zigzag over it: worker", lambda row: _ratio(row["worker_over_zigzag"])),
        ("lockstep", lambda row: _ratio(row["lockstep_over_zigzag"])),
        ("forward ms", lambda row: f"{row['forward_ms']:.2f}"),
        ("backward ms", lambda row: f"{row['backward_ms']:.2f}"),
        ("host forward ms", lambda row: f"{row['host_forward_ms']:.2f}"),
        ("backward ms", lambda row: f"{row['host_backward_ms']:.2f}"),
    ]
    yield from ["", f"## Simulated: {RANKS} ranks in nodes of {NODE_SIZE}, {rows[0]['tokens']} tokens", ""]
    yield f"A recorded model's index, {INNER_GB_S} GB/s inside a node and {OUTER_GB_S} between, verticals gathered"
    yield "once; imbalance counted, times predicted (`mtraining balance`), of the GPU without selection, of hosts"
    yield "with it, and the slower of the two decides. The paper measures"
    yield f"{PAPER['worker']} (ranks) and {PAPER['lockstep']} (steps) for zigzag's imbalance over its own."
    yield ""
    yield from table(columns, rows)


def _missing(absent: Sequence[Row]) -> Iterator[str]:
    if not absent:
        return
    yield from ["", "## Not here", ""]
    for each in absent:
        where = f"{each['ranks']} rank{'s' * (each['ranks'] > 1)}" + (f", {each['seq']} tokens" if each["seq"] else "")
        yield f"- {each['method']}, {where}: {each['why']}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def table(columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table whose columns line up as plain text too."""
    cells = [[form(row) for _, form in columns] for row in rows]
    return text_table([heading for heading, _ in columns], cells, markdown=True)


def metrics_of(balances: Sequence[Balance]) -> list[Row]:
    """Return the numbers for a file."""
    return [balance.numbers() for balance in balances]
