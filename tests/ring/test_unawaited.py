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


def drop_transfer(work, *, is_cuda=True):
    """Posts and lets go; gives weak references to what is sent and received."""
    sent, received = Memory(), Memory()
    received.is_cuda = is_cuda
    posted = PostedTransfer(None, "exchange", [work], sent, received)
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


def test_gloo_ends_its_own_before_the_next_one():
    on_gpu, on_host = Work(), Work()
    first, second = drop_transfer(on_gpu), drop_transfer(on_host, is_cuda=False)
    assert alive(first) == alive(second) == [True, True]
    process_group._wait_on_the_host()
    assert (on_gpu.ended, on_host.ended) == (False, True)
    assert (alive(first), alive(second)) == ([True, True], [False, False])
