"""`diag comm` between hosts made of network namespaces with shaped links: plain sockets agree, a pulled cable."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.diag.probes.comm_hosts import RATE, ended, probe, ring
from tests.diag.probes.comm_job import roots, wait_for
from tests.netns.hosts import Network, missing

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def network():  # type: ignore[no-untyped-def]
    if reason := missing():
        pytest.skip(reason)
    with Network(4, rate=RATE, queue=1.0) as made:
        yield made


def test_bandwidths_are_those_of_plain_sockets_through_the_same_shaper(network: Network, tmp_path: Path) -> None:
    """send_recv and all_reduce against the same exchanges over sockets: within 10 %.

    More operations, several times: benchmarks/comm_bandwidth.py.
    """
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
