"""``compare``: the same model, data and seeds trained with several attentions; their loss curves as table and figure.

Every run is one of ``train``, and its result one JSON file, so that the runs may be done one at a time:
``compare.systems=[moba]``. Table and figure are of all files that are there.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.errors import invalid

from .held_out import has_held_out, read_losses
from .launch_config import changed_fields, checkpoint_folder
from .prepare_data import read_report
from .settings import SYSTEMS, Settings
from .tokens import write_atomically
from .train import held_out_files, train

LAST_STEPS = 20
"""Steps whose mean loss stands for the end of a curve."""

_WARM_UP = 3
"""First steps that are not timed."""

_STEP = re.compile(r"iteration +(\d+)/ *\d+ .*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)")
_DENSITY = re.compile(r"density \(%\): ([\d.]+)")
_LABELS = {
    "dense": "dense",
    "mtraining": "this package",
    "algorithm_1": "the paper's Algorithm 1",
    "moba": "MoBA",
    "xattention": "XAttention",
    "zigzag": "this package, zigzag layout",
    "flat": "this package, flat ring",
}


def compare(settings: Settings) -> str:
    """Train the runs that have no result, write table and figure of all results; return a sentence about them."""
    folder = Path(settings.output, "compare")
    folder.mkdir(parents=True, exist_ok=True)
    for seed in settings.compare.seeds:
        for system in settings.compare.systems:
            path = folder / f"{system}_{seed}.json"
            if not path.is_file():
                run = run_settings(settings, system, seed)
                print(f"compare: {train(run)}", flush=True)
                write_atomically(path, json.dumps(result(run, system), indent=1) + "\n")
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*_*.json"))]
    results.sort(key=lambda each: (SYSTEMS.index(each["system"]), each["seed"]))
    check_alike(results)
    text = table(results)
    print(text)
    write_atomically(folder / "table.md", text + "\n")
    figure(results, folder / "losses.png")
    return f"{len(results)} runs in {folder}, with table.md and losses.png"


def run_settings(settings: Settings, system: str, seed: int) -> Settings:
    """Return the settings of one run."""
    flags = settings.train.flags | system_flags(system, settings.train.seq_length)
    attention = "dense" if system == "dense" else "mtraining"
    train = dataclasses.replace(
        settings.train, run=f"compare/{system}_{seed}", attention=attention, seed=seed, flags=flags
    )
    return dataclasses.replace(settings, train=train)


def system_flags(system: str, seq_length: int) -> dict[str, Any]:
    """Return this package's flags that make a system; baselines have their authors' settings.

    MoBA's chunk is to the sequence as 4096 tokens are to 524288, so that 12 chunks are as large a part of it.
    """
    if system == "algorithm_1":
        fields = changed_fields(MTrainingConfig.algorithm_1())
        return {f"--mtraining-{name.replace('_', '-')}": value for name, value in fields.items()}
    if system == "moba":
        return {"--mtraining-pattern": "moba", "--mtraining-moba-chunk": max(1, seq_length // (128 * 64)) * 64}
    others = {
        "xattention": {"--mtraining-pattern": "xattention"},
        "zigzag": {"--mtraining-layout": "zigzag"},
        "flat": {"--mtraining-schedule": "flat"},
    }
    return others.get(system, {})


def result(settings: Settings, system: str) -> dict[str, Any]:
    """Return what a finished run's log and files say.

    Raises:
        ValueError: a log without all steps.
    """
    import torch

    train, log = settings.train, settings.run_folder / "log.txt"
    steps, densities = read_log(log.read_text(errors="replace"))
    if sorted(steps) != list(range(1, train.steps + 1)):
        raise invalid("a run's log", f"of {train.steps} steps", f"{len(steps)} in {log}", "Delete its folder.")
    done = checkpoint_folder(settings) / f"iter_{train.steps:07d}"
    files = held_out_files(settings, done) if has_held_out(settings) else ()
    held_out = [dataclasses.asdict(read_losses(path)) for path in files]
    report = read_report(settings.data_folder)["sources"]
    return {
        "system": system,
        "seed": train.seed,
        "seq_length": train.seq_length,
        "model": str(Path(settings.model.source).name),
        "data": {each["name"]: [each["train"]["tokens"], each["held_out"]["tokens"]] for each in report},
        "flags": train.flags,
        "losses": [steps[step][1] for step in sorted(steps)],
        "step_ms": statistics.median([ms for step, (ms, _) in steps.items() if step > _WARM_UP] or [0.0]),
        "density": statistics.fmean(densities) if densities else 1.0,
        "held_out": dict(zip(("before", "after"), held_out, strict=False)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "ranks": train.ranks,
        "date": datetime.now(UTC).date().isoformat(),
    }


def read_log(text: str) -> tuple[dict[int, tuple[float, float]], list[float]]:
    """Return milliseconds and loss by step, a repeated step's last ones, and the densities as shares."""
    steps = {int(step): (float(ms), float(loss)) for step, ms, loss in _STEP.findall(text)}
    return steps, [float(percent) / 100 for percent in _DENSITY.findall(text)]


