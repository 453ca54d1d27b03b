"""Which host, direction or link is slow: rounds, blame, what is said when it cannot be told. On a modelled fabric."""

from __future__ import annotations

import random

import pytest

from benchmarks.link_simulation import Fabric, named
from diag.causes import CAUSES
from diag.probes.localise import Place, localise, read_baseline
from diag.probes.localise_faults import Flow
from diag.probes.localise_findings import findings
from diag.probes.localise_judge import judge
from diag.probes.localise_search import Search, log2_ceil, tournament
from diag.schema import SEVERITY_ORDER


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 9, 16, 33])
def test_a_tournament_meets_every_pair_once(n: int) -> None:
    rounds = tournament(n)
    pairs = [pair for turn in rounds for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(n) for b in range(a + 1, n)]
    assert len(rounds) == (n - 1 if n % 2 == 0 else n)
    for turn in rounds:
        assert len({end for pair in turn for end in pair}) == 2 * len(turn)


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 8, 12, 16, 31, 64])
def test_a_slow_host_is_named_with_its_direction_within_the_rounds(n: int) -> None:
    for trial, (direction, factor) in enumerate([("send", 0.3), ("receive", 0.6), ("both", 0.5), ("send", 0.6)]):
        fabric = Fabric(trial)
        host = random.Random(trial).randrange(n)
        fabric.slow(host, direction, factor)
        outcome = fabric.locate(n)
        assert named(outcome) == {(host, direction)}
        assert outcome.rounds <= 2 * log2_ceil(n) and len(fabric.rounds) == outcome.rounds + outcome.warm_up
        assert outcome.faults[0].ratio == pytest.approx(factor, rel=0.15)


def test_healthy_fabrics_stay_silent_under_noise() -> None:
    for n in (2, 3, 4, 8, 13, 32):
        for seed in range(12):
            outcome = Fabric(seed, noise=0.05, outliers=0.03).locate(n)
            assert findings(outcome) == [], (n, seed)
            assert outcome.rounds <= max(2 * log2_ceil(n), 1)


def test_two_hosts_in_different_directions() -> None:
    fabric = Fabric(5)
    fabric.slow(2, "send", 0.5)
    fabric.slow(6, "receive", 0.4)
    assert named(fabric.locate(8)) == {(2, "send"), (6, "receive")}


def test_a_bad_pair_is_no_bad_host() -> None:
    outcome = Fabric(1, pairs={(1, 6): 0.5}).locate(8)
    assert named(outcome) == {("pair", 1, 6)}
    (finding,) = findings(outcome)
    assert finding.where.hosts == ["n1", "n6"] and finding.numbers["direction"] == "send"
    assert finding.numbers["source"] == "n1" and "from n1 to n6" in finding.summary


def test_thorough_finds_a_pair_that_quick_does_not_use_and_quick_says_so() -> None:
    quick = Fabric(1).locate(32)
    met = {frozenset((link["src"], link["dst"])) for link in quick.links}
    a, b = next((a, b) for a in range(32) for b in range(32) if a != b and frozenset((a, b)) not in met)
    unseen = Fabric(1, pairs={(a, b): 0.4}).locate(32)
    assert not unseen.faults and any("did not meet" in note and "--thorough" in note for note in unseen.notes)
    thorough = Fabric(1, pairs={(a, b): 0.4}).locate(32, "thorough")
    assert named(thorough) == {("pair", a, b)}
    assert not any("did not meet" in note for note in thorough.notes)


def test_with_two_hosts_sender_and_receiver_are_not_guessed() -> None:
    fabric = Fabric(3, noise=0.01, outliers=0)
    fabric.slow(0, "send", 0.5)
    outcome = fabric.locate(2)
    (finding,) = findings(outcome)
    assert finding.where.hosts == ["n0", "n1"] and "cannot be told apart" in finding.summary
    assert any("with two hosts" in note for note in outcome.notes)
    both = Fabric(3, noise=0.01, outliers=0)
    both.slow(0, "both", 0.5)
    assert both.locate(2).faults == []  # nothing to compare with: the note says so


