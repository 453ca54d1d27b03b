"""`pdtrain train` with one rank per host of a `Network`, and what crossed its links, read from their own counters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.netns.hosts import Network

PORT = 29571
#: Of a TCP segment on the wire besides its payload: Ethernet 14, IPv4 20, TCP 20 and its time stamps 12.
HEADERS = 14 + 20 + 20 + 12
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Crossed:
    """What a host's link carried since it was made: bytes with all headers, and packets, each way."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    @property
    def payload(self) -> tuple[int, int]:
        """TCP payload (sent, received). Handshakes, a few bytes longer, and ARP are counted like any other packet."""
        return (self.sent_bytes - HEADERS * self.sent_packets, self.received_bytes - HEADERS * self.received_packets)


def crossed(network: Network, host: int) -> Crossed:
    """The counters of a host's veth: behind its own shaper, and behind the one towards it."""
    folder = Path("/sys/class/net") / network.veth(host) / "statistics"
    names = ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets")  # of the bridge's side: it receives what was sent
    return Crossed(*(int((folder / name).read_text()) for name in names))


def train_across(network: Network, config: Path, run_dir: Path, *, timeout: float, tick: float = 0.05,
                 during: list[tuple[float, Crossed]] | None = None) -> None:
    """One process of `pdtrain train config` per host, until all have ended; every `tick` seconds what host 0's link
    has carried is added to `during`, with the time.

    Raises RuntimeError with the end of the output where one fails, TimeoutError where they take too long.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [run_dir / f"output_{rank}.txt" for rank in range(network.count)]
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "WORLD_SIZE": str(network.count), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
               "MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0",
               "PYTHONPATH": str(ROOT)}
        command = ["ip", "netns", "exec", network.name(rank), sys.executable, "-m", "pdtrain.cli", "train",
                   str(config), "--run-dir", str(run_dir)]
        with log.open("wb") as output:
            ranks.append(subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT,
                                          start_new_session=True))
    until = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in ranks):
            if during is not None:
                during.append((time.time(), crossed(network, 0)))
            if time.monotonic() > until:
                raise TimeoutError(f"no end within {timeout:g} s: {_tail(logs)}")
            if any(process.returncode for process in ranks):
                break
            time.sleep(tick)
        if any(process.wait(10) for process in ranks):
            raise RuntimeError(_tail(logs))
    except subprocess.TimeoutExpired:
        raise RuntimeError(_tail(logs)) from None
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _tail(logs: list[Path]) -> str:
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)
