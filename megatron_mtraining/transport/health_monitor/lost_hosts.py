"""Hosts whose ranks stopped sending heartbeats to the job's store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from .process_id import ProcessId


class LostHosts:
    """The heartbeats of the next host of the job; only the first rank of each host reads them.

    A host counts from its first training step on: before, one call may hold a process's threads for minutes.
    """

    def __init__(self, store: dist.Store, members: Sequence[ProcessId], rank: int, *, timeout_s: float) -> None:
        hosts: dict[str, list[int]] = {}
        for other, member in enumerate(members):
            hosts.setdefault(member.host, []).append(other)
        own = members[rank].host
        order = list(hosts)
        following = order[order.index(own) + 1 :] + order[: order.index(own)]
        self._store = store
        self._timeout_s = timeout_s
        self._monitored = hosts[following[0]] if following and hosts[own][0] == rank else []
        self._last: dict[int, str] = {}
        self._last_heartbeat_s = time.monotonic()

    def find(self) -> list[int]:
        """Return the registered ranks of the next host, if none has sent a heartbeat within the timeout."""
        for other in self._monitored:
            key = f"heartbeat/{other}"
            heartbeat = self._store.get(key).decode() if self._store.check([key]) else None
            if heartbeat is not None and heartbeat != self._last.get(other):
                self._last[other], self._last_heartbeat_s = heartbeat, time.monotonic()
        trains = any(json.loads(heartbeat)[1] is not None for heartbeat in self._last.values())
        if not trains or time.monotonic() - self._last_heartbeat_s < self._timeout_s:
            return []
        return [other for other in self._monitored if not self._store.check([f"deregistered/{other}"])]
