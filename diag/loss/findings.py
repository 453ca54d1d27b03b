"""The loss of one run -> findings: the same for metrics files and console logs, after the fact and in a post-mortem."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from diag.loss import short, signals
from diag.loss.blame import Blame, blame, norms_moved
from diag.loss.events import Event, excursions
from diag.loss.words import fix_of, sentence_of
from diag.schema import SEVERITY_ORDER, Evidence, Finding, Severity, Where

if TYPE_CHECKING:
    from diag.series import Column, Resume, Run

#: A rise so few points before NaN is the way into it, not a divergence of its own.
LEAD_POINTS = 10
#: A resume so few points before the onset is what caused the jump.
RESUME_POINTS = 3
#: A drop at a resume: the median of some points after it, below the course before it by this (scatter; log loss).
DROP_SIGMA, DROP_SHARE, DROP_POINTS, DROP_HISTORY = 6.0, 0.08, 8, 32
#: An excursion among the first points of a run from scratch is a rough start when the run gets below where it began.
START_POINTS, START_STEPS = 24, 400
#: One point this many times its level above it is more than the noise of a batch.
BLIP_FACTOR = 2.0
#: Columns of runs whose loss is not meant to fall: rewards and values, adversaries.
_MOVING_TARGETS = re.compile(r"reward|ep_rew|episode|advantage|(?:policy|pg|value|actor|critic)_?loss|"
                             r"(?:^|[/_])(?:kl|d|g|dis\w{0,10}|gen\w{0,6})_?loss|loss[/_](?:d|g|kl|dis\w{0,10}|gen\w{0,6})$|"
                             r"discriminator")
#: Points shown as evidence.
SHOWN = 5


@dataclass(slots=True)
class Seen:
    """One finding in the making: where it began, for the rules that drop what another one covers."""

    finding: Finding
    step: int


def findings_of(run: Run) -> list[Finding]:
    """Everything that the numbers of `run` show, the earliest first; at most one finding per cause and column."""
    found: list[Seen] = []
    losses = run.losses()
    for column in losses:
        found += _column(run, column)
    for signal, cause in ((signals.scale_collapse(run), "loss_scale"), (signals.all_skipped(run), "skipped")):
        if signal is not None and not any(s.finding.cause == "fp16_loss_scale_collapse" for s in found):
            found.append(_scale(run, run.columns[cause], signal))
    norm = run.get("grad_norm")
    if norm is not None and not losses and (odd := signals.norm_alone(norm, run.get("loss_scale"))) is not None:
        found.append(_nan(run, norm, odd))
    if norm is not None and (grown := signals.growth(norm.values)) is not None:
        found.append(_growth(run, norm, grown))
    return [s.finding for s in sorted(_settled(found, losses), key=lambda s: s.step)]


def _column(run: Run, column: Column) -> list[Seen]:
    found: list[Seen] = []
    nan = signals.nan_onset(run, column)
    if nan is not None:
        found.append(_nan(run, column, nan))
    good = column.finite()
    main = column.name == "loss" or run.get("loss") is None
    if len(good) >= 3 and (good.values <= 0).any() and not (good.values >= 0).all():
        blown = signals.blow_up(good)
        if blown is not None:
            found.append(_blow_up(run, good, blown))
        return found
    nothing = signals.degenerate(good) or short.zeroed(good) if main else None  # a loss beside the main one may be 0
    if nothing is not None:
        odd = run.get("grad_norm")
        later = odd.values[odd.steps >= good.steps[nothing.at]] if odd is not None else np.zeros(0)
        if nan is None and np.isfinite(later).all():
            found.append(_degenerate(run, good, nothing))
        return found
    positive = good.take(good.values > 0)
    if len(positive) >= 4:
        found += _course(run, positive, begun=nan is not None, main=main)
    if not found and main and (seen := _short(run, positive)) is not None:
        found.append(seen)
    return found


def _course(run: Run, positive: Column, *, begun: bool, main: bool) -> list[Seen]:
    """What the course of a positive loss shows; slow things only where nothing else, as NaN (`begun`), was found, and
    of the loss that is optimised: one term of a sum may rise while the sum falls."""
    found: list[Seen] = []
    moved = norms_moved(run, positive.steps) if main else None
    events = excursions(positive.steps, positive.values, from_start=_from_start(run, positive), moved=moved)
    events = [e for e in events if not _rough_start(run, positive, e)]
    resumes = _resumes(run, positive)
    jumped = {i for e in events for i, r in enumerate(resumes) if _at_resume(positive, e, r)}
    found += _excursions(run, positive, events, resumes, main=main)
    for i, resume in enumerate(resumes):
        if i not in jumped and not _replays_agree(run, positive, resume) and \
                (drop := _drop(positive, resume)) is not None:
            found.append(_resume_drop(run, positive, *drop))
    if found or begun or not main or not _meant_to_fall(run, positive):
        return found
    if (risen := signals.climb(positive.values) or signals.settled(positive.values)) is not None:
        return [_climbed(run, positive, risen)]
    if (stuck := signals.above_best(positive.values)) is not None:
        return [_above_best(run, positive, *stuck)]
    if positive.name == "loss" and (flat := signals.plateau(positive)) is not None:
        return [_plateau(run, positive, flat)]
    if (swing := signals.oscillation(positive.values)) is not None:
        return [_oscillation(run, positive, *swing)]
    return []


def _meant_to_fall(run: Run, column: Column) -> bool:
    """Whether a slow rise of `column` is bad: not in reinforcement learning, whose targets move, nor where several
    losses without a sum play against each other."""
    if column.name != "loss" and len(run.losses()) > 1:
        return False
    return not any(_MOVING_TARGETS.search(other.key.lower()) for other in run.columns.values())


def _from_start(run: Run, column: Column) -> bool:
    return not run.steps_known or int(column.steps[0]) <= 20


def _rough_start(run: Run, column: Column, event: Event) -> bool:
    """A bounce among the first points of a run that began with them, and that it left behind."""
    if not _from_start(run, column) or event.onset >= START_POINTS or int(column.steps[event.onset]) > START_STEPS:
        return False
    rest = column.values[event.peak :]
    return len(rest) >= 4 and float(np.median(rest[-3:])) < float(column.values[: event.onset].min())


def _short(run: Run, column: Column) -> Seen | None:
    """What a record of few points shows that needs no history; told with little confidence."""
    event = short.lost_at_once(run, column) or short.jump(run, column)
    if event is None:
        signal = short.beyond(run, column)
        return None if signal is None else _beyond(run, column, signal)
    seen = _excursion(run, column, "loss_divergence" if event.kind == "divergence" else "loss_spike", [event])
    seen.finding.confidence = 0.6
    if seen.finding.severity == "error" and float(column.values[event.peak]) < short.ALONE * event.level:
        seen.finding.severity = "warning"
    return seen


def _beyond(run: Run, column: Column, signal: signals.Signal) -> Seen:
    summary = (f"The loss is {signal.before:.3g} from the first point shown to {signal.after:.3g} at the last, with a "
               "gradient norm to match: the run diverged before this record begins")
    finding = _made(run, column, list(range(min(3, len(column)))), "loss_divergence", "error", 0.65,
                    {"kind": "not recovering", "level": signal.before, "last_step": int(column.steps[-1])},
                    summary=summary)
    finding.fix = fix_of("loss_divergence", run, int(column.steps[0]), Blame())
    return Seen(finding, int(column.steps[0]))


def _resumes(run: Run, column: Column) -> list[tuple[int, Resume]]:
    """(index of the first point written after it, resume) for each resume with points on both sides."""
    found = []
    for resume in run.resumes:
        where = int(np.searchsorted(column.records, resume.record))
        if 0 < where < len(column):
            found.append((where, resume))
    return found


def _at_resume(column: Column, event: Event, resume: tuple[int, Resume]) -> bool:
    return resume[0] - 1 <= event.onset <= resume[0] + RESUME_POINTS


def _excursions(run: Run, column: Column, events: list[Event], resumes: list[tuple[int, Resume]], *,
                main: bool) -> list[Seen]:
    """One finding per kind: the first one leads, the rest are counted and listed. A spike of a loss beside the main one
    is told, not warned of: where it matters the main one shows it."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        jump = any(_at_resume(column, event, r) for r in resumes)
        cause = "loss_resume_jump" if jump else "loss_divergence" if event.kind == "divergence" else "loss_spike"
        groups.setdefault(cause, []).append(event)
    found = [_excursion(run, column, cause, group) for cause, group in groups.items()]
    for seen in found:
        if not main and seen.finding.cause == "loss_spike":
            seen.finding.severity, seen.finding.fix = "info", []
    return found