def check_alike(results: list[dict[str, Any]]) -> None:
    """Raise where results are not of the same model, data and steps.

    Raises:
        ValueError: two results that cannot be compared.
    """

    def setting(each: dict[str, Any]) -> list[Any]:
        return [each["model"], each["data"], each["seq_length"], len(each["losses"]), each["device"], each["ranks"]]

    for each in results[1:]:
        if setting(each) != setting(results[0]):
            name = f"{each['system']}_{each['seed']}.json"
            raise invalid("results", f"all of {setting(results[0])}", f"{setting(each)} in {name}", "Move it away.")


def table(results: list[dict[str, Any]]) -> str:
    """Return a table with a line for each system: means over its seeds, and differences from dense runs of these."""
    dense = {each["seed"]: each for each in results if each["system"] == "dense"}
    lines = [
        "| attention | seeds | density | ms a step | loss of the last steps | from dense "
        "| held out, own attention | from dense |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_system = defaultdict(list)
    for each in results:
        by_system[each["system"]].append(each)
    for system, runs in by_system.items():
        density = "100 %" if system == "dense" else f"{statistics.fmean(each['density'] for each in runs):.1%}"
        cells = [_LABELS[system], ", ".join(str(each["seed"]) for each in runs), density]
        cells.append(f"{statistics.median(each['step_ms'] for each in runs):.0f}")
        for measure in (last_loss, held_out_loss):
            values = [measure(each) for each in runs]
            pairs = [(measure(each), measure(dense[each["seed"]])) for each in runs if each["seed"] in dense]
            cells.append(_mean(values, ".4f"))
            is_base = system == "dense" or None in values
            cells.append("" if is_base else _mean([100 * (ours / base - 1) for ours, base in pairs], "+.2f", " %"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def last_loss(each: dict[str, Any]) -> float:
    """Return the mean loss of a run's last steps."""
    return statistics.fmean(each["losses"][-LAST_STEPS:])


def held_out_loss(each: dict[str, Any]) -> float | None:
    """Return the held-out loss of a trained run, None where nothing was held out."""
    return each["held_out"]["after"]["mean"] if each["held_out"] else None


def _mean(values: list[float | None], form: str, unit: str = "") -> str:
    """Return a mean, with the least and the largest where there are several."""
    if not values or None in values:
        return ""
    mean = format(statistics.fmean(values), form) + unit
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """Draw training losses, and their difference from dense of the same seed, both as means of neighbouring steps."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} is not drawn: matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy

    dense = {each["seed"]: numpy.array(each["losses"]) for each in results if each["system"] == "dense"}
    drawing, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    labelled = set()
    for each in results:
        losses, system = numpy.array(each["losses"]), each["system"]
        style = {"color": f"C{SYSTEMS.index(system)}", "linewidth": 1.2}
        style["linestyle"] = "-" if each["seed"] == results[0]["seed"] else "--"
        label = None if system in labelled else _LABELS[system]
        labelled.add(system)
        width = min(10, len(losses))
        steps = numpy.arange(width, len(losses) + 1)
        smooth = numpy.ones(width) / width
        left.plot(steps, numpy.convolve(losses, smooth, "valid"), label=label, **style)
        if each["seed"] in dense:
            relative = 100 * (numpy.convolve(losses / dense[each["seed"]], smooth, "valid") - 1)
            right.plot(steps, relative, **style)
    left.set(xlabel="step", ylabel="training loss, nats a token")
    right.set(xlabel="step", ylabel="above dense of the same seed, %")
    left.legend()
    drawing.savefig(path, dpi=130)
    plt.close(drawing)
