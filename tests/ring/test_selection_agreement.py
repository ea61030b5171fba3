"""Ranks that select differently, or not at all, are named before their transfers meet; over threads and over gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.attention import select, sparse_attention
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import RankMismatchError
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import as_transport
from megatron_mtraining.types import VerticalSlashIndex

from .processes import run_in_processes

SEQ_LEN, CP_SIZE, BLOCK_SIZE, ODD_RANK = 96, 3, 4, 1
LAYOUT = SequenceLayout("striped", seq_len=SEQ_LEN, cp_size=CP_SIZE, block_size=BLOCK_SIZE)
CONFIG = MTrainingConfig.algorithm_1(
    schedule="hierarchical",
    num_probe_rows=8,
    sink_tokens=3,
    local_blocks=2,
    max_vertical=12,
    max_slash=6,
    dense_below=0,
    block_size=BLOCK_SIZE,
)


def bounds(*ends):
    return torch.tensor([0, *ends, SEQ_LEN], dtype=torch.int32)


def heads(tensor, number):
    """``tensor`` with another number of heads."""
    return tensor[:, :, :1].repeat(1, 1, number, 1)


CHANGES = {
    "query.shape": lambda call: {"query": heads(call["query"], 2)},
    "key.shape": lambda call: {"key": heads(call["key"], 1)},
    "query.dtype": lambda call: {name: call[name].double() for name in ("query", "key")},
    "layout": lambda call: {"layout": replace(LAYOUT, kind="rotated")},
    "softmax_scale": lambda call: {"softmax_scale": 0.125},
    "config": lambda call: {"config": replace(CONFIG, num_probe_rows=4)},
    "cu_seqlens": lambda call: {"cu_seqlens": bounds(21)},
    "cu_seqlens of another count": lambda call: {"cu_seqlens": bounds(20, 40)},
    "cu_seqlens of none": lambda call: {"cu_seqlens": None},
    "num_valid": lambda call: {"num_valid": torch.tensor([20, 70])},
    "refused": lambda call: {"query": call["query"][:, :-1], "key": call["key"][:, :-1]},
}


def arguments_of(rank):
    """The same sequence on every rank, this one's part of it."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, SEQ_LEN, number, 8, generator=generator) for number in (4, 2))
    query, key = (shard_sequence(each, LAYOUT, cp_rank=rank, dim=1) for each in (query, key))
    return {"query": query, "key": key, "config": CONFIG, "layout": LAYOUT, "cu_seqlens": bounds(20)}


def select_on(group, change: str | None = None):
    """Selects on this rank, with the arguments that ``change`` names on the odd one."""
    arguments = arguments_of(as_transport(group).rank)
    if change is not None and as_transport(group).rank == ODD_RANK:
        arguments |= CHANGES[change](arguments)
    return select(**arguments, groups=group)


def select_or_attend_densely(group):
    """What a layer does that is dense on the odd rank only."""
    if as_transport(group).rank != ODD_RANK:
        return select_on(group)
    given = arguments_of(ODD_RANK)
    index = VerticalSlashIndex.dense(rows=2, num_heads=4, seq_len=SEQ_LEN, block_size=BLOCK_SIZE)
    tensors = given["query"], given["key"], given["key"]
    return sparse_attention(*tensors, index=index, layout=LAYOUT, groups=group, cu_seqlens=given["cu_seqlens"])


def error_of(call: Callable, group) -> Exception | None:
    try:
        call(group)
    except Exception as error:
        return error
    return None


def errors_in_threads(call):
    return RankSimulator(CP_SIZE, timeout=60.0).run(partial(error_of, call))


def errors_in_processes(call):
    return run_in_processes(process_job, CP_SIZE, group_timeout_s=30.0, deadline_s=60.0, call=call)


def process_job(call):
    """The error of the call; afterwards the group still works."""
    error = error_of(call, dist.group.WORLD)
    select_on(dist.group.WORLD)
    return error


def check_that_all_name_the_odd_rank(errors, field, values):
    """``values``: what the usual ranks and the odd one have, as the sentence shows it."""
    for rank, error in enumerate(errors):
        assert isinstance(error, RankMismatchError)
        assert (
            f"{field} must be the same on every rank of the group, got another value on rank 1 than on ranks 0, 2, "
            f"here on rank {rank} {values[rank == ODD_RANK]}."
        ) in str(error)


