"""What the printed numbers say: NaN, collapsed loss scale, degenerate loss, spikes, divergence, slow steps, routing.

Only robust, simple checks; the curve analysis proper works on metrics files. A log prints few points, so everything is
judged against the run's own level, and the first points of a run are let off (warm-up, scale search).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from diag.artefacts.log_facts import Progress
from diag.artefacts.log_progress import grad_norm_of, loss_of
from diag.logs.drift import growing, rising
from diag.logs.known import pick_evidence
from diag.logs.view import View, evidence
from diag.schema import Evidence, Finding, Severity, Where

#: A dynamic loss scale starts high and is halved until it fits; Megatron starts at 2^32.
SCALE_SEARCH_STEPS = 40
#: This many skipped steps in a row are no search any more.
OVERFLOWS = 5
#: Points of a spike above the level, in units of the level's own scatter and of the level.
ONSET_SIGMA, ONSET_SHARE = 6.0, 0.02
PEAK_SIGMA, PEAK_SHARE = 12.0, 0.15
#: With so few points before it a spike must be much larger.
FEW, FEW_SHARE = 8, 0.3
#: Printed losses of the first steps bounce.
WARM_UP_STEPS = 20
#: A rise so few points before NaN is the way into it, not a divergence of its own.
LEAD_POINTS = 10
#: A resume so few points before the jump is what caused it.
RESUME_POINTS = 3
SLOW_SHARE, SLOW_SIGMA, SLOW_POINTS = 0.03, 6.0, 3


@dataclass(frozen=True, slots=True)
class Series:
    """The training progress of one writer, in order."""

    log: int
    points: list[Progress]


def main_series(view: View) -> Series | None:
    """The writer with most loss lines. Ranks that repeat the same step count once."""
    groups: dict[tuple[int, str, str], list[Progress]] = {}
    for index, item in view.progress:
        if loss_of(item) is not None or "loss_scale" in item.values or item.kind in ("megatron", "olmo"):
            kind = "bar" if item.kind.startswith("bar") else item.kind.split(" ")[0]
            groups.setdefault((index, item.speaker.mark, kind), []).append(item)
    if not groups:
        return None
    (log, _, _), points = max(groups.items(), key=lambda entry: len(entry[1]))
    return Series(log, points)


def numeric_findings(view: View) -> list[Finding]:
    """All findings about printed numbers; the one that began first leads in the correlation."""
    found: list[Finding] = []
    series = main_series(view)
    if series is not None:
        for check in (nan, degenerate, scale_collapse, spike, climb, norm_growth, slower):
            finding = check(view, series)
            if finding is not None:
                found.append(finding)
    for routing in (routed_to_one,):
        finding = routing(view)
        if finding is not None:
            found.append(finding)
    causes = {f.cause for f in found}
    if sum(f.cause == "loss_divergence" for f in found) > 1 or causes & {"loss_spike", "loss_resume_jump"}:
        found = [f for f in found if "climbed" not in f.numbers]
    if "fp16_loss_scale_collapse" in causes:
        found = [f for f in found if f.cause not in ("loss_spike", "loss_divergence", "grad_explosion")]
    if "loss_nan" in causes:
        began = min(e.line or 0 for f in found if f.cause == "loss_nan" for e in f.evidence)
        found = [f for f in found if f.cause != "loss_spike" and not (
            f.cause == "loss_divergence" and _points_between(series, f.evidence[0].line or 0, began) <= LEAD_POINTS)]
    if "loss_degenerate" in causes:
        found = [f for f in found if f.cause not in ("loss_spike", "loss_divergence", "slow_node", "slow_data_io")]
    return found


def _points_between(series: Series | None, first: int, last: int) -> int:
    return sum(first <= p.line < last for p in series.points) if series is not None else 0


def _proof(view: View, series: Series, points: list[Progress]) -> list[Evidence]:
    log = view.logs[series.log]
    return [evidence(log, p.line, p.offset, p.text, p.speaker.time, p.speaker.rank) for p in points[:5]]


def _made(view: View, series: Series, points: list[Progress], cause: str, severity: Severity, sure: float, summary: str,
          **numbers: object) -> Finding:
    step = points[0].step if points[0].step >= 0 else None
    return Finding(cause=cause, severity=severity, confidence=sure, summary=summary, where=Where(step=step),
                   evidence=_proof(view, series, points), numbers=dict(numbers))


def _bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def nan(view: View, series: Series) -> Finding | None:
    """Loss or gradient norm not finite; Megatron's missing "lm loss"; a printed loss of 0.0 with a NaN norm."""
    points = series.points
    bad: list[Progress] = []
    for number, point in enumerate(points):
        loss, norm = loss_of(point), grad_norm_of(point)
        others = [v for k, v in point.values.items() if any(w in k for w in ("loss", "ce", "ctc", "ppl"))]
        printed = _bad(loss) or any(_bad(v) for v in others) or point.values.get("number_of_nan_iterations", 0) > 0
        vanished = (point.kind == "megatron" and loss is None and "number_of_nan_iterations" in point.values
                    and point.values.get("number_of_skipped_iterations", 0) == 0
                    and any(loss_of(p) is not None for p in points[:number]))
        if printed or vanished or (_bad(norm) and (loss == 0 or number >= 3)):
            bad.append(point)
    if not bad:
        return None
    ended = bad[-1] is points[-1] or points[-1].line - bad[-1].line < 3
    if len(bad) == 1 and not ended:
        return None  # one skipped step
    step = f" at step {bad[0].step}" if bad[0].step >= 0 else ""
    what = "printed loss 0.0 with a NaN gradient norm" if loss_of(bad[0]) == 0 else \
        "the loss field disappeared" if loss_of(bad[0]) is None and not _bad(grad_norm_of(bad[0])) else "not finite"
    return _made(view, series, bad, "loss_nan", "error", 0.9 if len(bad) > 1 or ended else 0.6,
                 f"Loss or gradients became NaN or infinite{step} ({what})", last_step=points[-1].step)


