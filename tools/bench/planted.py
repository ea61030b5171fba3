"""Problems with planted structure, and what the selection chooses on them at the length that is measured."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import torch

from megatron_mtraining import select
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import invalid
from megatron_mtraining.metrics import attention_recall, held_out_rows
from megatron_mtraining.metrics.indices import runs_of
from megatron_mtraining.types import VerticalSlashIndex
from tools.synthetic_layer import NARROWEST, SHORTEST, synthetic_layer

from .problem import Inputs, Problem

RECALL_ROWS = 128


def planted_case(problem: Problem, config: MTrainingConfig) -> tuple[str, Inputs, VerticalSlashIndex]:
    """Return a label, the tensors of ``tools.synthetic_layer``, and the index that ``config`` selects on them.

    By ``top_p`` the lists are as long as the caps allow: shares of mass are not asked for.

    Raises:
        ValueError: more than one batch row is wanted, where the layer has one; or it cannot be so short or narrow.
    """
    if problem.batch > 1:
        raise invalid("--batch", "1 with --index planted", problem.batch)
    for flag, size, least in (("--seq", problem.seq_len, SHORTEST), ("--head-dim", problem.head_dim, NARROWEST)):
        if size < least:
            raise invalid(flag, f"at least {least} with --index planted", size)
    sample = synthetic_layer(
        seq_len=problem.seq_len,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        generator=torch.Generator(problem.device).manual_seed(problem.seed),
    )
    query, key = sample.query.to(problem.dtype), sample.key.to(problem.dtype)
    capped = {"vertical_top_p": 1.0, "slash_top_p": 1.0} if config.budget == "top_p" else {}
    index = select(query, key, replace(config, **capped))
    rows = held_out_rows(config, seq_len=problem.seq_len, count=RECALL_ROWS)
    recall = 100 * float(attention_recall(query, key, index, rows=rows).mean())
    lists = zip(index.slash[0].tolist(), index.num_slash[0].tolist(), strict=True)
    runs = fmean(len(runs_of(distances[:count])) for distances, count in lists)
    how = f"--slash-run-length {config.slash_run_length}" if capped else f"{config.num_probe_rows} probe rows by cost"
    label = f"planted, {how}: {runs:.1f} runs of distances, {recall:.1f} % recalled"
    return label, replace(problem.inputs(), query=query, key=key), index