def _excursion(run: Run, column: Column, cause: str, group: list[Event]) -> Seen:
    event = max(group[:1] if cause != "loss_spike" else group, key=lambda e: (e.kind != "transient", e.height))
    onset, peak = int(column.steps[event.onset]), int(column.steps[event.peak])
    why = blame(run, onset, int(column.steps[max(event.onset - 1, 0)]), peak)
    severity: Severity = "warning"
    if event.kind == "divergence":
        severity = "error"
    elif why.changed and event.kind != "open" or cause == "loss_spike" and _noise(event, group, why):
        severity = "info"
    numbers: dict[str, Any] = {
        "kind": "not recovering" if event.kind == "divergence" else event.kind,
        "height": round(event.height, 5), "level": round(event.level, 5),
        "peak": round(float(column.values[event.peak]), 5), "sigmas": round(min(event.sigmas, 1e4), 1),
        "duration_points": event.points, "last_step": int(column.steps[-1]),
        "last": round(float(column.values[-1]), 5), "column": column.key,
    }
    if run.steps_known:
        last = column.steps[event.end] if event.end is not None else column.steps[-1]
        numbers |= {"peak_step": peak, "duration_steps": int(last) - onset}
    numbers |= why.numbers()
    if len(group) > 1:
        numbers["events"] = [_row(column, e) for e in group[:50]]
    shown = sorted({event.onset, *range(event.onset, min(event.onset + 3, len(column))), event.peak})[:SHOWN]
    first = min(e.onset for e in group)
    finding = _made(run, column, shown, cause, severity, _confidence(event, len(column)), numbers, why)
    finding.summary = sentence_of(cause, run, column, event, why, len(group))
    finding.fix = fix_of(cause, run, onset, why) if severity != "info" else []
    return Seen(finding, int(column.steps[first]))


