"""Network namespaces as ranks of nodes: a link inside the node and one between nodes, each behind a token bucket.

Every rank has a namespace with two interfaces: ``inner`` ends at a bridge of its node, ``outer`` at a bridge of all
ranks. A rank's address lies on ``outer``; routes lead to ranks of the same node over ``inner``. Nothing outside the
namespaces that carry the name of this tool changes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_mtraining.errors import InvalidError

PREFIX = "mtraining-slow-link-"
SWITCH = f"{PREFIX}switch"
LOCK = Path("/run/lock/mtraining-slow-link")
MTU_BYTES = 4000
BURST_BYTES = {"inner": 16384, "outer": 6144}
"""Size of the token buckets: what an idle link sends at once, above its rate."""

QUEUE_BYTES = 4 << 20
SLOW_START = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes, their ranks, and rates of a rank's links."""

    num_nodes: int
    node_size: int
    inner_mb_s: float
    """10**6 bytes a second in one direction."""

    outer_mb_s: float

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.node_size


def namespace(rank: int) -> str:
    """Return the name of a rank's namespace."""
    return f"{PREFIX}{rank}"


def set_up_commands(network: Network) -> Iterator[list[str]]:
    """Yield the commands, of ``ip`` and ``tc``, that make the network where nothing of it exists."""
    yield ["ip", "netns", "add", SWITCH]
    bridges = ["outer", *(f"node{node}" for node in range(network.num_nodes))]
    for bridge in bridges:
        yield ["ip", "-n", SWITCH, "link", "add", bridge, "type", "bridge"]
        yield ["ip", "-n", SWITCH, "link", "set", bridge, "up"]
    for rank in range(network.num_ranks):
        node, name = rank // network.node_size, namespace(rank)
        yield ["ip", "netns", "add", name]
        yield ["ip", "-n", name, "link", "set", "lo", "up"]
        # A ring's link is idle between transfers, after which TCP would start anew from a few packets.
        yield ["ip", "netns", "exec", name, "sh", "-c", f"echo 0 > {SLOW_START}"]
        for level, bridge, address in (
            ("inner", f"node{node}", f"10.78.{node}.{rank + 1}/24"),
            ("outer", "outer", f"10.77.0.{rank + 1}/24"),
        ):
            port = f"{level}{rank}"
            ends = ["type", "veth", "peer", "name", port, "netns", SWITCH]
            yield ["ip", "link", "add", level, "mtu", f"{MTU_BYTES}", "netns", name, *ends, "mtu", f"{MTU_BYTES}"]
            yield ["ip", "-n", SWITCH, "link", "set", port, "master", bridge, "up"]
            yield ["ip", "-n", name, "address", "add", address, "dev", level]
            yield ["ip", "-n", name, "link", "set", level, "up"]
            rate = network.inner_mb_s if level == "inner" else network.outer_mb_s
            yield ["ip", "netns", "exec", name, *rate_command(level, rate)]
        for peer in range(node * network.node_size, (node + 1) * network.node_size):
            if peer != rank:
                via = ["via", f"10.78.{node}.{peer + 1}", "dev", "inner", "src", f"10.77.0.{rank + 1}"]
                yield ["ip", "-n", name, "route", "add", f"10.77.0.{peer + 1}/32", *via]


def rate_command(level: str, mb_s: float) -> list[str]:
    """Return the command that, inside a rank's namespace, sets the rate at which one of its links sends."""
    bucket = ["rate", f"{round(8e6 * mb_s)}bit", "burst", f"{BURST_BYTES[level]}", "limit", f"{QUEUE_BYTES}"]
    return ["tc", "qdisc", "replace", "dev", level, "root", "tbf", *bucket]


def check_machine() -> None:
    """Check that namespaces and links can be made.

    Raises:
        ValueError: a program or the right to is missing.
    """
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise InvalidError(f"ip and tc must be installed, got no {' and no '.join(missing)}. Install iproute2.")
    if os.geteuid():
        raise InvalidError(f"the user must be root to make network namespaces, got user {os.geteuid()}. Use sudo.")


@contextmanager
def set_up(network: Network) -> Iterator[None]:
    """Make the network, and take it down at the end; first whatever a run that was ended has left.

    Raises:
        ValueError: another run is under way, or a command failed.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidError(f"{LOCK} must be free, got one that another run holds. Wait for it to end.") from None
        take_down()
        try:
            for command in set_up_commands(network):
                _run(command)
            yield
        finally:
            take_down()


def take_down() -> None:
    """End processes inside this tool's namespaces and delete these, with all their links."""
    for name in _namespaces():
        for process in _run(["ip", "netns", "pids", name]).split():
            os.kill(int(process), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _run(["ip", "netns", "pids", name]).split() and time.monotonic() < deadline:
            time.sleep(0.05)
        _run(["ip", "netns", "del", name])


def _namespaces() -> Sequence[str]:
    names = (line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip())
    return [name for name in names if name.startswith(PREFIX)]


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason"])[-1]
        raise InvalidError(
            f"{' '.join(command)} must succeed, got {reason}. Network namespaces, veth, bridges and tbf "
            "are needed of the kernel."
        )
    return result.stdout
