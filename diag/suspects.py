"""Why a router may have gone wrong: DOMAIN's five suspects in their order, with what speaks for and against each.

Order: router precision, balancing coefficient, learning rate, expert initialisation, data. The order is that of cost
and of experience: the first is a one-line change and the most common. The evidence comes from the run's configuration,
its curves and the experts' weights in a checkpoint; where none of them says anything the verdict is "unknown", never a
guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from diag.artefacts.expert_weights import ExpertWeights
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig
from diag.learning_rate import largest_jump

Verdict = Literal["likely", "possible", "unlikely", "unknown"]

#: Load-balance loss coefficient: usual start, and the top of the usual range.
AUX_START, AUX_MAX = 0.01, 0.1
#: Peak learning rates above this are unusual for a router trained with AdamW.
HIGH_LR = 1e-3
#: What the learning rate and the data did counts at most so many steps before the onset or after.
NEAR = 50
#: Share of passages read before around the onset from which the data are a likely reason.
REPEATED = 0.3
#: Median cosine between experts from which they began as copies; below the other, they differ.
ALIKE, DIFFERENT = 0.2, 0.1
#: Scores lie between 0 and 1, so a balancing bias that spans more decides alone.
BIAS_RANGE = 1.0
#: A router gradient norm this many times its level before the onset leads the collapse.
GRAD_GROWTH = 5.0

_FIXES = {
    "router precision": "Compute router logits, softmax and top-k in FP32 ([modules.router] dtype = \"fp32\").",
    "balancing": "Raise the load-balance loss in steps (model.moe.aux_loss 0.01 -> 0.03), or switch on bias-update "
                 "balancing (model.moe.bias_update_speed = 0.001).",
    "learning rate": "Lower the router's learning rate ([modules.router] lr_scale = 0.3) or lengthen the warm-up.",
    "expert initialisation": "Give each expert its own seed; re-initialise dead experts from a live one plus noise.",
    "data": "Scan the batches around the onset for repeated passages and one dominant source.",
}


@dataclass(frozen=True, slots=True)
class Suspect:
    """One possible reason with its standing and the evidence for it."""

    name: str
    verdict: Verdict
    evidence: str

    def row(self) -> dict[str, str]:
        """A flat row for `numbers`."""
        return {"suspect": self.name, "verdict": self.verdict, "evidence": self.evidence}


def suspects(
    log: MetricsLog, config: RunConfig | None, onset: int | None, weights: ExpertWeights | None = None
) -> list[Suspect]:
    """The five suspects in the order in which to check them. `weights`: the run's newest checkpoint with experts."""
    return [_precision(config), _balancing(log, config), _learning_rate(log, config, onset),
            _initialisation(log, onset, weights), _data(log, onset)]


def fix_order(found: list[Suspect]) -> list[str]:
    """What to do first: the likely, then the possible and unknown, in the suspects' order; the unlikely last."""
    rank = {"likely": 0, "possible": 1, "unknown": 2, "unlikely": 3}
    ordered = sorted(found, key=lambda suspect: rank[suspect.verdict])
    return [_FIXES[suspect.name] for suspect in ordered if suspect.verdict != "unlikely"] or [_FIXES["balancing"]]


def _precision(config: RunConfig | None) -> Suspect:
    name = "router precision"
    if config is None or config.get("modules.router") is None:
        return Suspect(name, "unknown", "no configuration beside the metrics")
    dtype = config.get("modules.router.dtype")
    if dtype not in (None, "fp32", "float32"):
        return Suspect(name, "likely", f"modules.router.dtype = {dtype}")
    return Suspect(name, "unlikely", "the router runs in FP32")


