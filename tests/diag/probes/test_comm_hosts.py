"""`diag comm` between hosts made of network namespaces with shaped links: plain sockets agree, a pulled cable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.diag.probes.comm_job import roots, wait_for
from tests.netns.hosts import Network, missing

ROOT = Path(__file__).parents[3]
OURS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
ENVIRONMENT = OURS | {name: value for name, value in os.environ.items() if not name.startswith(
    ("NCCL_", "TORCH", "GLOO_", "MASTER_", "PYTHONPATH")) and name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
#: Mbit/s: slow enough for a busy machine to keep up with, and for its shapers' timers.
RATE = 40.0

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def network():  # type: ignore[no-untyped-def]
    if reason := missing():
        pytest.skip(reason)
    with Network(4, rate=RATE) as made:
        yield made


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


def test_bandwidths_are_those_of_plain_sockets_through_the_same_shaper(network: Network, tmp_path: Path) -> None:
    """send_recv against a ring of sockets, all_reduce against a ring all-reduce over them: within 10 %."""
    running = probe(network, tmp_path, "--op", "send_recv", "--op", "all_reduce", "--min", "1M", "--max", "1M",
                    "--iterations", "9", "--budget", "40")
    assert ended(running, 120) == [0, 0, 0, 0], (tmp_path / "err.0").read_text()
    report: dict[str, Any] = json.loads((tmp_path / "out.0").read_text())
    assert not any((tmp_path / f"out.{rank}").read_text() for rank in (1, 2, 3)), "only rank 0 prints"
    measured = ring(network, 1 << 20)
    for row in report["rows"]:
        seconds, independent = row["median_seconds"], measured[row["operation"]]
        print(f"{row['operation']}: {seconds:.4f} s, sockets {independent:.4f} s, busbw {row['busbw']:.4f} GB/s")
        assert seconds == pytest.approx(independent, rel=0.10), row["operation"]
    assert 0.4 * RATE * 1e6 / 8 < report["rates"]["network_bandwidth"] < 1.05 * RATE * 1e6 / 8
    assert len(set(report["hosts"])) == 4 and report["ranks_per_node"] == 1


def test_a_host_whose_cable_is_pulled_is_named_and_nothing_hangs(network: Network, tmp_path: Path) -> None:
    running = probe(network, tmp_path, "--op", "all_reduce", "--min", "64K", "--max", "16M", "--iterations", "10000",
                    "--budget", "500", "--timeout", "8")
    assert wait_for((tmp_path / "out.3").exists, 60)
    time.sleep(10)
    network.link(2, "down")
    begun = time.monotonic()
    statuses = ended(running, 60)
    print(f"ended {time.monotonic() - begun:.1f} s after the cable was pulled: {statuses}")
    report = json.loads((tmp_path / "out.0").read_text())
    root, = roots(report)
    assert root["cause"] == "peer_unreachable" and root["where"]["ranks"] == [2] and root["numbers"]["how"] == "silent"
    assert all(status == 1 for status in statuses)
    alone = json.loads((tmp_path / "out.2").read_text())
    assert roots(alone)[0]["cause"] == "store_lost", "the host that is cut off says so on its own terminal"
