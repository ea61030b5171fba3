"""Plan of a command line of Megatron and of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import invalid
from megatron_mtraining.planner.plan import FULL, MTRAINING, NONE, SELECTIVE, TRANSFORMER_ENGINE, Plan

Flags = Mapping[str, tuple[str, ...]]
"""Values of each flag."""


def flags_of(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return a command line's flags with their values, the last one of each.

    Raises:
        ValueError: a value before the first flag.
    """
    flags: dict[str, tuple[str, ...]] = {}
    flag = ""
    for text in arguments:
        if text.startswith("--"):
            flag, _, value = text.partition("=")
            flags[flag] = (value,) if value else ()
        elif not flag:
            raise invalid("a command line", "of flags and their values", repr(text))
        else:
            flags[flag] += (text,)
    return flags


def plan_of_flags(flags: Flags, *, gpus: int | None = None, node_size: int = 8) -> Plan:
    """Return the plan of such flags, as far as memory and time depend on it.

    Args:
        flags: each with its values.
        gpus: of the run; without it there is one data-parallel rank.
        node_size: GPUs in a node.

    Raises:
        ValueError: sizes that do not multiply to ``gpus``, or an option that is not predicted.
    """

    def number(flag: str, default: int) -> int:
        return int(flags.get(flag, (str(default),))[0])

    tp, cp = number("--tensor-model-parallel-size", 1), number("--context-parallel-size", 1)
    pp = number("--pipeline-model-parallel-size", 1)
    gpus = tp * cp * pp if gpus is None else gpus
    dp, rest = divmod(gpus, tp * cp * pp)
    if rest or not dp:
        raise invalid("gpus", f"a multiple of tp {tp} x cp {cp} x pp {pp}", gpus)
    if number("--micro-batch-size", 1) != 1:
        raise invalid("--micro-batch-size", "1", number("--micro-batch-size", 1))
    if "--cross-entropy-loss-fusion" in flags:
        raise ValueError("unsupported: --cross-entropy-loss-fusion, which is not predicted. Compare a run without it.")
    if dp * cp > 1 and "--use-distributed-optimizer" not in flags:
        raise ValueError("unsupported: gradients without --use-distributed-optimizer. Compare a run with it.")
    config = MTrainingConfig.algorithm_1()
    pattern = flags.get("--mtraining-pattern", (config.pattern,))[0]
    if pattern != config.pattern:
        raise invalid("--mtraining-pattern", f"{config.pattern}, the one that is predicted", pattern)
    is_sparse = flags.get("--attention-backend") == (MTRAINING,)
    layout = flags.get("--mtraining-layout", ("striped",))[0]  # the defaults of runs recorded until 2026-11-30
    schedule = flags.get("--mtraining-schedule", ("hierarchical",))[0]
    if "auto" in (layout, schedule):
        raise invalid("--mtraining-layout and --mtraining-schedule", "those that the run's log names", "auto")
    width = config.sink_tokens + number("--mtraining-max-vertical", config.max_vertical)
    return Plan(
        seq_len=number("--seq-length", 0),
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        node_size=min(node_size, gpus),
        global_batch=number("--global-batch-size", dp),
        pack_width=width if is_sparse else 0,
        index_sharing=flags.get("--mtraining-index-sharing", (config.index_sharing,))[0],
        layout=layout if is_sparse else "zigzag",
        schedule=schedule if is_sparse else "flat",
        attention=MTRAINING if is_sparse else TRANSFORMER_ENGINE,
        recompute=_recompute(flags),
        offload="--optimizer-cpu-offload" in flags,
        overlap="--overlap-grad-reduce" in flags,
    )


def _recompute(flags: Flags) -> str:
    recompute = flags.get("--recompute-granularity", (NONE,))[0]
    if recompute == SELECTIVE and flags.get("--recompute-modules") != ("mlp",):
        raise invalid("--recompute-modules", "mlp", " ".join(flags.get("--recompute-modules", ("core_attn",))))
    if recompute == FULL and flags.get("--recompute-num-layers", ("1",)) != ("1",):
        raise invalid("--recompute-num-layers", "1", " ".join(flags["--recompute-num-layers"]))
    return recompute
