"""Router collapse, expert imbalance and dropped tokens, from per-expert counts.

Sees: how tokens spread over experts in each MoE layer, over windows large enough that chance does not matter
(`diag.routing`). Cannot see: which tokens, and why; the suspects are ranked by what configuration, curves and weights
say. Loads of single ranks are not in the metrics, so a slow rank under a balanced router is somebody else's finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diag.artefacts import Artefacts
from diag.artefacts.expert_weights import ExpertWeights
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_events import EventLog
from diag.detectors import NotChecked, detector
from diag.placement import Layout, describe, recent_counts
from diag.routing import DEAD_ALARM, DEAD_STEPS, DROP_ALARM, GINI_WARN, Layer, judge
from diag.schema import Evidence, Finding, Severity, Where
from diag.suspects import fix_order, lr_jump, suspects

#: Logged steps below which a picture is a snapshot: worth showing, not worth certainty.
SNAPSHOT_RECORDS = 3


@detector("router", needs=MetricsLog, wants=RunConfig, subject="metrics with router values")
def moe_routing(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """At most one finding per cause and metrics file, and one for the layers that are well."""
    logs = artefacts.of(MetricsLog)
    for log in logs:
        yield from routing_findings(log, artefacts)
    if not any(log.routers for log in logs):
        yield NotChecked("no router values in the metrics (a dense model, or the recorder did not log them)")


def routing_findings(log: MetricsLog, artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """What is to be said about the routing of one run."""
    config = artefacts.beside(log, RunConfig)
    layers = judge(log, config)
    weights = _weights(log, artefacts)
    for state, cause in (("collapsed", "moe_router_collapse"), ("imbalanced", "moe_expert_imbalance")):
        sick = [layer for layer in layers if layer.state == state]
        if sick:
            finding = _imbalance(cause, sick, log, config, weights)
            _carriers(finding, sick, log, config, artefacts)
            yield finding
    dropping = [layer for layer in layers if layer.drop_stretch and layer.drop_stretch.ongoing]
    if dropping:
        yield _token_drop(dropping, log, config)
    yield from _well(layers, dropping)
    if log.routers and not layers:
        yield NotChecked(f"{log.path} has router values, but neither counts nor gini with gini_floor")


def _weights(log: MetricsLog, artefacts: Artefacts) -> ExpertWeights | None:
    """Of the run that `log` belongs to, the checkpoint whose experts are most alike: they part as training goes on."""
    own = [item for item in artefacts.of(ExpertWeights) if item.layers and item.run_directory == log.directory]
    return max(own, key=lambda item: max(layer.median for layer in item.layers), default=None)


def _carriers(
    finding: Finding, sick: list[Layer], log: MetricsLog, config: RunConfig | None, artefacts: Artefacts
) -> None:
    """Say who carries the hottest experts and how they could be spread, where the layout is known."""
    layout, counts = Layout.of(config), recent_counts(log)
    if layout is None:
        return
    hosts = {rank: event.fields["host"] for item in artefacts.of(EventLog) for event in item.events
             if event.name == "start" and isinstance(event.fields.get("host"), str) for rank in item.ranks}
    rows = [describe(layer.layer, counts[layer.layer], layout, hosts) for layer in sick
            if any(counts.get(layer.layer, ()))]
    if not rows:
        return
    finding.numbers["carriers"] = rows
    row = next((r for r in rows if r["layer"] == finding.numbers["layers"][0]["layer"]), rows[0])
    ranks = row["ranks"]
    assert isinstance(ranks, list)
    at = f" ({', '.join(row['hosts'])})" if isinstance(row.get("hosts"), list) else ""  # type: ignore[arg-type]
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}{at}"
    finding.summary += f" Its hottest expert, {row['hottest_expert']}, lies on {who}, {row['rank_load']:.1f} times " \
                       "an even load."
    if "placement" in row:
        placed = str(row["placement"])
        finding.fix.append(f"To even out the ranks meanwhile, place the experts of layer {row['layer']} as "
                           f"{placed if len(placed) <= 100 else 'in numbers.carriers'}: then the busiest rank has "
                           f"{row['rank_load_then']:.2f} times an even load.")


def _imbalance(
    cause: str, sick: list[Layer], log: MetricsLog, config: RunConfig | None, weights: ExpertWeights | None
) -> Finding:
    sick = sorted(sick, key=lambda layer: -layer.last.excess)
    worst = sick[0]
    onsets = [layer.onset() for layer in sick]
    first = min((o.window.first_step for o in onsets if o), default=None)
    alarm = cause == "moe_router_collapse" or any(_is_alarm(layer) for layer in sick)
    severity: Severity = "error" if alarm else "warning"
    confidence = 0.9 if alarm else 0.75
    if sum(item.window.records for item in worst.windows) < SNAPSHOT_RECORDS:
        severity, confidence = "warning", 0.5
    found = suspects(log, config, first, weights)
    fixes = fix_order(found)
    numbers: dict[str, Any] = {"layers": [layer.row() for layer in sick], "suspects": [s.row() for s in found]}
    if (jump := lr_jump(log, first)) is not None:
        fixes.insert(0, f"Mend the schedule: the learning rate rose {jump[1]:.0f} times at step {jump[0]:,}.")
        numbers |= {"lr_jump_step": jump[0], "lr_jump_factor": round(jump[1], 2)}
    return Finding(
        cause=cause, severity=severity, confidence=confidence, summary=_sentence(cause, sick, first, log),
        where=Where(module="router", step=first if log.steps_known else None), evidence=_evidence(sick, log),
        fix=fixes, numbers=numbers,
    )


def _is_alarm(layer: Layer) -> bool:
    return layer.alarm or len(layer.dead) > DEAD_ALARM * layer.experts


def _sentence(cause: str, sick: list[Layer], first: int | None, log: MetricsLog) -> str:
    worst = sick[0]
    last = worst.last
    since = f" since step {first:,}" if first is not None and log.steps_known else ""
    if since and worst.rise is not None:
        steps = worst.rise.steps
        since += ", at once" if steps < 3 else f", {'within' if worst.rise.cliff else 'rising for'} {steps:,} steps"
    gini = f"Gini {last.gini:.2f}, {last.excess:.2f} above uniform routing"
    if cause == "moe_router_collapse":
        share = ""
        if last.hottest_share is not None:
            share = f"{last.hottest_share:.0%} of tokens visit one expert, "
        elif last.top_share is not None:
            share = f"one expert takes {last.top_share:.0%} of all assignments, "
        return f"The router of {_layers(sick)} has collapsed{since}: {_in(worst, sick)}{share}{gini}."
    if worst.dead and worst.onset() is None:
        return f"Experts of {_layers(sick)} are dead: {_in(worst, sick)}{len(worst.dead)} of {worst.experts} got no " \
               f"token in the last {DEAD_STEPS} steps."
    if worst.hot is not None and worst.hot.ongoing and last.excess < GINI_WARN:
        return f"An expert of {_layers(sick)} is overloaded{since}: {_in(worst, sick)}expert {worst.hot.expert} " \
               f"takes {worst.hot.times:.1f} times its share."
    return f"Experts of {_layers(sick)} are unevenly loaded{since}: {_in(worst, sick)}{gini}."


def _in(worst: Layer, sick: list[Layer]) -> str:
    return f"in layer {worst.layer} " if len(sick) > 1 else ""


def _token_drop(dropping: list[Layer], log: MetricsLog, config: RunConfig | None) -> Finding:
    dropping = sorted(dropping, key=lambda layer: -(layer.drop_rate or 0))
    worst = dropping[0]
    rate, floor = worst.drop_rate or 0.0, worst.drop_floor
    steps = [layer.windows[layer.drop_stretch.first].window.first_step for layer in dropping if layer.drop_stretch]
    factor = config.get("model.moe.capacity_factor") if config else None
    at = f" at capacity factor {factor}" if factor else ""
    against = f" (uniform routing would drop {floor:.1%})" if floor is not None else " (capacity not known)"
    alarm = floor is not None and rate - floor > DROP_ALARM
    return Finding(
        cause="moe_token_drop", severity="error" if alarm else "warning", confidence=0.85 if floor is not None else 0.5,
        summary=f"{_layers(dropping, 'Layer').capitalize()} drop{'s' if len(dropping) == 1 else ''} "
                f"{rate:.1%} of token assignments{at}{against}.",
        where=Where(module="router", step=min(steps) if log.steps_known else None),
        evidence=_evidence(dropping, log, drops=True),
        numbers={"layers": [layer.row() for layer in dropping]},
    )


def _well(layers: list[Layer], dropping: list[Layer]) -> Iterator[Finding | NotChecked]:
    well = [x for x in layers if x.state in ("balanced", "recovered", "unjudged") and x not in dropping]
    if not well:
        return
    worst = max(well, key=lambda layer: layer.last.excess)
    everything = len(well) == len(layers)
    who = f"all {len(layers)} MoE layers" if everything and len(layers) > 1 else _layers(well)
    recovered = [layer for layer in well if layer.state == "recovered"]
    verb = "was uneven before and has" if len(recovered) == 1 else "were uneven before and have"
    note = f"; {_layers(recovered)} {verb} recovered" if recovered else ""
    if all(layer.state == "unjudged" for layer in well):
        yield NotChecked(f"routing of {who} cannot be judged yet: too few tokens, or recorded during warm-up only")
        return
    else:
        excess = max(worst.last.excess, 0.0)
        note += "".join(f"; layer {x.layer} is drifting and at this pace passes {GINI_WARN} in {x.drift:,} steps"
                        for x in well if x.drift is not None)
        unjudged = [x for x in well if x.state == "unjudged"]
        note += f"; {_layers(unjudged)} cannot be judged yet" if unjudged else ""
        what = f"Routing is balanced in {who}: Gini at most" if excess <= GINI_WARN else \
            f"Routing of {who} is uneven in its last steps, not for long enough to alarm: Gini up to"
        summary = f"{what} {excess:.2f} above uniform routing{note}."
    yield Finding(cause="healthy", role="context", severity="info", confidence=0.9, summary=summary,
                  where=Where(module="router"), numbers={"layers": [layer.row() for layer in well]})


def _evidence(sick: Sequence[Layer], log: MetricsLog, *, drops: bool = False) -> list[Evidence]:
    """The onsets and the last lines of the worst layers, in the order of the file."""
    found = []
    for layer in sick[:3]:
        decisive = layer.drop_stretch if drops else layer.stretch
        places = [layer.windows[decisive.first]] if decisive else []
        if not places or places[0] is not layer.last:
            places.append(layer.last)
        for item in places:
            window = item.window
            step = f"step {window.first_step}" + (f"-{window.last_step}" if window.records > 1 else "")
            if drops:
                text = f"{step}: router/{layer.layer}/drop_rate = {window.mean('drop_rate') or 0:.3g}"
            elif window.counts is not None:
                shown = ", ".join(map(str, window.counts[:16].tolist())) + (", …" if len(window.counts) > 16 else "")
                text = f"{step}: router/{layer.layer}/counts = [{shown}]"
            else:
                text = f"{step}: router/{layer.layer}/gini = {item.gini:.3f}, gini_floor = {item.gini_floor:.3f}"
            found.append(Evidence(path=log.path, line=window.first_line, text=text))
    return sorted(found, key=lambda item: item.line or 0)


def _layers(layers: Sequence[Layer], word: str = "layer") -> str:
    numbers = sorted(layer.layer for layer in layers)
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if len(numbers) > 6:
        return f"{len(numbers)} {word}s ({numbers[0]} to {numbers[-1]})"
    return f"{word}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