def check_that_all_learn_of_the_refusal(errors):
    assert isinstance(errors[ODD_RANK], ValueError)
    assert "query.shape[1] must be the layout's local_len 32, got 31." in str(errors[ODD_RANK])
    for rank in (0, 2):
        assert isinstance(errors[rank], RankMismatchError)
        assert str(errors[rank]) == (
            "rank 1 raised an error for the arguments of a call, so select cannot continue here. "
            "See the error of that rank."
        )


VALUES = {
    "query.shape": ("(1, 32, 4, 8)", "(1, 32, 2, 8)"),
    "key.shape": ("(1, 32, 2, 8)", "(1, 32, 1, 8)"),
    "query.dtype": ("torch.float32", "torch.float64"),
    "layout": (LAYOUT, replace(LAYOUT, kind="rotated")),
    "softmax_scale": (8**-0.5, 0.125),
    "config": (CONFIG, replace(CONFIG, num_probe_rows=4)),
    "cu_seqlens": ("(0, 20, 96)", "(0, 21, 96)"),
    "cu_seqlens of another count": ("(0, 20, 96)", "(0, 20, 40, 96)"),
    "cu_seqlens of none": ("(0, 20, 96)", "None"),
    "num_valid": ("None", "(20, 70)"),
}


@pytest.mark.parametrize("change", VALUES)
def test_the_differing_field_and_the_rank_are_named(change):
    errors = errors_in_threads(partial(select_on, change=change))
    check_that_all_name_the_odd_rank(errors, change.split(" of ")[0], VALUES[change])


def test_a_refusal_keeps_nobody_waiting():
    check_that_all_learn_of_the_refusal(errors_in_threads(partial(select_on, change="refused")))


def test_a_rank_that_attends_densely_while_others_select_is_named():
    errors = errors_in_threads(select_or_attend_densely)
    check_that_all_name_the_odd_rank(errors, "operation", ("select", "sparse_attention"))
    assert all("config" not in str(error) for error in errors), "fields of two operations are not compared"


def test_equal_plans_pass():
    assert errors_in_threads(select_on) == [None] * CP_SIZE


@pytest.mark.parametrize("change", ["cu_seqlens of another count", "config"])
def test_processes_name_the_field_and_stay_usable(change):
    errors = errors_in_processes(partial(select_on, change=change))
    check_that_all_name_the_odd_rank(errors, change.split(" of ")[0], VALUES[change])


REFUSED = {
    "query": (None, "query must be a tensor, got None."),
    "key": ([[1.0]], "key must be a tensor, got list."),
    "index": ("mine", "index must be a VerticalSlashIndex or a BlockListIndex, got str."),
    "memory": (torch.device("meta"), "group must be able to send tensors from meta memory, got a group with backends"),
}


def call_with(change: str, group):
    """Attends, on the odd rank with what ``REFUSED`` says."""
    rank = as_transport(group).rank
    given = arguments_of(rank)
    call = {"query": given["query"], "key": given["key"], "cu_seqlens": given["cu_seqlens"]}
    call["index"] = VerticalSlashIndex.dense(rows=2, num_heads=4, seq_len=SEQ_LEN, block_size=BLOCK_SIZE)
    if rank == ODD_RANK:
        wrong = REFUSED[change][0]
        call |= {name: call[name].to(wrong) for name in ("query", "key", "index")} if change == "memory" else {}
        call |= {change: wrong} if change in call else {}
    sparse_attention(**call, value=call["key"], layout=LAYOUT, groups=group)


def refusals_job():
    """The errors of refused calls, one after the other; afterwards the group still works."""
    calls = [partial(select_on, change="refused"), *(partial(call_with, change) for change in REFUSED)]
    errors = [error_of(call, dist.group.WORLD) for call in calls]
    select_on(dist.group.WORLD)
    return errors


def test_processes_learn_of_a_refusal_and_stay_usable():
    """Of what is no tensor too, and of memory that the group cannot send from."""
    by_rank = run_in_processes(refusals_job, CP_SIZE, group_timeout_s=30.0, deadline_s=60.0)
    first, *others = zip(*by_rank, strict=True)
    check_that_all_learn_of_the_refusal(first)
    for errors, (_, sentence) in zip(others, REFUSED.values(), strict=True):
        assert isinstance(errors[ODD_RANK], ValueError) and str(errors[ODD_RANK]).startswith(sentence)
        for rank in (0, 2):
            assert str(errors[rank]).startswith("rank 1 raised an error for the arguments of a call, so sparse")


def test_processes_of_which_one_attends_densely_stay_usable():
    errors = errors_in_processes(select_or_attend_densely)
    check_that_all_name_the_odd_rank(errors, "operation", ("select", "sparse_attention"))