def degenerate(view: View, series: Series) -> Finding | None:
    """The loss falls to almost nothing at once, and stays there."""
    values = [(p, v) for p in series.points if (v := loss_of(p)) is not None and math.isfinite(v)]
    for number in range(1, len(values)):
        before = [v for _, v in values[max(0, number - 3) : number]]
        after = values[number:]
        if len(after) < 3 or max(before) < 1.0:
            continue
        if all(abs(v) < 0.01 * min(before) for _, v in after) and min(before) > 0.5:
            if any(_bad(grad_norm_of(p)) for p, _ in after):
                return None  # a printed zero that is a NaN
            step = after[0][0].step
            return _made(view, series, [p for p, _ in after], "loss_degenerate", "error", 0.85,
                         f"The loss fell from {before[-1]:.3g} to {after[0][1]:.2g} within a step"
                         f"{f' ({step})' if step >= 0 else ''} and stayed there: the data or labels are degenerate")
    if len(values) >= 5 and all(v == 0 for _, v in values) and not any(_bad(grad_norm_of(p)) for p, _ in values):
        return _made(view, series, [p for p, _ in values], "loss_degenerate", "error", 0.7,
                     "The loss is 0 from the beginning: no label is left to learn from")
    return None


def scale_collapse(view: View, series: Series) -> Finding | None:
    """The fp16 loss scale falls and falls; steps are skipped for ever."""
    points = series.points
    items = view.of("overflow-skip")
    scales = [float(i.groups["scale"]) for i in items if _number(i.groups["scale"])]
    started = points[0].step if points else 0
    skipped = view.of("skipped-count")
    if skipped:
        last = skipped[-1]
        step, count = int(last.groups["step"]), int(last.groups["skipped"])
        if step >= 100 and count > 0.2 * step:
            return Finding(cause="fp16_loss_scale_collapse", severity="error", confidence=0.9,
                           summary=f"{count:,} of {step:,} optimizer steps were skipped because of fp16 overflow",
                           evidence=pick_evidence([*items[-3:], last]), where=Where(step=step),
                           numbers={"skipped": count, "steps": step})
    values = [(p, p.values["loss_scale"]) for p in points if "loss_scale" in p.values]
    if values and values[-1][1] <= 1.0 and max(v for _, v in values) >= 1024 and \
            sum(v <= 1.0 for _, v in values) >= 2:
        low = [p for p, v in values if v <= 1.0]
        return _made(view, series, low, "fp16_loss_scale_collapse", "error", 0.85,
                     f"The loss scale fell from {max(v for _, v in values):.0f} to its minimum")
    if len(scales) >= OVERFLOWS and started > SCALE_SEARCH_STEPS:
        run = _longest_fall(scales)
        if run >= OVERFLOWS and max(scales) / max(min(scales), 1e-9) >= 16:
            return Finding(cause="fp16_loss_scale_collapse", severity="error", confidence=0.85,
                           summary=f"{run} optimizer steps in a row overflowed in fp16; the loss scale fell from "
                                   f"{max(scales):.0f} to {min(scales):.0f}",
                           evidence=pick_evidence(items[:5]), numbers={"overflows": len(items)})
    fell = _skips(points)
    if fell is not None and points[0].step > 0 and fell[0].step > SCALE_SEARCH_STEPS:
        return _made(view, series, fell, "fp16_loss_scale_collapse", "error", 0.7,
                     "Every iteration is skipped and the loss scale keeps falling")
    return None