def _noise(event: Event, group: list[Event], why: Blame) -> bool:
    """One point alone, once in the run, of no great height, that no gradient norm shows: told, not warned of."""
    return event.lone and len(group) == 1 and event.height < BLIP_FACTOR * event.level and why.norm_ratio is None


def _confidence(event: Event, points: int) -> float:
    if event.kind == "open":
        return 0.7
    return 0.8 if points < 40 else 0.9 if event.sigmas > 20 else 0.85


def _row(column: Column, event: Event) -> dict[str, Any]:
    return {"step": int(column.steps[event.onset]), "peak": round(float(column.values[event.peak]), 5),
            "height": round(event.height, 5), "kind": event.kind, "duration_points": event.points}


def _made(run: Run, column: Column, places: list[int], cause: str, severity: Severity, sure: float,
          numbers: dict[str, Any], why: Blame | None = None, summary: str = "") -> Finding:
    beside = ("lr", "grad_norm") if column.name.startswith("loss") else ("lr",)
    proof: list[Evidence] = [run.evidence(column, place, *beside) for place in places]
    where = Where(step=run.step(column, places[0]), module=why.module if why is not None else None)
    return Finding(cause=cause, severity=severity, confidence=sure, summary=summary, where=where, evidence=proof,
                   numbers=numbers)


