"""`pdtrain train` with one rank per host of a `Network`, and what crossed its links, read from their own counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.netns.hosts import Network

PORT = 29571
#: Of a TCP segment on the wire besides its payload: Ethernet 14, IPv4 20, TCP 20 and its time stamps 12.
HEADERS = 14 + 20 + 20 + 12
#: Of one message of the pools: its header, and the header that answers it (pdtrain/pools/message.py).
MESSAGE_BYTES = 2 * 64
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


def account(run_dir: Path, carried: Crossed) -> dict[str, Any]:
    """Bytes of a whole run of one compute and one update rank: by the plan, by their own counters, by the interface's.

    Of the whole run, so that nothing is cut at the edge of a step. The first weights of a new run travel once, in FP32.
    """
    plan = json.loads((run_dir / "environment.json").read_text())["pools"]
    steps: list[list[dict[str, Any]]] = []
    for rank in (0, 1):
        rows = (run_dir / "events" / f"rank_{rank}.jsonl").read_text().splitlines()
        steps.append([row for text in rows if (row := json.loads(text)).get("event") == "pool_step"])
    first = 4 * sum(owner["parameters"] for owner in plan["owners"].values())
    messages = sum(row["messages_sent"] for rank in steps for row in rank)
    expected = first + len(steps[0]) * (plan["bytes_up"] + plan["bytes_down"]) + messages * MESSAGE_BYTES
    payload = [sum(row["bytes_sent"] for row in rank) for rank in steps]
    recorded = first + sum(payload) + sum(row["overhead_bytes"] for row in steps[0])
    total = carried.sent_bytes + carried.received_bytes
    found = sum(carried.payload)
    return {"steps": len(steps[0]), "payload_up": payload[0], "payload_down": payload[1], "plan": expected,
            "recorded": recorded, "interface_payload": found, "interface": total,
            "packets": carried.sent_packets + carried.received_packets,
            "off_percent": round(100 * (found / expected - 1), 3),
            "recorded_off_percent": round(100 * (recorded / expected - 1), 3),
            "tcp_ip_percent": round(100 * (total / found - 1), 2)}


def _tail(logs: list[Path]) -> str:
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)
