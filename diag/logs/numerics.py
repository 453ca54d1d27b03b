"""What the printed numbers say: loss, norm and loss scale by the analysis of `diag.loss`; routing printed as text.

The same analysis judges metrics files (`diag.detectors.loss_series`). A run that also left metrics is judged there,
with all its points; here are the runs that are known from console logs alone, and what only lines of text tell of fp16.
"""

from __future__ import annotations

from diag.artefacts import Artefacts
from diag.artefacts.log_facts import Log
from diag.artefacts.log_progress import loss_of
from diag.logs.known import pick_evidence
from diag.logs.view import View
from diag.schema import Finding, Where

#: Skipped steps that count as lost, of all; below so many steps nothing is said.
SKIPPED_SHARE, SKIPPED_STEPS = 0.2, 100
#: A dynamic loss scale starts high and is halved until it fits; Megatron starts at 2^32.
SCALE_SEARCH_STEPS = 40
#: This many skipped steps in a row are no search any more; the scale must have fallen by so much.
OVERFLOWS, FALL = 5, 16.0
#: So many steps with a loss after a norm that was NaN: it was one batch.
WENT_ON = 3
#: Runs that are judged, those with most points first.
MAX_RUNS = 8


def numeric_findings(view: View) -> list[Finding]:
    """All findings about printed numbers; the one that began first leads in the correlation."""
    found = series_findings(view)
    if not any(f.cause == "fp16_loss_scale_collapse" for f in found):
        scale = overflows(view)
        if scale is not None:
            found = [f for f in found if f.cause not in ("loss_spike", "loss_divergence", "grad_explosion")]
            found.append(scale)
    if not any(f.cause == "loss_nan" for f in found) and (bad := bad_norms(view)) is not None:
        found.append(bad)
    routing = routed_to_one(view)
    if routing is not None:
        found.append(routing)
    return found


def series_findings(view: View) -> list[Finding]:
    """What the loss of each run shows that only console logs tell of."""
    if not any(log.progress for log in view.logs):
        return []
    from diag.loss.findings import findings_of
    from diag.series import runs

    known = runs(view.artefacts if view.artefacts is not None else Artefacts(view.logs))
    printed = [run for run in known if all(isinstance(item, Log) for item in run.artefacts)]
    return [finding for run in printed[:MAX_RUNS] for finding in findings_of(run)]


def overflows(view: View) -> Finding | None:
    """The fp16 loss scale falls and falls; steps are skipped for ever: as lines of DeepSpeed and Megatron tell it."""
    skipped = view.of("skipped-count")
    items = view.of("overflow-skip")
    if skipped:
        last = skipped[-1]
        step, count = int(last.groups["step"]), int(last.groups["skipped"])
        if step >= SKIPPED_STEPS and count > SKIPPED_SHARE * step:
            return Finding(cause="fp16_loss_scale_collapse", severity="error", confidence=0.9,
                           summary=f"{count:,} of {step:,} optimizer steps were skipped because of fp16 overflow",
                           evidence=pick_evidence([*items[-3:], last]), where=Where(step=step),
                           numbers={"skipped": count, "steps": step})
    scales = [float(i.groups["scale"]) for i in items if _number(i.groups["scale"])]
    first = next((p.step for _, p in view.progress if loss_of(p) is not None), 0)
    if len(scales) < OVERFLOWS or first <= SCALE_SEARCH_STEPS:
        return None
    run = _longest_fall(scales)
    if run < OVERFLOWS or max(scales) / max(min(scales), 1e-9) < FALL:
        return None
    return Finding(cause="fp16_loss_scale_collapse", severity="error", confidence=0.85,
                   summary=f"{run} optimizer steps in a row overflowed in fp16; the loss scale fell from "
                           f"{max(scales):.0f} to {min(scales):.0f}",
                   evidence=pick_evidence(items[:5]), numbers={"overflows": len(items)})


def bad_norms(view: View) -> Finding | None:
    """Steps left out because the norm was NaN: worth a warning where no later steps show that training went on."""
    items = view.of("bad-grad-norm")
    if not items:
        return None
    last = items[-1]
    index = view.logs.index(last.log)
    after = {p.step for log, p in view.progress if log == index and p.line > last.line
             and (loss := loss_of(p)) is not None and abs(loss) < float("inf")}
    went_on = len(after) >= WENT_ON and len(items) < OVERFLOWS
    count = f"{len(items)} times" if len(items) > 1 else "once"
    return Finding(cause="loss_nan", role="context" if went_on else "symptom", severity="info" if went_on else "error",
                   confidence=0.4 if went_on else 0.6, evidence=pick_evidence(items[:5]), numbers={"lines": len(items)},
                   summary=f"The gradient norm was NaN {count} and the step was left out"
                           + ("; training went on" if went_on else ""))


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