def _balancing(log: MetricsLog, config: RunConfig | None) -> Suspect:
    name = "balancing"
    spans = [span for router in log.routers.values() if (span := router.windows[-1].mean("bias_range")) is not None]
    if spans and max(spans) > BIAS_RANGE:
        return Suspect(name, "likely", f"the balancing bias spans {max(spans):.2g} where scores span at most 1: it "
                                       "decides alone, and ran away")
    aux = config.number("model.moe.aux_loss") if config else None
    if config is None or aux is None:
        return Suspect(name, "unknown", "no configuration beside the metrics")
    bias = config.number("model.moe.bias_update_speed") or 0.0
    said = f"aux_loss = {aux:g}, bias_update_speed = {bias:g}"
    if not aux and not bias:
        return Suspect(name, "likely", f"no balancing is on: {said}")
    if aux < AUX_START and not bias:
        return Suspect(name, "likely", f"{said}; usual start {AUX_START:g}")
    return Suspect(name, "possible" if aux < AUX_MAX else "unlikely", said)


def _learning_rate(log: MetricsLog, config: RunConfig | None, onset: int | None) -> Suspect:
    name = "learning rate"
    jump = lr_jump(log, onset)
    if jump is not None:
        return Suspect(name, "likely", f"the learning rate rose {jump[1]:.0f} times at step {jump[0]:,}")
    growth = _growth(log, onset)
    if growth is not None and growth >= GRAD_GROWTH:
        return Suspect(name, "likely", f"grad_norm/router grew {growth:.0f} times before step {onset:,}")
    peak = config.number("optimizer.lr") if config else None
    if config is None or peak is None:
        return Suspect(name, "unknown", "no configuration beside the metrics")
    scale = config.number("modules.router.lr_scale")
    lr = peak * (1.0 if scale is None else scale)
    if lr > HIGH_LR:
        return Suspect(name, "possible", f"peak {lr:g} for the router; usual at most {HIGH_LR:g}")
    return Suspect(name, "unlikely", f"peak {lr:g} for the router")


def lr_jump(log: MetricsLog, onset: int | None) -> tuple[int, float] | None:
    """(step, factor) of the largest leap of the learning rate near the onset."""
    series = log.series.get("lr")
    if series is None or onset is None:
        return None
    near = (place for place, step in enumerate(series.steps) if abs(step - onset) <= NEAR)
    return largest_jump(series.steps, series.values, near)


def _growth(log: MetricsLog, onset: int | None) -> float | None:
    """Largest router gradient norm in the steps just before the onset, over the median of those before them."""
    series = log.series.get("grad_norm/router")
    if series is None or onset is None:
        return None
    before = [v for s, v in zip(series.steps, series.values, strict=True) if s <= onset and v == v]
    if len(before) < 20:
        return None
    lead = max(5, len(before) // 10)
    level = sorted(before[:-lead])[len(before[:-lead]) // 2]
    return max(before[-lead:]) / level if level > 0 else None


def _initialisation(log: MetricsLog, onset: int | None, weights: ExpertWeights | None) -> Suspect:
    name = "expert initialisation"
    if weights is not None and weights.layers:
        highest = max(layer.median for layer in weights.layers)
        said = f"cosine between experts {highest:.2f} in the median" + (
            f" at step {weights.step:,}" if weights.step is not None else "")
        if highest >= ALIKE:
            return Suspect(name, "likely", f"{said}: they began as copies of each other")
        if highest < DIFFERENT:
            return Suspect(name, "unlikely", f"{said}: distinct seeds")
    if onset is None or log.first_step is None or not log.steps_known:
        return Suspect(name, "unknown", "the onset is not known")
    if log.first_step > 1:
        return Suspect(name, "unknown", f"the metrics begin at step {log.first_step:,}")
    if onset <= log.first_step + 1:
        return Suspect(name, "possible", "uneven from the first step on")
    return Suspect(name, "unlikely", f"even until step {onset:,}")


def _data(log: MetricsLog, onset: int | None) -> Suspect:
    series = log.series.get("data_repeated")
    if series is None or onset is None:
        return Suspect("data", "unknown", "not visible in metrics; look at the documents of the onset step")
    near = [v for s, v in zip(series.steps, series.values, strict=True) if abs(s - onset) <= NEAR and v == v]
    if not near:
        return Suspect("data", "unknown", "repetition was not measured around the onset")
    share = median(near)
    if share > REPEATED:
        return Suspect("data", "likely", f"{share:.0%} of the passages around the onset had been read before")
    return Suspect("data", "possible", f"no repetition around the onset ({share:.0%} of passages); one dominant "
                                       "source is not visible in metrics")
