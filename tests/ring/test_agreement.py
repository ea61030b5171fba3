"""Ranks that were called differently are named, with what differs, and none of them hangs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_mtraining.attention import sparse_attention
from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.errors import RankMismatchError
from megatron_mtraining.layout import SequenceLayout, shard_sequence
from megatron_mtraining.ring import ring as ring_module
from megatron_mtraining.testing.simulator import RankSimulator
from megatron_mtraining.transport import agreement
from megatron_mtraining.transport.agreement import PLAN_FIELDS
from megatron_mtraining.types import VerticalSlashIndex

from .cases import random_problem
from .recording import RecordingTransport, start_log

SEQ_LEN, CP_SIZE, BLOCK_SIZE = 64, 4, 4


def call_on_ranks(change, *, odd_ranks=(2,)):
    """Calls sparse attention on four ranks, on the odd ones with ``change``'s arguments; each rank's error or None."""
    problem = random_problem(SEQ_LEN, block_size=BLOCK_SIZE, heads=(4, 2), bounds=[0, 20, SEQ_LEN])
    layout = SequenceLayout("striped", seq_len=SEQ_LEN, cp_size=CP_SIZE, block_size=BLOCK_SIZE)

    def body(group):
        query, key, value = (shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:3])
        arguments = {
            "groups": group,
            "query": query.requires_grad_(),
            "key": key,
            "value": value,
            "index": problem.index,
            "layout": layout,
            "config": MTrainingConfig(block_size=BLOCK_SIZE),
            "cu_seqlens": problem.cu_seqlens,
        }
        if group.rank in odd_ranks:
            arguments |= change(arguments)
        try:
            sparse_attention(**arguments)
        except Exception as error:
            return error
        return None

    with mock.patch.object(
        ring_module, "resolve_backend", lambda name, **_: OtherBackend() if name == "cuda" else USUAL
    ):
        return RankSimulator(CP_SIZE, timeout=60.0).run(body)


USUAL = ReferenceBackend()


class OtherBackend(ReferenceBackend):
    """What a rank with a GPU of another kind may resolve ``auto`` to."""

    name = "cuda"


def heads(tensor, number):
    """``tensor`` with another number of heads."""
    return tensor[:, :, :1].detach().repeat(1, 1, number, 1)


def other_entry(index):
    """``index`` with one vertical moved, of the same widths."""
    vertical = index.vertical.clone()
    vertical[0, 0, 0] = (vertical[0, 0, 0] + 1) % SEQ_LEN
    return VerticalSlashIndex(vertical, index.num_vertical, index.slash, index.num_slash, block_size=BLOCK_SIZE)


def wider(index):
    """``index`` with one more column of padding."""
    vertical = torch.nn.functional.pad(index.vertical, (0, 1), value=SEQ_LEN)
    return VerticalSlashIndex(vertical, index.num_vertical, index.slash, index.num_slash, block_size=BLOCK_SIZE)


CHANGES = {
    "key.shape": lambda call: {"key": heads(call["key"], 4), "value": heads(call["value"], 4)},
    "query.dtype": lambda call: {name: call[name].detach().float() for name in ("query", "key", "value")},
    "requires_grad": lambda call: {"query": call["query"].detach()},
    "layout": lambda call: {"layout": replace(call["layout"], kind="rotated")},
    "schedule": lambda call: {"config": replace(call["config"], schedule="flat")},
    "inner group size": lambda call: {"groups": call["groups"].ring_groups(2)},
    "backend": lambda call: {"config": replace(call["config"], backend="cuda")},
    "softmax_scale": lambda call: {"softmax_scale": 0.125},
    "index widths": lambda call: {"index": wider(call["index"])},
    "cu_seqlens": lambda call: {"cu_seqlens": torch.tensor([0, 21, SEQ_LEN], dtype=torch.int32)},
    "index entries": lambda call: {"index": other_entry(call["index"])},
}


IN_SELECTION = ("operation", "query.shape", "config", "num_valid")
"""Tested in ``test_selection_agreement.py``."""


def test_every_field_is_tested():
    assert set(CHANGES) == {*PLAN_FIELDS, "index entries"} - set(IN_SELECTION)


@pytest.mark.parametrize("field", CHANGES)
def test_the_differing_field_and_the_ranks_are_named_on_every_rank(field):
    for rank, error in enumerate(call_on_ranks(CHANGES[field])):
        assert isinstance(error, RankMismatchError)
        assert f"{field} must be the same on every rank of the group, got another value on rank 2" in str(error)
        assert "than on ranks 0, 1, 3" in str(error)
        if field in PLAN_FIELDS:
            assert f"here on rank {rank} " in str(error)


def test_several_odd_ranks_are_all_named():
    (first, *_) = call_on_ranks(CHANGES["softmax_scale"], odd_ranks=(1, 3))
    assert "got another value on ranks 1, 3 than on ranks 0, 2, here on rank 0 0.35" in str(first)


def test_a_rank_that_refuses_its_arguments_keeps_nobody_waiting():
    errors = call_on_ranks(lambda call: {"query": call["query"][:, :-1]})
    assert isinstance(errors[2], ValueError)
    assert "query.shape[1] must be the layout's local_len 16, got 15." in str(errors[2])
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], RankMismatchError)
        assert str(errors[rank]) == (
            "rank 2 raised an error for the arguments of a call, so sparse_attention cannot continue here. "
            "See the error of that rank."
        )


def test_equal_plans_pass():
    assert call_on_ranks(lambda call: {}) == [None] * CP_SIZE


def test_the_digest_comes_first_and_once():
    problem = random_problem(32, block_size=4, heads=(2, 1))
    layout = SequenceLayout("striped", seq_len=32, cp_size=2, block_size=4)

    def body(group):
        log = start_log()
        part = [shard_sequence(each, layout, cp_rank=group.rank, dim=1) for each in problem[:3]]
        sparse_attention(*part, index=problem.index, layout=layout, groups=RecordingTransport("cp", group))
        return log[0], log.count("cp all_gather")

    assert RankSimulator(2).run(body) == [("cp all_gather", 1)] * 2


class FakeEvent:
    """A CUDA event that is reached when told."""

    def __init__(self, reached):
        self.reached = reached

    def query(self):
        return self.reached


def test_later_calls_on_a_gpu_are_compared_once_their_tables_have_arrived(monkeypatch):
    """The queue of unread tables: nothing is read before its event, and then the mismatch is raised."""
    table = torch.zeros(2, len(PLAN_FIELDS) + 2, dtype=torch.int64)
    table[1, 1 + PLAN_FIELDS.index("cu_seqlens")] = 7
    event = FakeEvent(reached=False)
    call = agreement._GatheredCall(table, dict.fromkeys(PLAN_FIELDS, "same"), 0, (8, 9), event)
    monkeypatch.setattr(agreement, "_unread", agreement.deque([call]))
    agreement._compare_arrived()
    event.reached = True
    with pytest.raises(RankMismatchError, match="cu_seqlens must be the same .* on rank 9 than on rank 8"):
        agreement._compare_arrived()
    assert not agreement._unread


def test_kinds_are_remembered_as_long_as_they_are_not_too_many(monkeypatch):
    """A run whose lengths never repeat keeps no more of them, and waits for a kind that it has forgotten."""
    monkeypatch.setattr(agreement, "_seen", {})
    monkeypatch.setattr(agreement, "_unread", agreement.deque())
    monkeypatch.setattr(agreement, "_MOST_SEEN", 3)
    waits = []
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: waits.append(length)))
    for length in (1, 2, 3, 3, 4, 2, 1):
        call = agreement._GatheredCall(torch.zeros(2, 1), {"query.shape": length}, 0, (8, 9))
        agreement._compare_without_waiting(call, stream)
    assert waits == [1, 2, 3, 4, 1] and len(agreement._seen) == 3


@pytest.mark.parametrize("field", PLAN_FIELDS)
def test_documents_do_not_make_a_call_one_of_a_new_kind(field):
    """A GPU's host waits for each new kind, and documents are others in every step."""
    plan = dict.fromkeys(PLAN_FIELDS, "same")
    first, second = (
        agreement._GatheredCall(torch.empty(0), plan | {field: value}, 0, (8, 9)) for value in ("same", "other")
    )
    assert (first.kind == second.kind) == (field in ("index widths", "cu_seqlens", "num_valid"))
