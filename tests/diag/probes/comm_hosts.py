"""`diag comm`, and plain sockets, between hosts made of network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.netns.hosts import Network

ROOT = Path(__file__).parents[3]
OURS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
ENVIRONMENT = OURS | {name: value for name, value in os.environ.items() if not name.startswith(
    ("NCCL_", "TORCH", "GLOO_", "MASTER_", "PYTHONPATH")) and name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
#: Mbit/s: slow enough for a busy machine to keep up with, and for its shapers' timers.
RATE = 40.0


def probe(network: Network, folder: Path, *options: str) -> subprocess.Popen[str]:
    """`pdtrain diag comm` between the hosts; the process ends when every rank has."""
    names = [network.name(host) for host in range(network.count)]
    command = [sys.executable, "-m", "tests.diag.probes.comm_worker", str(folder), network.address(0), *names, "--",
               "--json", "--no-extras", *options]
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], patience: float) -> list[int]:
    """The exit status of every rank; whoever is still there after `patience` is killed with its parent."""
    try:
        return list(json.loads(process.communicate(timeout=patience)[0]))
    finally:
        process.kill()
        process.wait()


def ring(network: Network, size: int) -> dict[str, float]:
    """The median seconds, of the hosts' mean, of each exchange of `size` bytes over plain sockets."""
    addresses = [network.address(host) for host in range(network.count)]
    started = [subprocess.Popen(["ip", "netns", "exec", network.name(host), sys.executable, "-m",
                                 "tests.diag.probes.comm_ring", str(host), str(size), *addresses],
                                env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True)
               for host in range(network.count)]
    try:
        found = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return {name: median(sum(times) / len(found) for times in zip(*(item[name] for item in found), strict=True))
            for name in found[0]}