def _at(run: Run, column: Column, place: int) -> str:
    return f" at step {int(column.steps[place]):,}" if run.steps_known else ""


def _nan(run: Run, column: Column, signal: signals.Signal) -> Seen:
    place = signal.at
    ended = bool(not np.isfinite(column.values[-1])) and len(column) > 1
    step = int(column.steps[place])
    why = blame(run, step, int(column.steps[max(place - 1, 0)]), step)
    gone = run.style == "megatron" and column.name == "loss" and not np.isfinite(column.values[place])
    what = "the loss field disappeared" if gone else signal.note
    numbers: dict[str, Any] = {"last_step": int(column.steps[-1]), "points": signal.points, "column": column.key}
    if np.isfinite(signal.before):
        numbers["level"] = round(signal.before, 5)
    shown = list(range(place, min(place + SHOWN, len(column))))
    finding = _made(run, column, shown, "loss_nan", "error", _sure_of_nan(signal, ended, column.values[place], run),
                    numbers | why.numbers(), why)
    name = "Loss or gradients" if column.name in ("loss", "grad_norm") else column.key
    finding.summary = f"{name} became NaN or infinite{_at(run, column, place)} ({what})"
    finding.fix = fix_of("loss_nan", run, step, why) if place > 0 else []  # nothing to go back to
    return Seen(finding, step)


def _sure_of_nan(signal: signals.Signal, ended: bool, value: float, run: Run) -> float:
    """Little where one point says it in the middle, or two gradient norms or one lost field at the end."""
    if signal.points == 2 and np.isfinite(value) or signal.points == 1 and (not ended or run.style == "megatron"):
        return 0.6
    return 0.9


def _blow_up(run: Run, column: Column, signal: signals.Signal) -> Seen:
    stays = signal.after > 10 * signal.before
    numbers = {"kind": "not recovering" if stays else "slow", "height": round(float(np.abs(column.values).max()), 5),
               "level": round(signal.before, 5), "last_step": int(column.steps[-1]), "column": column.key}
    finding = _made(run, column, [signal.at], "loss_divergence" if stays else "loss_spike",
                    "error" if stays else "warning", 0.8, numbers)
    finding.summary = (f"{column.key} left its range of ±{signal.before:.3g}{_at(run, column, signal.at)}: it reaches "
                       f"{signal.note}" + ("" if stays else " and came back"))
    return Seen(finding, int(column.steps[signal.at]))


def _degenerate(run: Run, column: Column, signal: signals.Signal) -> Seen:
    at = _at(run, column, signal.at)
    few = signal.note == "few"
    sure = 0.55 if few else 0.7 if signal.before == 0 else 0.85
    summary = "The loss is 0 from the beginning: no label is left to learn from" if signal.before == 0 else \
        (f"The loss is printed as 0{at}, after {signal.before:.3g}: NaN that was left out of the mean, or a batch "
         "without labels") if few else \
        (f"The loss fell from {signal.before:.3g} to {signal.after:.2g} within a step{at} and stayed there: the data "
         "or labels are degenerate")
    shown = list(range(signal.at, min(signal.at + SHOWN, len(column))))
    finding = _made(run, column, shown, "loss_degenerate", "warning" if few else "error", sure,
                    {"last_step": int(column.steps[-1]), "level": signal.before}, summary=summary)
    return Seen(finding, int(column.steps[signal.at]))


