"""Names the rank that died: a thread beside training that costs a step nothing.

A killed rank leaves the others waiting in a collective, where NCCL says nothing until its timeout and then names no
rank. So every rank has a thread that looks once a second whether the processes of its own host still run. What it
finds it prints and leaves in the job's store, where the threads of the other hosts find it. A whole host that fell
silent is found by the next one, from signs of life that ranks leave in the store. A rank that has learnt of a death
ends a few seconds later, whatever its main thread waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from .process_id import ProcessId
from .silent_hosts import SilentHosts
from .termination import TerminationSignal

_POLL_S = 1.0
"""Between looks at the processes of this host and at the news in the store."""

_BEAT_S = 5.0
"""Between signs of life."""

_GRACE_S = 5.0
"""What the main thread has, once the news is out, to end with an error of its own."""


class RankWatch:
    """This rank's watch over the others.

    Args:
        store: of the job; nobody else uses this connection to it.
        members: the processes of all ranks.
        rank: this one.
        silence_s: seconds without a sign of life from any rank of a host after which the host counts as lost.
        training_step: says how many training steps are done, for the messages.
        is_over: says whether the job's process group was destroyed in this process, which may go on without it.
    """

    def __init__(
        self,
        store: dist.Store,
        members: Sequence[ProcessId],
        rank: int,
        *,
        silence_s: float,
        training_step: Callable[[], int | None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.news: str | None = None
        self._store = store
        self._members = members
        self._rank = rank
        self._training_step = training_step
        self.is_over = is_over
        self._neighbours = [other for other in range(len(members)) if other != rank and members[other].is_visible()]
        self._silent = SilentHosts(store, members, rank, silence_s=silence_s)
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._signal = TerminationSignal()
        self._thread = threading.Thread(target=self._run, name="mtraining rank watch", daemon=True)
        self._num_beats = 0
        self._store_answered = time.monotonic()

    def start(self) -> None:
        """Begins; call it in the main thread."""
        self._signal.catch()
        self._thread.start()

    def stop(self) -> None:
        """Says goodbye: from now on this rank's end is nobody's concern, and nobody's end is this rank's."""
        self._ending.set()
        self._signal.release()
        self._signal.wake()
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._signal.close()
        self._say_goodbye()

    def forget_in_child(self) -> None:
        """What a forked child does, which is no rank."""
        self._signal.release()

    def wait_for_news(self) -> str | None:
        """What becomes known of a death within a few looks: an error of the main thread may come before the news."""
        deadline = time.monotonic() + 3 * _POLL_S
        while self.look() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        return self.news

    def look(self) -> str | None:
        """Looks at the processes of this host now; what is known of a death, or None."""
        with self._lock, contextlib.suppress(RuntimeError):
            if self.news is None:
                self._look_beside()
        return self.news

    def publish(self, news: str) -> None:
        """Lets every rank know why this job ends; the first news stays."""
        with contextlib.suppress(RuntimeError):
            news = self._store.compare_set("news", "", news).decode()
        self.news = news

    def leave_with(self, reason: str) -> None:
        """Says goodbye with the error for which this rank ends; the others end for it too."""
        self._ending.set()
        self.publish(f"{self._describe([self._rank], self._training_step())} stopped with {reason}.")
        self.stop()

    def _run(self) -> None:
        self._keep_watch()
        self._say_goodbye()
        while not self._ending.is_set():  # the job is over, its process is not
            if self._signal.wait(_POLL_S):
                os._exit(TerminationSignal.EXIT_CODE)

    def _keep_watch(self) -> None:
        next_beat = time.monotonic()
        while not (self._ending.is_set() or self.is_over()):
            terminated = self._signal.wait(_POLL_S)
            beats = time.monotonic() >= next_beat
            self._look_around(beats=beats)
            if beats:
                next_beat = time.monotonic() + _BEAT_S
            if self.news is not None and not (self._ending.is_set() or self.is_over()):
                self._end(at_once=terminated)
            if terminated:
                os._exit(TerminationSignal.EXIT_CODE)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")

    def _look_around(self, *, beats: bool) -> None:
        try:
            with self._lock:
                self._look_beside()
            if beats:
                self._beat()
            if self.news is None and self._store.check(["news"]):
                self.news = self._store.get("news").decode()
            self._store_answered = time.monotonic()
        except RuntimeError as error:
            if time.monotonic() - self._store_answered > self._silence_s:
                gone = [self._describe([other], None) for other in self._neighbours if self._members[other].has_ended()]
                ended = f"{', '.join(gone)} ended, and the" if gone else "The"
                self.news = f"{ended} job's store no longer answers: {error}."

    def _beat(self) -> None:
        """Gives a sign of life, and looks for those of the next host."""
        self._num_beats += 1
        self._store.set(f"beat/{self._rank}", json.dumps((self._num_beats, self._training_step())))
        lost = self._silent.find()
        if lost:
            who = self._describe(lost, _last_step(self._store, lost))
            self.publish(f"{who} has not been heard from for {self._silence_s:g} s.")

    def _look_beside(self) -> None:
        """Neighbours whose process is gone without a goodbye.

        Raises:
            RuntimeError: the store does not say who has said goodbye. It may have ended with the rank that kept it,
                in peace.
        """
        gone = [other for other in self._neighbours if self._members[other].has_ended()]
        left = [other for other in gone if self._store.check([f"left/{other}"])]
        self._neighbours = [other for other in self._neighbours if other not in left]
        died = [other for other in gone if other not in left]
        if died and self.news is None:
            self.publish(f"{self._describe(died, _last_step(self._store, died))} has died.")

    def _describe(self, ranks: Sequence[int], step: int | None) -> str:
        """``rank 3 (host a, process 17, 40 training steps done)``."""
        if len(ranks) == 1:
            member = self._members[ranks[0]]
            name, place = f"rank {ranks[0]}", f"host {member.host}, process {member.pid}"
        else:
            name, place = f"each of ranks {', '.join(map(str, ranks))}", f"host {self._members[ranks[0]].host}"
        return f"{name} ({place})" if step is None else f"{name} ({place}, {step} training steps done)"

    def _end(self, *, at_once: bool) -> None:
        # Not by way of sys.stderr, whose lock the main thread may hold for ever.
        os.write(2, f"rank {self._rank}: {self.news} This rank ends too.\n".encode())
        if not at_once:
            self._ending.wait(_GRACE_S)
        if not self._ending.is_set():
            os._exit(1)


def _last_step(store: dist.Store, ranks: Sequence[int]) -> int | None:
    """The training step in the last sign of life of the first of ``ranks``."""
    key = f"beat/{ranks[0]}"
    with contextlib.suppress(RuntimeError):
        if store.check([key]):
            return json.loads(store.get(key))[1]
    return None