def _skips(points: list[Progress]) -> list[Progress] | None:
    tail: list[Progress] = []
    for point in reversed(points):
        if point.values.get("number_of_skipped_iterations", 0) >= 1 and loss_of(point) is None:
            tail.insert(0, point)
        else:
            break
    return tail if len(tail) >= 2 * OVERFLOWS else None


def _longest_fall(scales: list[float]) -> int:
    best = run = 1
    for before, now in zip(scales, scales[1:], strict=False):
        run = run + 1 if now <= before else 1
        best = max(best, run)
    return best


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def scatter(values: list[float]) -> float:
    """1.4826 x the median absolute deviation: the standard deviation of clean data, deaf to outliers."""
    middle = median(values)
    return 1.4826 * median(abs(v - middle) for v in values)


def spike(view: View, series: Series) -> Finding | None:
    """A jump of the loss above its own level; a spike when it comes back, a divergence when it does not."""
    values = [(p, v) for p in series.points if (v := loss_of(p)) is not None and math.isfinite(v)]
    if len({p.kind.split(" ")[0] for p, _ in values} & {"bar"}) and len(values) > 3000:
        values = values[:: len(values) // 3000]
    for number in range(3, len(values)):
        base = [v for _, v in values[max(0, number - 30) : number]]
        level, wide = median(base[-8:]), max(scatter(base), 0.002 * abs(median(base)))
        if 0 <= values[number][0].step < WARM_UP_STEPS or level <= 0:
            continue
        now = values[number][1]
        if now < level + max(ONSET_SIGMA * wide, ONSET_SHARE * level):
            continue
        rest = values[number:]
        peak_at = max(range(len(rest)), key=lambda i: rest[i][1])
        peak = rest[peak_at][1]
        share = FEW_SHARE if number < FEW else PEAK_SHARE
        above = [v for _, v in rest[: max(3, peak_at + 2)] if v > level + max(ONSET_SIGMA * wide, ONSET_SHARE * level)]
        if peak < level + max(PEAK_SIGMA * wide, share * level) or (len(above) < 2 and len(rest) > 1):
            continue
        return _judge(view, series, [p for p, _ in rest], [v for _, v in rest], level, wide, peak, peak_at,
                      values[max(0, number - RESUME_POINTS)][0])
    return None


def resumed(view: View, series: Series, first: int, last: int) -> bool:
    """Whether a checkpoint was loaded, or the job started anew, between two lines of the series' log; or the step
    went back there."""
    marks = view.of("ckpt-loading", "agent-restart")
    if any(i.place.log == series.log and first < i.line <= last for i in marks):
        return True
    steps = [p.step for p in series.points if first <= p.line <= last and p.step >= 0 and p.total is None]
    return any(b < a for a, b in zip(steps, steps[1:], strict=False))


def climb(view: View, series: Series) -> Finding | None:
    """The loss climbs slowly away from its best level, without any jump."""
    values = [(p, v) for p in series.points if (v := loss_of(p)) is not None and math.isfinite(v)]
    found = rising(values)
    if found is None:
        return None
    at, low, high = found
    step = values[at][0].step
    return _made(view, series, [p for p, _ in values[at:]], "loss_divergence", "error", 0.75,
                 f"The loss climbed from {low:.3g} to {high:.3g}{f' since step {step}' if step >= 0 else ''} and is "
                 "still up", level=round(low, 4), height=round(high - low, 4), climbed=True)


def norm_growth(view: View, series: Series) -> Finding | None:
    """The gradient norm grows without bound."""
    values = [(p, v) for p in series.points if (v := grad_norm_of(p)) is not None and math.isfinite(v)]
    found = growing(values)
    if found is None:
        return None
    at, low, high = found
    step = values[at][0].step
    return _made(view, series, [p for p, _ in values[at:]], "grad_explosion", "error", 0.8,
                 f"The gradient norm grew from {low:.3g} to {high:.3g}{f' since step {step}' if step >= 0 else ''}",
                 level=round(low, 4), ratio=round(high / low, 1))


def _judge(view: View, series: Series, points: list[Progress], values: list[float], level: float, wide: float,
           peak: float, peak_at: int, onset_before: Progress) -> Finding:
    last = values[-1]
    back = last < level + max(ONSET_SIGMA * wide, 0.05 * level)
    falling = len(values) - peak_at > 3 and all(b < a for a, b in zip(values[peak_at:], values[peak_at + 1 :],
                                                                     strict=False)) and \
        values[-1] < values[-2] * 0.99
    onset = points[0].step
    at = f" at step {onset}" if onset >= 0 else ""
    numbers = {"height": round(peak - level, 4), "level": round(level, 4), "last_step": points[-1].step}
    if resumed(view, series, onset_before.line, points[0].line):
        return _made(view, series, points, "loss_resume_jump", "warning" if back or falling else "error", 0.85,
                     f"The loss jumped from {level:.3g} to {peak:.3g}{at}, where the run was resumed", **numbers)
    if back or falling:
        state = "and came back" if back else "and is coming down"
        return _made(view, series, points, "loss_spike", "warning", 0.8,
                     f"The loss jumped from {level:.3g} to {peak:.3g}{at} {state}", **numbers)
    return _made(view, series, points, "loss_divergence", "error", 0.8,
                 f"The loss rose from {level:.3g} to {peak:.3g}{at} and stays up ({last:.3g})", **numbers)


def slower(view: View, series: Series) -> Finding | None:
    """Steps become slower for good: at once (a node) or gradually from the start (data)."""
    for key, sense in (("elapsed_time_per_iteration_(s)", 1), ("elapsed_time_per_iteration_(ms)", 1),
                       ("throughput/device/tokens_per_second", -1), ("tps", -1), ("tokens_per_second", -1),
                       ("samples_per_second", -1)):
        points = [(p, p.values[key]) for p in series.points if p.values.get(key, 0) > 0
                  and p.values.get("global_batch_size", 0) == series.points[-1].values.get("global_batch_size", 0)]
        if len(points) < 2 * SLOW_POINTS + 1:
            continue
        cost = [v if sense > 0 else 1.0 / v for _, v in points]
        step = _step_up(cost)
        if step is not None:
            at, ratio = step
            return _made(view, series, [p for p, _ in points[at:]], "slow_node", "warning", 0.62,
                         f"Steps take {ratio - 1:.0%} longer since step {points[at][0].step}, and stay so",
                         ratio=round(ratio, 4))
        if sense < 0 and len(cost) >= 6 and cost[-1] > 1.4 * cost[0] and \
                sum(b >= a * 0.99 for a, b in zip(cost, cost[1:], strict=False)) >= 0.8 * (len(cost) - 1) and \
                cost[len(cost) // 2] > 1.3 * cost[0]:
            return _made(view, series, [p for p, _ in points], "slow_data_io", "warning", 0.6,
                         f"Throughput falls from the first steps on ({points[0][1]:,.0f} to {points[-1][1]:,.0f}): "
                         "the ranks wait for data", ratio=round(cost[-1] / cost[0], 3))
    return None


def _step_up(cost: list[float]) -> tuple[int, float] | None:
    """Where the level rises once and for all, and by which factor; both sides must be quiet."""
    best: tuple[int, float] | None = None
    for at in range(4, len(cost) - SLOW_POINTS + 1):
        left, right = cost[max(0, at - 20) : at], cost[at : at + 20]
        low, high = median(left), median(right)
        noise = max(scatter(left), 0.001 * low)
        if high > low * (1 + SLOW_SHARE) and high - low > SLOW_SIGMA * noise and min(right) > low + 3 * noise and \
                min(cost[at:]) > low + 3 * noise and cost[-1] > low * (1 + SLOW_SHARE) and \
                scatter(right) < 0.5 * (high - low) and (best is None or high / low > best[1] * 1.01):
            best = at, high / low
    return best


def routed_to_one(view: View) -> Finding | None:
    """(Nearly) all tokens of a layer go to one expert, in most layers that are printed."""
    last: dict[str, tuple[float, object]] = {}
    for item in view.of("topk-indices"):
        experts = item.groups["experts"].replace(" ", "").split(",")
        last[item.groups["layer"]] = (max(experts.count(e) for e in set(experts)) / len(experts), item)
    for item in view.of("expert-load"):
        counts = [float(c) for c in item.groups["counts"].replace(",", " ").split() if c != "."]
        if sum(counts) > 0:
            last[f"load {item.line}"] = (max(counts) / sum(counts), item)
    collapsed = [item for share, item in last.values() if share >= 0.95]
    if not last or len(collapsed) < max(1, len(last) // 2):
        return None
    return Finding(cause="moe_router_collapse", severity="error", confidence=0.88,
                   summary=f"In {len(collapsed)} of {len(last)} layers printed (almost) all tokens go to one expert",
                   evidence=pick_evidence(collapsed), where=Where())  # type: ignore[arg-type]