def _drop(column: Column, resume: tuple[int, Resume]) -> tuple[int, float, float] | None:
    """(index, level before, level after) of a loss that falls suspiciously fast at a resume, and stays down."""
    where = resume[0]
    before = column.values[max(0, where - DROP_HISTORY) : where]
    after = column.values[where : where + DROP_POINTS]
    if len(before) < 8 or len(after) < 5 or (before <= 0).any():
        return None
    logs = np.log(before)
    level = float(np.median(logs[-8:]))
    sigma = max(1.4826 * float(np.median(np.abs(np.diff(logs)))) / np.sqrt(2), 0.002)
    fell = level - float(np.median(np.log(after)))
    slope = max(0.0, (float(np.median(logs[: len(logs) // 2])) - float(np.median(logs[len(logs) // 2 :]))))
    if fell < max(DROP_SIGMA * sigma, DROP_SHARE) + 2 * slope:
        return None
    return where, float(np.exp(level)), float(np.median(after))


def _replays_agree(run: Run, column: Column, resume: tuple[int, Resume]) -> bool:
    """Whether the steps that were done again gave the losses of the first time: then a fall there is no new one."""
    if column.name != "loss" or resume[1].replayed < 4 or not run.replaced:
        return False
    before = run.replaced[0]
    again = (column.steps > resume[1].step) & (column.steps <= resume[1].step + 10**9)
    _, old, new = np.intersect1d(before.steps, column.steps[again], assume_unique=True, return_indices=True)
    if len(old) < 4:
        return False
    x, y = before.values[old], column.values[again][new]
    good = np.isfinite(x) & (x > 0) & (y > 0)
    return bool(good.any()) and abs(float(np.median(np.log(y[good] / x[good])))) < 0.5 * DROP_SHARE


def _resume_drop(run: Run, column: Column, place: int, before: float, after: float) -> Seen:
    numbers = {"kind": "drop", "height": round(after - before, 5), "level": round(before, 5),
               "last_step": int(column.steps[-1]), "grad_norm_led": False}
    finding = _made(run, column, list(range(place, min(place + 3, len(column)))), "loss_resume_jump", "warning", 0.6,
                    numbers)
    finding.summary = (f"The loss fell from {before:.3g} to {after:.3g}{_at(run, column, place)}, where the run was "
                       "resumed: too fast for training; data that was seen before is read again")
    finding.fix = ["Check that the position in the data was restored: compare the consumed samples before and after "
                   "the resume", "Resume once more with the sampler's state of the checkpoint"]
    return Seen(finding, int(column.steps[place]))


def _climbed(run: Run, column: Column, signal: signals.Signal) -> Seen:
    step = int(column.steps[signal.at])
    why = blame(run, step, int(column.steps[max(signal.at - 1, 0)]), int(column.steps[-1]))
    numbers = {"kind": "not recovering", "level": round(signal.before, 4), "climbed": True,
               "height": round(signal.after - signal.before, 4), "last_step": int(column.steps[-1])} | why.numbers()
    shown = list(range(signal.at, min(signal.at + SHOWN, len(column))))
    finding = _made(run, column, shown, "loss_divergence", "error", 0.75, numbers, why)
    since = f" since step {step:,}" if run.steps_known else ""
    finding.summary = f"The loss climbed from {signal.before:.3g} to {signal.after:.3g}{since} and is still up"
    finding.fix = fix_of("loss_divergence", run, step, why)
    return Seen(finding, step)


def _above_best(run: Run, column: Column, signal: signals.Signal, high: float) -> Seen:
    step = int(column.steps[signal.at])
    since = f" at step {step:,}" if run.steps_known else ""
    finding = _made(run, column, [signal.at, len(column) - 1], "loss_divergence", "warning", 0.6,
                    {"kind": "not recovering", "level": round(signal.before, 4), "climbed": True,
                     "height": round(high - signal.before, 4), "last": round(signal.after, 4),
                     "last_step": int(column.steps[-1])},
                    summary=f"The loss was best{since} ({signal.before:.3g}), climbed to {high:.3g} and has not come "
                            f"back since: {signal.after:.3g} at the end")
    return Seen(finding, step)


def _growth(run: Run, column: Column, signal: signals.Signal) -> Seen:
    step = int(column.steps[signal.at])
    since = f" since step {step:,}" if run.steps_known else ""
    finding = _made(run, column, list(range(signal.at, min(signal.at + SHOWN, len(column)))), "grad_explosion", "error",
                    0.8, {"level": round(signal.before, 4), "ratio": round(signal.after / signal.before, 1)},
                    summary=f"The gradient norm grew from {signal.before:.3g} to {signal.after:.3g}{since}")
    return Seen(finding, step)


def _scale(run: Run, column: Column, signal: signals.Signal) -> Seen:
    if column.name == "skipped":
        summary = "Every iteration is skipped" + (f" since step {int(column.steps[signal.at]):,}"
                                                  if run.steps_known else "")
    else:
        summary = f"The loss scale fell from {signal.before:.0f} to {signal.after:g}, {signal.note}"
    finding = _made(run, column, list(range(signal.at, min(signal.at + SHOWN, len(column)))),
                    "fp16_loss_scale_collapse", "error", 0.85 if column.name == "loss_scale" else 0.7,
                    {"last_step": int(column.steps[-1]), "points": signal.points}, summary=summary)
    return Seen(finding, int(column.steps[signal.at]))


def _plateau(run: Run, column: Column, signal: signals.Signal) -> Seen:
    finding = _made(run, column, [0, len(column) - 1], "loss_plateau", "warning", 0.6,
                    {"level": round(signal.before, 4), "last": round(signal.after, 4),
                     "last_step": int(column.steps[-1]), "lr": run.value("lr", int(column.steps[-1]))},
                    summary=f"The loss does not fall: {signal.before:.4g} at the beginning, {signal.after:.4g} after "
                            f"{int(column.steps[-1]):,} steps")
    return Seen(finding, int(column.steps[0]))


def _oscillation(run: Run, column: Column, signal: signals.Signal, period: float) -> Seen:
    spacing = float(np.median(np.diff(column.steps[-min(len(column), 1000) :])))
    steps = period * spacing
    finding = _made(run, column, [signal.at], "loss_oscillation", "warning", 0.6,
                    {"amplitude": round(signal.after, 4), "period_points": round(period, 1),
                     "period_steps": round(steps, 1), "last_step": int(column.steps[-1])},
                    summary=f"The loss swings by ±{signal.after:.0%} with a period of about {steps:,.0f} steps: the "
                            "data come in a fixed order, or the learning rate is too high")
    return Seen(finding, int(column.steps[signal.at]))


def _settled(found: list[Seen], losses: list[Column]) -> list[Seen]:
    """Without what another finding covers: the way into NaN, spikes of a collapsing loss scale, a second column."""
    causes = {s.finding.cause for s in found}
    if "fp16_loss_scale_collapse" in causes:
        found = [s for s in found if s.finding.cause not in ("loss_spike", "loss_divergence", "grad_explosion")]
    nan = min((s.step for s in found if s.finding.cause == "loss_nan"), default=None)
    if nan is not None and losses:
        steps = losses[0].steps
        found = [s for s in found if not (s.finding.cause in ("loss_spike", "loss_divergence") and s.step <= nan and
                                          ((steps >= s.step) & (steps < nan)).sum() <= LEAD_POINTS)]
        found = [s for s in found if s.finding.cause != "loss_spike" or s.finding.numbers.get("kind") != "open"]
    by_cause: dict[str, Seen] = {}
    for seen in sorted(found, key=lambda s: (-SEVERITY_ORDER[s.finding.severity], s.step)):
        by_cause.setdefault(seen.finding.cause, seen)
    if "loss_degenerate" in by_cause:
        by_cause = {c: s for c, s in by_cause.items() if c not in ("loss_spike", "loss_divergence")}
    return list(by_cause.values())
