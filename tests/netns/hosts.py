"""Hosts made of network namespaces: joined by a bridge, every link shaped by `tc tbf` to a common rate.

    host 0 (eth0) --- veth --- bridge --- veth --- (eth0) host 1 ...

A host sends through the shaper of its own eth0 and receives through the one of its veth on the bridge, so that each
direction can be slowed alone. Needs root, `ip` and `tc`. The bridge is isolated: it has no address of this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Literal

Direction = Literal["send", "receive", "both"]


def missing() -> str:
    """Why hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"needs the Debian package iproute2 ({tool})"
    name = f"pdtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    tried = subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate",
                            "10mbit", "burst", "32kb", "latency", "50ms"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"the kernel has no tbf: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """`count` hosts of `rate` Mbit/s in each direction, as a context manager that always cleans up.

    `mtu`: bytes of the largest IP packet. `queue`: seconds of traffic that a shaper keeps before it drops; several
    senders to one receiver overrun a short one, and TCP then measures its own retransmission timers.
    """

    def __init__(self, count: int, rate: float = 100.0, mtu: int = 1500, queue: float = 0.05) -> None:
        self.count, self.rate, self.mtu, self.queue = count, rate, mtu, queue
        self.prefix = f"pd{os.getpid() % 100000}"
        self.bridge = f"{self.prefix}b"

    def name(self, host: int) -> str:
        """The namespace of a host, and its host name."""
        return f"{self.prefix}h{host}"

    def address(self, host: int) -> str:
        return f"10.231.{host // 200}.{host % 200 + 1}"

    def veth(self, host: int) -> str:
        """The end of a host's link at the bridge."""
        return f"{self.prefix}v{host}"

    def __enter__(self) -> Network:
        self._remove()
        try:
            _run("ip", "link", "add", self.bridge, "mtu", str(self.mtu), "type", "bridge")
            _run("ip", "link", "set", self.bridge, "up")
            for host in range(self.count):
                name, veth = self.name(host), self.veth(host)
                _run("ip", "netns", "add", name)
                size = ("mtu", str(self.mtu))
                _run("ip", "link", "add", veth, *size, "type", "veth", "peer", "name", "eth0", *size, "netns", name)
                _run("ip", "link", "set", veth, "master", self.bridge, "up")
                _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/16", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
                self.shape(host, "both", 1.0)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._remove()

    def shape(self, host: int, direction: Direction, factor: float) -> None:
        """Give one direction of a host's link `factor` of the common rate."""
        for side in ("send", "receive") if direction == "both" else (direction,):
            where = ["-n", self.name(host)] if side == "send" else []
            device = "eth0" if side == "send" else self.veth(host)
            _run("tc", *where, "qdisc", "replace", "dev", device, "root", "tbf", "rate",
                 f"{round(self.rate * factor * 1000)}kbit", "burst", "32kb", "latency", f"{round(self.queue * 1000)}ms")

    def heal(self) -> None:
        """All links back to the common rate."""
        for host in range(self.count):
            self.shape(host, "both", 1.0)

    def link(self, host: int, state: Literal["up", "down"]) -> None:
        """Pull the cable of a host, or put it back."""
        _run("ip", "link", "set", self.veth(host), state)

    def _remove(self) -> None:
        for host in range(self.count):
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True)
            subprocess.run(["ip", "link", "del", self.veth(host)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
