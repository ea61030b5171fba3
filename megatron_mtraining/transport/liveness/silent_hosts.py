"""Hosts that went silent, as their ranks' signs of life in the job's store show it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from .process_id import ProcessId


class SilentHosts:
    """The next host of the job, as its signs of life in the store show it; asked by the first rank of each host.

    A host is judged from its first training step on: before, one call may hold a process's threads for minutes.
    """

    def __init__(self, store: dist.Store, members: Sequence[ProcessId], rank: int, *, silence_s: float) -> None:
        hosts: dict[str, list[int]] = {}
        for other, member in enumerate(members):
            hosts.setdefault(member.host, []).append(other)
        own = members[rank].host
        order = list(hosts)
        following = order[order.index(own) + 1 :] + order[: order.index(own)]
        self._store = store
        self._silence_s = silence_s
        self._watched = hosts[following[0]] if following and hosts[own][0] == rank else []
        self._last: dict[int, str] = {}
        self._heard = time.monotonic()

    def find(self) -> list[int]:
        """The ranks of the next host if none has given a sign of life for too long and not all have left."""
        for other in self._watched:
            key = f"beat/{other}"
            beat = self._store.get(key).decode() if self._store.check([key]) else None
            if beat is not None and beat != self._last.get(other):
                self._last[other], self._heard = beat, time.monotonic()
        trains = any(json.loads(beat)[1] is not None for beat in self._last.values())
        if not trains or time.monotonic() - self._heard < self._silence_s:
            return []
        return [other for other in self._watched if not self._store.check([f"left/{other}"])]