def test_a_dead_host_is_named_and_the_others_are_still_judged() -> None:
    fabric = Fabric(2, dead=frozenset({5}))
    fabric.slow(1, "send", 0.5)
    outcome = fabric.locate(8)
    found = {finding.cause: finding for finding in findings(outcome)}
    assert found["peer_unreachable"].where.hosts == ["n5"] and found["peer_unreachable"].where.ranks == [5]
    assert found["link_slow"].where.hosts == ["n1"] and set(found) == {"peer_unreachable", "link_slow"}
    assert sum({5} & {rank for pair in pairs for rank in pair} != set() for pairs in fabric.rounds) == 1
    assert any("n5" in note for note in outcome.notes)


def test_those_whose_partners_are_lost_meet_each_other() -> None:
    search = Search(8)
    search.add([], [3, 6])
    met: set[tuple[int, int]] = set()
    for _ in range(4):
        pairs = search.next()
        assert sorted(end for pair in pairs for end in pair) == [0, 1, 2, 4, 5, 7], "nobody rests"
        met |= {(min(pair), max(pair)) for pair in pairs}
        search.add([Flow(a, b, 100.0, search.round) for pair in pairs for a, b in (pair, pair[::-1])])
    assert all(sum(end in pair for pair in met) >= 2 for end in (0, 1, 2, 4, 5, 7))


def test_all_peers_dead_ends_at_once() -> None:
    outcome = Fabric(2, dead=frozenset(range(1, 8))).locate(8)
    assert outcome.faults == [] and any("exchanged anything" in note for note in outcome.notes)
    (finding,) = findings(outcome)
    assert finding.where.hosts == ["n0"] and "probably cut off" in finding.summary


@pytest.mark.parametrize("bad", [range(4), range(4, 8), (0, 1, 2)])
def test_several_hosts_of_one_switch_are_told_together(bad: range) -> None:
    fabric = Fabric(4)
    for host in bad:
        fabric.slow(host, "both", 0.4)
    (finding,) = findings(fabric.locate(8))
    assert finding.where.hosts == [f"n{host}" for host in bad]
    assert "several hosts of one group (neighbours)" in finding.summary


def test_a_slow_uplink_between_two_groups_blames_no_host() -> None:
    pairs = {(a, b): 0.4 for a in range(8) for b in range(8) if (a < 4) != (b < 4)}
    outcome = Fabric(4, outliers=0, pairs=pairs).locate(8, "thorough")
    assert [fault.kind for fault in outcome.faults] == ["split"]
    (finding,) = findings(outcome)
    assert "two groups" in finding.summary and finding.numbers["direction"] == "both"


def test_an_intermittent_sender_is_told_by_its_share_of_slow_rounds() -> None:
    fabric = Fabric(9, at_times=0.5)
    fabric.slow(3, "send", 0.4)
    (finding,) = findings(fabric.locate(16, "thorough"))
    assert finding.cause == "link_intermittent" and finding.where.hosts == ["n3"]
    assert finding.numbers["direction"] == "send" and 3 <= finding.numbers["slow"] < finding.numbers["measurements"]


def test_a_fault_shorter_than_a_round_is_told_by_single_messages_when_the_rounds_are_repeated() -> None:
    """The best of three messages of a round is hardly ever slow; one of them is in every other round."""
    def fabric() -> Fabric:
        made = Fabric(4, at_times=0.3, messages=3)
        made.slow(2, "receive", 0.25)
        return made

    assert findings(fabric().locate(5, "thorough")) == []
    (finding,) = findings(fabric().locate(5, "thorough", passes=5))
    assert finding.cause == "link_intermittent" and finding.where.hosts == ["n2"]
    assert finding.numbers["direction"] == "receive" and "for moments" in finding.summary
    for seed in range(40):
        healthy = Fabric(seed, noise=0.05, outliers=0.05, messages=3)
        assert findings(healthy.locate(5, "thorough", passes=5)) == [], seed
        assert len(healthy.rounds) >= 25


