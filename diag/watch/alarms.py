"""Findings that come and go -> alarms that are raised once and cleared once.

A run that is watched is judged a thousand times, so a single judgement is not enough: most findings have to stand in
several before they are an alarm, and to be absent in several before that is cleared. An alarm that comes back has to
be absent for twice as long the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from diag.schema import SEVERITY_ORDER, Finding

#: Judgements in which a finding must stand before it is raised; 1 for those not named, and for what is sudden.
CONFIRM = {"straggler": 3, "slow_node": 3, "slow_data_io": 3, "throughput_decay": 3, "periodic_stall": 3,
           "all_to_all_slow": 3, "moe_expert_imbalance": 3, "moe_token_drop": 3, "grad_module_imbalance": 3,
           "loss_oscillation": 3, "loss_plateau": 3, "loss_spike": 2, "loss_divergence": 2, "grad_explosion": 2,
           "moe_router_collapse": 2, "data_repeated": 2, "pool_imbalance": 3, "pool_weights_late": 3,
           "pool_gradients_late": 3, "pool_communication": 3, "pool_queue_growth": 2}
#: Judgements in which an alarm must be absent before it is cleared; doubled each time that it comes back.
ABSENT, MOST_ABSENT = 3, 96
#: Known the moment they begin and end.
INSTANT = frozenset({"hang_silent"})
#: Over when so many log points have followed the onset, although the curve shows them for ever.
PASSING = {"loss_spike": 100, "loss_resume_jump": 100}
#: Two spikes are one when their onsets are so near: an onset moves by a few points as the curve goes on.
SAME_ONSET = 50
#: Cleared alarms kept for the display.
KEPT = 20

Kind = Literal["raised", "cleared"]
#: Log points after a step, or None where that is not known.
PointsSince = Callable[[int], "int | None"]


@dataclass(slots=True)
class Alarm:
    """One fault while it lasts. `raised`, `cleared` in Unix seconds; `finding` is its latest form."""

    finding: Finding
    first_seen: float
    seen: int = 0
    absent: int = 0
    patience: int = ABSENT
    raised: float | None = None
    cleared: float | None = None
    reason: str = ""

    @property
    def active(self) -> bool:
        return self.raised is not None and self.cleared is None


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm was raised or cleared."""

    event: Kind
    time: float
    alarm: Alarm


@dataclass
class Alarms:
    """All alarms of one watch. `update` after each judgement."""

    open: list[Alarm] = field(default_factory=list)
    past: list[Alarm] = field(default_factory=list)
    judged: bool = False

    @property
    def active(self) -> list[Alarm]:
        """Alarms that stand, the worst and oldest first."""
        return sorted((a for a in self.open if a.active),
                      key=lambda a: (-SEVERITY_ORDER[a.finding.severity], a.raised or 0.0))

    def update(self, findings: Iterable[Finding], now: float, *, judged: bool = True,
               since: PointsSince = lambda step: None) -> list[Change]:
        """Take the findings of this moment. `judged`: there was something new; else all but the instant ones are
        those of before.

        The first judgement is of a past that nobody has to wait for: it needs no confirmation.
        """
        present = [f for f in findings if is_alarm(f) and not _over(f, since)]
        first, self.judged = not self.judged and judged, self.judged or judged
        changes: list[Change] = []
        explained = {f.cause for f in findings if f.role == "victim"}
        for finding in present:
            alarm = next((a for a in self.open if same(a.finding, finding)), None)
            if alarm is None:
                back = next((a for a in self.past if same(a.finding, finding)), None)
                patience = ABSENT if back is None else min(2 * back.patience, MOST_ABSENT)
                alarm = Alarm(finding, now, patience=patience)
                self.open.append(alarm)
            alarm.finding, alarm.absent = finding, 0
            alarm.seen += judged
            sure = first or finding.cause in INSTANT or finding.severity == "fatal"
            if alarm.raised is None and (sure or alarm.seen >= _confirm(finding)):
                alarm.raised = now
                changes.append(Change("raised", now, alarm))
        for alarm in list(self.open):
            cause = alarm.finding.cause
            if any(same(alarm.finding, f) for f in present) or not (judged or cause in INSTANT):
                continue
            alarm.absent += 1
            if alarm.raised is None or cause in INSTANT or alarm.absent >= alarm.patience:
                self.open.remove(alarm)
                if alarm.raised is not None:
                    alarm.cleared = now
                    alarm.reason = "another fault accounts for it" if cause in explained else "no longer seen"
                    self.past = [*self.past, alarm][-KEPT:]
                    changes.append(Change("cleared", now, alarm))
        return changes


def _confirm(finding: Finding) -> int:
    return 1 if finding.numbers.get("sudden") else CONFIRM.get(finding.cause, 1)


def is_alarm(finding: Finding) -> bool:
    """Whether a finding is one to wake somebody for: at warning or above, and not accounted for by another."""
    return SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["warning"] and finding.role not in ("victim", "context")


def same(a: Finding, b: Finding) -> bool:
    """Whether two findings are one fault: same cause, no other rank or host, and of passing faults the same onset."""
    if a.cause != b.cause:
        return False
    for mine, theirs in ((a.where.ranks, b.where.ranks), (a.where.hosts, b.where.hosts)):
        if mine and theirs and not set(mine) & set(theirs):
            return False
    if a.cause in PASSING and a.where.step is not None and b.where.step is not None:
        return abs(a.where.step - b.where.step) <= SAME_ONSET
    return True


def _over(finding: Finding, since: PointsSince) -> bool:
    limit = PASSING.get(finding.cause)
    if not limit or finding.where.step is None:
        return False
    after = since(finding.where.step)
    return after is not None and after > limit
