"""Doubles that write down, for the rank whose thread they run in, what a call does in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megatron_mtraining.backends.reference import ReferenceBackend
from megatron_mtraining.transport import Pending, RingGroups, Transport

_LOCAL = threading.local()
GROUPS = ("inner", "outer", "inner_gradient", "outer_gradient")


def start_log() -> list[str]:
    """A new log for this thread; what was recorded before stays in the old one."""
    _LOCAL.log = []
    return _LOCAL.log


class RecordingTransport:
    """Records ``<group> <operation>``, and ``<group> wait`` when what was posted is waited for."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.rank, self.size, self.global_ranks = transport.rank, transport.size, transport.global_ranks
        self._name, self._transport = name, transport

    def check_device(self, device: Any) -> None:
        self._transport.check_device(device)

    def exchange(self, tensor: Any) -> Pending:
        return _RecordingPending(self._name, self._record("exchange")(tensor))

    def all_reduce(self, tensor: Any, *, op: str = "sum") -> Any:
        return self._record("all_reduce")(tensor, op=op)

    def assemble(self, tensor: Any) -> Any:
        return self._record("assemble")(tensor)

    def all_gather(self, tensor: Any) -> Any:
        return self._record("all_gather")(tensor)

    def all_to_all(self, tensor: Any) -> Any:
        return self._record("all_to_all")(tensor)

    def post_all_reduce(self, tensor: Any) -> Pending:
        return _RecordingPending(self._name, self._record("post_all_reduce")(tensor))

    def post_all_gather(self, tensor: Any) -> Pending:
        return _RecordingPending(self._name, self._record("post_all_gather")(tensor))

    def post_reduce_scatter(self, tensor: Any) -> Pending:
        return _RecordingPending(self._name, self._record("post_reduce_scatter")(tensor))

    def _record(self, operation: str) -> Callable[..., Any]:
        _LOCAL.log.append(f"{self._name} {operation}")
        return getattr(self._transport, operation)


class _RecordingPending:
    def __init__(self, name: str, pending: Pending) -> None:
        self._name, self._pending = name, pending

    def wait(self) -> Any:
        _LOCAL.log.append(f"{self._name} wait")
        return self._pending.wait()


class RecordingBackend:
    """The reference backend; records the name of each operation, and ``queries`` where gradients of keys left before.

    The reference makes all gradients at once; a backend with two passes makes those of queries there.
    """

    name = "recording"

    def __getattr__(self, operation: str) -> Any:
        function = getattr(ReferenceBackend(), operation)

        def call(*arguments: Any, **options: Any) -> Any:
            _LOCAL.log.append(operation)
            result = function(*arguments, **options)
            if options.get("on_kv_gradients") is not None:
                _LOCAL.log.append("queries")
            return result

        return call


def recording_groups(groups: RingGroups) -> RingGroups:
    """``groups``, each recording under its own name."""
    return RingGroups(**{name: RecordingTransport(name, getattr(groups, name)) for name in ("cp", *GROUPS)})
