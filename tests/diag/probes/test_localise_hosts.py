"""The localiser on real hosts: eight network namespaces joined by a bridge, every link shaped by tbf."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from diag.probes.localise_findings import findings
from tests.netns.hosts import Network, missing
from tests.netns.links import LinkJob

pytest.importorskip("torch", reason="the extra 'train' is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := missing():
        pytest.skip(reason)
    with Network(8) as made:
        yield made


def test_throttled_hosts_are_named_and_healthy_ones_are_not(network: Network) -> None:
    """A small sample of benchmarks/link_trials.py."""
    with LinkJob(network) as job:
        assert findings(job.locate()) == []
        for host, direction, factor in ((3, "send", 0.5), (6, "receive", 0.6), (0, "both", 0.4)):
            network.shape(host, direction, factor)  # type: ignore[arg-type]
            outcome = job.locate()
            (finding,) = findings(outcome)
            assert finding.where.hosts == [network.name(host)] and finding.where.ranks == [host]
            assert finding.numbers["direction"] == direction
            assert finding.numbers["ratio"] == pytest.approx(factor, abs=0.12)
            assert outcome.rounds <= 6
            network.heal()
        assert findings(job.locate()) == []


def test_a_pulled_cable_is_named_and_the_others_are_still_measured(network: Network) -> None:
    """The link of host 5 goes down in the second round while host 2 is slow; rank 0 hears of both."""
    network.shape(2, "send", 0.4)

    def pull(words: str) -> None:
        if words.startswith("round 2"):
            network.link(5, "down")

    with LinkJob(network, timeout=4.0) as job:
        outcome = job.locate(during=pull)
        found = {finding.cause: finding for finding in findings(outcome)}
        assert found["peer_unreachable"].where.hosts == [network.name(5)]
        assert found["link_slow"].where.hosts == [network.name(2)] and set(found) == {"peer_unreachable", "link_slow"}
        measured = {(link["src"], link["dst"]) for link in outcome.links}
        assert len({pair for pair in measured if 5 not in pair}) >= 18


def test_a_stopped_and_a_killed_rank_are_named(network: Network) -> None:
    with LinkJob(network, timeout=4.0) as job:
        os.kill(job.pids[3], signal.SIGKILL)
        os.kill(job.pids[6], signal.SIGSTOP)
        outcome = job.locate()
        os.kill(job.pids[6], signal.SIGKILL)
    assert [place.rank for place in outcome.silent] == [3, 6]
    assert {finding.cause for finding in findings(outcome)} == {"peer_unreachable"}
    measured = {frozenset((link["src"], link["dst"])) for link in outcome.links}
    partners = {rank: sum(rank in pair for pair in measured) for rank in range(8)}
    assert partners[3] == partners[6] == 0 and all(partners[rank] >= 2 for rank in (0, 1, 2, 4, 5, 7)), partners
