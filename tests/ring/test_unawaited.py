"""Memory of transfers that nobody waits for stays taken until they have ended."""

from __future__ import annotations

import weakref

from megatron_mtraining.transport import process_group
from megatron_mtraining.transport.process_group import PostedTransfer


class Memory:
    """Stands for a tensor."""

    is_cuda = True


class Work:
    """Of torch.distributed."""

    ended = False

    def wait(self) -> None:
        self.ended = True

    def is_completed(self) -> bool:
        return self.ended


class DroppingWork(Work):
    """Others are let go of while one asks for it: by another thread, or by a collection of garbage."""

    def __init__(self, transfers):
        self.transfers = transfers

    def is_completed(self) -> bool:
        self.transfers.clear()
        return False


def drop_transfer(work, *, is_cuda=True, transport=None):
    """Posts and lets go; gives weak references to what is sent and received."""
    sent, received = Memory(), Memory()
    received.is_cuda = is_cuda
    posted = PostedTransfer(transport, "exchange", [work], sent, received)
    references = weakref.ref(sent), weakref.ref(received)
    del posted, sent, received
    return references


def alive(references):
    return [reference() is not None for reference in references]


def test_memory_is_kept_until_the_transfer_has_ended():
    work = Work()
    first = drop_transfer(work)
    second = drop_transfer(Work())
    assert alive(first) == alive(second) == [True, True]
    work.wait()
    third = drop_transfer(Work())
    assert (alive(first), alive(second), alive(third)) == ([False, False], [True, True], [True, True])


def test_what_is_let_go_of_meanwhile_is_kept_too():
    ended, sent, received = Work(), Memory(), Memory()
    transfers = [PostedTransfer(None, "exchange", [Work()], sent, received)]
    references = weakref.ref(sent), weakref.ref(received)
    del sent, received
    drop_transfer(ended)
    drop_transfer(DroppingWork(transfers))
    ended.wait()
    drop_transfer(Work())
    assert not transfers and alive(references) == [True, True]


def test_gloo_ends_its_own_before_the_next_one_of_their_group():
    works, group, other = [Work() for _ in range(3)], object(), object()
    kept = drop_transfer(works[0], transport=group), drop_transfer(works[1], is_cuda=False, transport=other)
    dropped = drop_transfer(works[2], is_cuda=False, transport=group)
    process_group._wait_on_the_host(group)
    assert [work.ended for work in works] == [False, False, True]
    assert (alive(kept[0]), alive(kept[1]), alive(dropped)) == ([True, True], [True, True], [False, False])
