"""`diag comm` between hosts made of network namespaces with shaped links: plain sockets agree, a pulled cable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.diag.probes.comm_job import roots
from tests.netns.hosts import Network, missing

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TORCH", "GLOO_"))}

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def network():  # type: ignore[no-untyped-def]
    if reason := missing():
        pytest.skip(reason)
    with Network(4, rate=200.0) as made:
        yield made


def start(network: Network, module: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    """One process per host: `python MODULE...`, with RANK in its environment and {rank} filled in."""
    started = []
    for rank in range(network.count):
        environment = ENVIRONMENT | {
            "RANK": str(rank), "WORLD_SIZE": str(network.count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.address(0), "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        command = ["ip", "netns", "exec", network.name(rank), sys.executable,
                   *(word.format(rank=rank) for word in module)]
        with (folder / f"err.{rank}").open("w") as errors:
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors,
                                            text=True))
    return started


def outputs(processes: list[subprocess.Popen[str]], patience: float) -> list[str]:
    """What each printed; AssertionError when one does not end."""
    end = time.monotonic() + patience
    try:
        return [process.communicate(timeout=max(1.0, end - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def probe(network: Network, folder: Path, *options: str) -> list[subprocess.Popen[str]]:
    return start(network, ["-m", "pdtrain.cli", "diag", "comm", "--json", "--no-extras", *options], folder)


def test_bandwidths_are_those_of_plain_sockets_through_the_same_shaper(network: Network, tmp_path: Path) -> None:
    """send_recv against a ring of sockets, all_reduce against a ring all-reduce over them: within 10 %."""
    said = outputs(probe(network, tmp_path, "--op", "send_recv", "--op", "all_reduce", "--min", "4M", "--max", "4M",
                         "--iterations", "7", "--budget", "40"), 120)
    report: dict[str, Any] = json.loads(said[0])
    assert not any(said[1:]), "only rank 0 prints"
    ours = {row["operation"]: row["median_seconds"] for row in report["rows"]}
    ring = outputs(start(network, ["-m", "tests.diag.probes.comm_ring", "{rank}", str(4 << 20),
                                   *(network.address(host) for host in range(network.count))], tmp_path), 60)
    measured = [json.loads(line) for line in ring]
    for name, seconds in ours.items():
        independent = max(item[name] for item in measured)
        print(f"{name}: ours {seconds:.4f} s, sockets {independent:.4f} s")
        assert seconds == pytest.approx(independent, rel=0.10), name
    assert report["rates"]["network_bandwidth"] == pytest.approx(200e6 / 8, rel=0.15)


def test_a_host_whose_cable_is_pulled_is_named_and_nothing_hangs(network: Network, tmp_path: Path) -> None:
    running = probe(network, tmp_path, "--op", "all_reduce", "--min", "1M", "--max", "4M", "--iterations", "10000",
                    "--budget", "500", "--timeout", "8")
    time.sleep(25)
    network.link(2, "down")
    begun = time.monotonic()
    said = outputs(running, 60)
    assert time.monotonic() - begun < 45
    report = json.loads(said[0])
    root, = roots(report)
    assert root["cause"] == "peer_unreachable" and root["where"]["ranks"] == [2]
    assert root["numbers"]["how"] == "silent" and all(process.returncode for process in running)
