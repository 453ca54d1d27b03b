"""Pairs over torch.distributed, with ranks as threads: who does not answer is named, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from diag.errors import UsageError
from diag.probes.localise import Outcome, Place

dist = pytest.importorskip("torch.distributed", reason="the extra 'train' is not installed")

from diag.probes import comm_pairs  # noqa: E402
from diag.probes.comm_pairs import PairGroups, Round, locate_links, serve, take_part  # noqa: E402


def job(world: int, serving: set[int], timeout: float) -> tuple[Outcome, float]:
    """What rank 0 finds when only `serving` of the other ranks take part; seconds it took."""
    store = dist.HashStore()
    places = [Place(rank, f"n{rank}") for rank in range(world)]
    threads = [threading.Thread(target=locate_links, args=(store, rank, places), kwargs={"timeout": timeout})
               for rank in serving]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    outcome = locate_links(store, 0, places, timeout=timeout)
    seconds = time.monotonic() - begun
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert outcome is not None
    return outcome, seconds


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is fast and its speed not the subject here."""
    monkeypatch.setattr("diag.probes.localise.LARGEST", 1 << 16)


def test_every_pair_is_measured_in_both_directions() -> None:
    outcome, _ = job(4, {1, 2, 3}, 20.0)
    assert outcome.silent == [] and 3 <= outcome.rounds <= 4 and outcome.warm_up == 1
    every = {(a, b) for a in range(4) for b in range(4) if a != b}
    assert {(link["src"], link["dst"]) for link in outcome.links} == every
    assert all(link["bytes_per_second"] > 0 and link["src_host"] == f"n{link['src']}" for link in outcome.links)


def test_beyond_some_ranks_connections_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_pairs, "KEEP", 2)
    kept: list[int] = []
    close = PairGroups.close
    monkeypatch.setattr(PairGroups, "close", lambda self: (kept.append(len(self._groups)), close(self)))
    outcome, _ = job(4, {1, 2, 3}, 20.0)
    assert len(outcome.links) == 12 and outcome.silent == [] and kept == [0, 0, 0, 0]


def test_a_rank_that_never_answers_is_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_pairs, "GRACE", 0.5)
    outcome, seconds = job(4, {1, 3}, 2.0)
    assert [place.rank for place in outcome.silent] == [2]
    assert {frozenset((link["src"], link["dst"])) for link in outcome.links} == {
        frozenset(pair) for pair in ((0, 1), (0, 3), (1, 3))}
    assert seconds < 60


def test_a_broken_pair_gets_a_new_group() -> None:
    """One side times out alone; under the next generation both meet again."""
    store = dist.HashStore()
    left, right = (PairGroups(store, rank, "gloo", 2.0) for rank in (0, 1))
    answers: dict[int, Any] = {}

    def meet(generation: int) -> None:
        task = Round([(0, 1, generation)], 1 << 12)
        thread = threading.Thread(target=lambda: answers.update({1: take_part(task, 1, right, 2.0)}))
        thread.start()
        answers[0] = take_part(task, 0, left, 2.0)
        thread.join(20)

    meet(0)
    assert answers[0].rate and answers[1].rate
    alone = take_part(Round([(0, 1, 0)], 1 << 12), 0, left, 0.5)
    assert alone is not None and alone.rate is None and alone.problem
    meet(1)
    assert answers[0].rate and answers[1].rate
    left.close()
    right.close()


def test_a_rank_that_loses_its_conductor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_pairs, "PATIENCE", 0.1)
    store = dist.HashStore()
    with pytest.raises(UsageError, match="rank 1: rank 0, which conducts the measuring, is not heard any more"):
        serve(store, PairGroups(store, 1, "gloo", 0.5), 0.5)