def test_one_rank_of_a_slow_host_is_singled_out() -> None:
    """Rank 0 of n2 is slow, its other ranks use another adapter."""
    places = [Place(host * 4 + local, f"n{host}", local) for host in range(6) for local in range(4)]
    fabric = Fabric(1)
    fabric.slow(8, "send", 0.5)
    outcome = localise(fabric.measure, places)
    (finding,) = findings(outcome)
    assert finding.where.hosts == ["n2"] and finding.where.ranks == [8] and "n2, rank 8" in finding.summary
    whole = Fabric(1)
    for rank in range(8, 12):
        whole.slow(rank, "receive", 0.5)
    (finding,) = findings(localise(whole.measure, places))
    assert finding.where.ranks == [8, 9, 10, 11]
    assert any("one rank spoke for each host" in note for note in outcome.notes)


def test_the_ranks_of_one_host_are_end_points_themselves() -> None:
    fabric = Fabric(1)
    fabric.slow(3, "both", 0.5)
    (finding,) = findings(localise(fabric.measure, [Place(rank, "box", rank) for rank in range(8)]))
    assert finding.where.ranks == [3] and finding.where.hosts == ["box"] and "rank 3 on box" in finding.summary


def test_against_a_baseline() -> None:
    good = Fabric(1, outliers=0).locate(4)
    baseline = read_baseline({"links": good.links})
    places = [Place(rank, f"n{rank}") for rank in range(4)]
    same = localise(Fabric(7, outliers=0).measure, places, baseline=baseline)
    assert findings(same) == []
    everything = Fabric(2, outliers=0)
    for host in range(4):
        everything.slow(host, "both", 0.5)
    (finding,) = findings(localise(everything.measure, places, baseline=baseline))
    assert finding.cause == "bandwidth_low" and finding.where.hosts == [] and finding.numbers["ratio"] < 0.6
    two = Fabric(2, outliers=0)
    two.slow(0, "both", 0.5)
    pair = localise(two.measure, places[:2], baseline=baseline)
    assert {finding.cause for finding in findings(pair)} & {"bandwidth_low", "link_slow"}


@pytest.mark.parametrize("links", [
    None, [], [{"src": 0, "dst": 1}], [{"src": 0, "dst": 1, "src_host": "a", "dst_host": "b", "bytes_per_second": -1}],
    [{"src": 0, "dst": 1, "src_host": "a", "dst_host": "b", "bytes_per_second": "nan"}], "x", [1]])
def test_a_baseline_that_is_none_raises_what_the_command_catches(links: object) -> None:
    try:
        assert read_baseline({"links": links}) == {}
    except (ValueError, TypeError, KeyError):
        return
    assert links == []


def test_a_link_through_which_nothing_passes() -> None:
    """Both hosts answer the conductor and each other's packets are lost."""
    search = Search(6)
    while pairs := search.next():
        flows = []
        for pair in pairs:
            broken = pair == (1, 4)
            flows += [Flow(a, b, None if broken else 1e8, search.round, "nothing came" if broken else "")
                      for a, b in (pair, pair[::-1])]
        search.add(flows)
    (fault,) = search.verdict().faults
    assert fault.kind == "pair" and fault.ends == [1, 4] and fault.direction == "both" and fault.ratio == 0


def test_no_flow_no_verdict() -> None:
    assert judge(4, [Flow(0, 1, None, 1, "x")]).faults == []


def test_every_finding_has_a_cause_a_playbook_and_is_a_warning_at_least() -> None:
    fabric = Fabric(3, dead=frozenset({7}), pairs={(2, 3): 0.3})
    fabric.slow(1, "send", 0.2)
    for finding in findings(fabric.locate(8, "thorough")):
        assert finding.cause in CAUSES and finding.playbook and finding.fix
        assert SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["warning"]
