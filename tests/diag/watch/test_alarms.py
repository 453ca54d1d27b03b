"""Alarms: raised once, cleared once, not flapping."""

from __future__ import annotations

from diag.schema import Finding, Where
from diag.watch.alarms import ABSENT, CONFIRM, Alarms


def finding(cause: str = "loss_nan", **where: object) -> Finding:
    return Finding(cause=cause, severity="error", summary=cause, role="root", where=Where(**where))  # type: ignore[arg-type]


def events(alarms: Alarms, rounds: list[list[Finding]]) -> list[tuple[int, str]]:
    return [(number, change.event) for number, found in enumerate(rounds)
            for change in alarms.update(found, float(number))]


def test_raised_once_and_cleared_after_several_absences() -> None:
    said = events(Alarms(), [[], [finding()], [finding()], [], [finding()], *[[]] * ABSENT])
    assert said == [(1, "raised"), (4 + ABSENT, "cleared")]


def test_what_noise_can_look_like_is_confirmed_first() -> None:
    slow, need = finding("straggler", ranks=[3]), CONFIRM["straggler"]
    assert events(Alarms(), [[], [slow], [], [slow], []]) == []
    assert events(Alarms(), [[], *[[slow]] * need]) == [(need, "raised")]
    slow.numbers["sudden"] = True
    assert events(Alarms(), [[], [slow]]) == [(1, "raised")]


def test_the_first_judgement_needs_no_confirmation() -> None:
    assert events(Alarms(), [[finding("straggler", ranks=[3])]]) == [(0, "raised")]


def test_one_that_comes_back_has_to_be_absent_for_longer() -> None:
    once = [[finding()], *[[]] * ABSENT]
    said = events(Alarms(), [*once, *once, *[[]] * ABSENT, *once])
    assert said == [(0, "raised"), (3, "cleared"), (4, "raised"), (10, "cleared"), (11, "raised")]


def test_nothing_new_changes_nothing() -> None:
    alarms = Alarms()
    alarms.update([finding()], 0.0)
    assert all(not alarms.update([], float(i), judged=False) for i in range(50))
    assert [alarm.finding.cause for alarm in alarms.active] == ["loss_nan"]


def test_other_ranks_are_another_fault_and_more_ranks_are_the_same() -> None:
    alarms = Alarms()
    alarms.update([finding("straggler", ranks=[1])], 0.0)
    assert alarms.update([finding("straggler", ranks=[1, 2])], 1.0) == []
    assert [alarm.finding.where.ranks for alarm in alarms.active] == [[1, 2]]
    assert events(alarms, [[finding("straggler", ranks=[7])]] * 3) == [(2, "raised"), (2, "cleared")]


def test_victims_and_notes_are_no_alarms() -> None:
    victim, note = finding(), finding()
    victim.role, note.severity = "victim", "info"
    assert events(Alarms(), [[victim, note]] * 5) == []


def test_a_spike_is_over_when_the_run_has_gone_on() -> None:
    spike, after = finding("loss_spike", step=100), [5]
    alarms = Alarms()
    assert [c.event for c in alarms.update([spike], 0.0, since=lambda step: after[0])] == ["raised"]
    after[0] = 500
    assert [c.event for i in range(ABSENT) for c in alarms.update([spike], 1.0 + i, since=lambda s: after[0])] == \
        ["cleared"]
    assert alarms.update([spike], 9.0, since=lambda step: after[0]) == []
