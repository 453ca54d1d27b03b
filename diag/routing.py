"""The judgement of one MoE layer's routing over a run: which windows, which threshold, since when, until when.

Steps of the judgement
 1. Logged steps are merged into windows with at least `MIN_TOKENS_PER_EXPERT` tokens per expert, because below that
    chance alone looks like imbalance. A new window starts where warm-up ends.
 2. Each window's Gini index is compared with its sampling floor (`diag.balance`): only the excess counts.
 3. An excess counts when it is sustained: at least `SUSTAINED_RECORDS` logged steps that span `SUSTAINED_STEPS` steps,
    after warm-up, without a break. One blip is nothing.
 4. It is a collapse when, beyond that, nearly all tokens go to the same few experts.
 5. One expert far above its share is looked for in smaller windows, and during warm-up too (`diag.routing_hot`).
 6. How fast the excess rose tells a cliff from a drift; a drift that has not passed the threshold yet is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diag import balance
from diag.artefacts.metrics import MetricsLog, RouterWindow
from diag.artefacts.run_config import RunConfig
from diag.routing_hot import TOKENS as HOT_TOKENS
from diag.routing_hot import Hot, hot_expert
from diag.routing_shape import Rise, drift_of, rise_of

#: Excess of Gini over the sampling floor. Field reports: 0.25 with distinct expert seeds, 0.6 with one seed for all.
GINI_WARN = 0.3
GINI_ALARM = 0.4
#: A sustained excess is dated back to where it rose above this, because a threshold is crossed after the trouble began;
#: but not by more steps than that: an unevenness that was always there is no onset.
GINI_RISING = 0.15
RISING_STEPS = 50
#: (max - mean)/mean above the floor: one expert with more than four times its share (loss-free balancing reports 0.04,
#: auxiliary loss 0.5 to 0.7 over a global batch: arXiv 2408.15664).
MAX_VIO_WARN = 3.0
#: Share of tokens that visit the hottest expert, and how far the K hottest are on the way from an even share to all.
HOTTEST_COLLAPSED = 0.8
CONCENTRATION_COLLAPSED = 0.5
#: Share of assignments dropped, above the floor of uniform routing at the same capacity.
DROP_WARN = 0.01
DROP_ALARM = 0.1
#: Drop rate that is worth a warning where the capacity is not known and no floor can be computed.
DROP_WARN_BLIND = 0.1
MIN_TOKENS_PER_EXPERT = 128
#: A whole run with fewer is not judged: chance alone passes a threshold too often.
LEAST_TOKENS_PER_EXPERT = 16
SUSTAINED_RECORDS = 3
SUSTAINED_STEPS = 10
#: Experts without a token are dead after this many steps, and this share of them is an error.
DEAD_STEPS = 100
DEAD_MIN_TOKENS = 32
DEAD_ALARM = 0.05
#: Warm-up without a configuration: this share of the run, at most this many steps.
WARM_UP_SHARE = 0.1
#: ... and at least so many: small runs of this trainer were uneven for 60 to 90 steps before they found their balance.
WARM_UP_LEAST = 100
WARM_UP_STEPS = 200

State = Literal["balanced", "imbalanced", "collapsed", "recovered", "unjudged"]


@dataclass(frozen=True, slots=True)
class Judged:
    """One merged window with its measures. `excess` is the Gini index above the floor."""

    window: RouterWindow
    tokens_per_expert: float
    gini: float
    gini_floor: float
    cv: float | None = None
    max_vio: float | None = None
    max_vio_floor: float | None = None
    load_entropy: float | None = None
    top_share: float | None = None
    hottest_share: float | None = None
    concentration: float | None = None

    @property
    def excess(self) -> float:
        return self.gini - self.gini_floor

    @property
    def collapsed(self) -> bool:
        """Nearly all tokens visit one expert, or the K hottest experts take most of everything."""
        hot = self.hottest_share is not None and self.hottest_share >= HOTTEST_COLLAPSED
        return hot or (self.concentration is not None and self.concentration >= CONCENTRATION_COLLAPSED)

    @property
    def one_hot(self) -> bool:
        """One expert holds far more than its share although the others are even."""
        return (self.max_vio is not None and self.max_vio_floor is not None
                and self.max_vio - self.max_vio_floor > MAX_VIO_WARN)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive windows beyond a threshold: `first` to `last` (indexes); `ongoing` when the run ends in it."""

    first: int
    last: int
    ongoing: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """The verdict on one layer's routing. `stretch` is what decided; `windows[stretch.first]` is the onset."""

    layer: int
    experts: int
    top_k: int | None
    windows: list[Judged]
    state: State
    alarm: bool = False
    stretch: Stretch | None = None
    dead: tuple[int, ...] = ()
    drop_rate: float | None = None
    drop_floor: float | None = None
    drop_stretch: Stretch | None = None
    hot: Hot | None = None
    rise: Rise | None = None
    #: steps until the excess reaches `GINI_WARN` if it goes on rising as it does; None where it does not rise
    drift: int | None = None

    @property
    def last(self) -> Judged:
        return self.windows[-1]

    def onset(self) -> Judged | None:
        """The first window of what decided, or None."""
        return self.windows[self.stretch.first] if self.stretch else None

    def row(self) -> dict[str, Any]:
        """The numbers of this layer's last window as one flat row; what was not measured is absent."""
        last = self.last
        fields = {
            "layer": self.layer, "state": self.state, "gini_excess": last.excess, "gini": last.gini,
            "gini_floor": last.gini_floor, "hottest_share": last.hottest_share,
            "top_share": last.top_share if last.hottest_share is None else None, "dead_experts": len(self.dead),
            "drop_rate": self.drop_rate, "load_entropy": last.load_entropy,
            "token_entropy": last.window.mean("token_entropy"), "max_vio": last.max_vio,
            "max_vio_floor": last.max_vio_floor, "cv": last.cv, "drop_floor": self.drop_floor,
            "experts": self.experts, "tokens_per_expert": last.tokens_per_expert,
            "aux_loss": last.window.mean("aux_loss"), "z_loss": last.window.mean("z_loss"),
            "bias_range": last.window.mean("bias_range"),
            "hot_expert": self.hot.expert if self.hot and self.hot.ongoing else None,
            "rise_steps": self.rise.steps if self.rise else None, "steps_to_threshold": self.drift,
        }
        onset = self.onset()
        if onset is not None:
            fields["onset_step"] = onset.window.first_step
        return {key: value for key, value in fields.items() if value is not None and value == value}


def judge(log: MetricsLog, config: RunConfig | None) -> list[Layer]:
    """Every layer of `log` that can be judged, by layer number. `config` sharpens floors and warm-up when present."""
    warm_up = warm_up_end(log, config)
    layers = []
    for number, router in sorted(log.routers.items()):
        layer = _judge_layer(number, router.windows, warm_up, log, config)
        if layer is not None:
            layers.append(layer)
    return layers


def warm_up_end(log: MetricsLog, config: RunConfig | None) -> int:
    """The step up to which routing may still be finding its balance. A resumed run is past it from its first line."""
    last = max(log.last_step or 0, log.first_step or 0)
    planned = config.number("train.steps") if config else None
    share = max(min(WARM_UP_SHARE * max(planned or 0, last), WARM_UP_STEPS), WARM_UP_LEAST)
    configured = config.number("optimizer.warmup_steps") if config else None
    return int(max(share, configured or 0))


def _judge_layer(
    number: int, base: Sequence[RouterWindow], warm_up: int, log: MetricsLog, config: RunConfig | None
) -> Layer | None:
    lengths = [len(w.counts) for w in base if w.counts is not None]
    configured = config.number("model.moe.experts") if config else None
    experts = max(set(lengths), key=lengths.count) if lengths else int(configured or 0)
    base = [w for w in base if not lengths or _experts(w) == experts]  # a damaged line has another length
    if experts < 2:
        return None
    top_k = top_k_of(base, log, config)
    if top_k is not None and top_k >= experts:
        return None  # every expert gets every token; there is nothing to balance
    merged = merge(base, MIN_TOKENS_PER_EXPERT, warm_up)
    judged = [item for item in (_measure(w, experts, top_k) for w in merged) if item is not None]
    if not judged:
        return None
    settled = [item.window.last_step > warm_up and not item.tokens_per_expert < LEAST_TOKENS_PER_EXPERT
               for item in judged]
    rising = [item.excess > GINI_RISING for item in judged]
    alarm = stretch([item.excess > GINI_ALARM for item in judged], judged, settled, rising)
    warn = stretch([item.excess > GINI_WARN or item.one_hot for item in judged], judged, settled, rising)
    dead = _dead(base) if any(settled) else ()
    state, decisive = _state(judged, alarm, warn, dead)
    if not any(settled):
        state, decisive = "unjudged", None
    hot = hot_expert(merge(base, HOT_TOKENS, warm_up), warm_up, top_k)
    if hot is not None and hot.ongoing and state in ("balanced", "unjudged", "recovered"):
        state, decisive = "imbalanced", Stretch(_window_of(hot.first_step, judged), len(judged) - 1, ongoing=True)
    points = [(item.window.first_step, item.excess) for item in judged]
    rise = rise_of(points, decisive.first, decisive.last) if decisive is not None else None
    late = [point for point, after in zip(points, settled, strict=True) if after]
    drift = drift_of(late, GINI_WARN) if state == "balanced" else None
    rate, floor = _drops(judged[-1], experts, top_k, config)
    limits = [_drop_beyond(item, experts, top_k, config) for item in judged]
    return Layer(number, experts, top_k, judged, state, alarm=bool(alarm and alarm.ongoing), stretch=decisive,
                 dead=dead, drop_rate=rate, drop_floor=floor, drop_stretch=stretch(limits, judged, settled), hot=hot,
                 rise=rise, drift=drift)


def _window_of(step: int, judged: Sequence[Judged]) -> int:
    """The index of the window that holds `step`."""
    return next((i for i, item in enumerate(judged) if item.window.last_step >= step), len(judged) - 1)


def _state(
    judged: list[Judged], alarm: Stretch | None, warn: Stretch | None, dead: tuple[int, ...]
) -> tuple[State, Stretch | None]:
    if alarm and alarm.ongoing and judged[alarm.last].collapsed:
        return "collapsed", alarm
    if warn and warn.ongoing:
        return "imbalanced", warn
    if dead:
        return "imbalanced", None
    return ("recovered", warn) if warn else ("balanced", None)


def _experts(window: RouterWindow) -> int:
    return 0 if window.counts is None else len(window.counts)


def merge(base: Iterable[RouterWindow], tokens_per_expert: float, boundary: int) -> list[RouterWindow]:
    """Neighbouring windows joined until each has `tokens_per_expert`; none reaches across step `boundary`."""
    merged: list[RouterWindow] = []
    full = True
    for window in base:
        crosses = bool(merged) and merged[-1].last_step <= boundary < window.first_step
        if full or crosses or _experts(merged[-1]) != _experts(window):
            merged.append(window.copy())
        else:
            merged[-1].add(window)
        counts = merged[-1].counts
        full = counts is None or counts.mean() >= tokens_per_expert
    if len(merged) > 1 and not full and merged[-2].last_step > boundary:
        rest = merged.pop()  # too few tokens of its own: the run's last window takes it in
        merged[-1].add(rest)
    return merged


def stretch(
    beyond: Sequence[bool], judged: Sequence[Judged], settled: Sequence[bool], rising: Sequence[bool] = ()
) -> Stretch | None:
    """The last sustained run of windows that are `beyond`, begun with the windows before it that are `rising`.

    Only windows after warm-up, and `beyond`, count towards its length.
    """
    found: Stretch | None = None
    first = 0
    while first < len(beyond):
        if not beyond[first]:
            first += 1
            continue
        last = first
        while last + 1 < len(beyond) and beyond[last + 1]:
            last += 1
        counted = [judged[i].window for i in range(first, last + 1) if settled[i]]
        if counted and _sustained(counted, judged, settled):
            found = Stretch(_dated_back(first, judged, rising), last, ongoing=last == len(beyond) - 1)
        first = last + 1
    return found


def _dated_back(first: int, judged: Sequence[Judged], rising: Sequence[bool]) -> int:
    crossed, begin = judged[first].window.first_step, first
    while begin and rising and rising[begin - 1]:
        if crossed - judged[begin - 1].window.first_step > RISING_STEPS:
            return first  # it was there all along
        begin -= 1
    return begin


def _sustained(part: Sequence[RouterWindow], judged: Sequence[Judged], settled: Sequence[bool]) -> bool:
    whole = [item.window for item, after in zip(judged, settled, strict=True) if after]
    records, span = sum(w.records for w in part), part[-1].last_step - part[0].first_step + 1
    if len(part) == len(whole):  # all there is, however short
        return True
    return records >= SUSTAINED_RECORDS and span >= SUSTAINED_STEPS


def _measure(window: RouterWindow, experts: int, top_k: int | None) -> Judged | None:
    counts = [] if window.counts is None else window.counts.tolist()
    if not sum(counts):
        gini, floor = window.mean("gini"), window.mean("gini_floor")
        if gini is None or floor is None:
            return None  # a Gini index alone says nothing: its floor depends on the number of tokens
        return Judged(window, math.nan, gini, floor, cv=window.mean("cv"), max_vio=window.mean("max_vio"),
                      load_entropy=window.mean("load_entropy"))
    total, chosen = sum(counts), top_k or 1  # an unknown K is taken as 1: the highest floor
    mean = total / experts
    return Judged(
        window, mean, balance.gini(counts), balance.gini_floor(experts, chosen, mean), cv=balance.cv(counts),
        max_vio=balance.max_vio(counts), max_vio_floor=balance.max_vio_floor(experts, chosen, mean),
        load_entropy=balance.load_entropy(counts), top_share=max(counts) / total,
        hottest_share=min(1.0, max(counts) * top_k / total) if top_k else None,
        concentration=_concentration(counts, top_k),
    )


def _concentration(counts: Sequence[int], top_k: int | None) -> float:
    """How far the K hottest experts are on the way from an even share (0) to everything (1).

    With K unknown, the most telling of the K that models use, up to a quarter of the experts.
    """
    total, experts, ranked = sum(counts), len(counts), sorted(counts, reverse=True)
    likely = [k for k in (1, 2, 4, 8) if k == 1 or k <= experts / 4]
    return max((sum(ranked[:k]) / total - k / experts) / (1 - k / experts) for k in ([top_k] if top_k else likely))


def top_k_of(base: Sequence[RouterWindow], log: MetricsLog, config: RunConfig | None) -> int | None:
    """Experts per token: from the configuration, from the records, or from counts against the tokens of a step."""
    configured = config.number("model.moe.top_k") if config else None
    recorded = next((w.mean("top_k") for w in base if w.mean("top_k") is not None), None)
    if configured or recorded:
        return max(int(configured or recorded or 0), 0) or None
    tokens = log.series.get("tokens")
    if tokens is None or len(tokens.steps) < 2:
        return None
    consumed = dict(zip(tokens.steps, tokens.values, strict=True))
    for window in base:
        step = window.first_step
        if window.counts is not None and window.records == 1 and step in consumed and step - 1 in consumed:
            ratio = int(window.counts.sum()) / max(consumed[step] - consumed[step - 1], 1)
            return round(ratio) if ratio >= 0.99 and abs(ratio - round(ratio)) < 0.01 else None
    return None


def _dead(base: Sequence[RouterWindow]) -> tuple[int, ...]:
    """Experts without any token over the last `DEAD_STEPS` steps or more, given enough tokens to tell."""
    total, last = None, base[-1].last_step
    for window in reversed(base):
        if window.counts is None:
            return ()
        total = window.counts if total is None else total + window.counts
        if last - window.first_step + 1 >= DEAD_STEPS and total.mean() >= DEAD_MIN_TOKENS:
            return tuple(int(i) for i in (total == 0).nonzero()[0])
    return ()


def _drops(
    item: Judged, experts: int, top_k: int | None, config: RunConfig | None
) -> tuple[float | None, float | None]:
    """(measured drop rate, its floor); the floor is None where the configuration does not tell the capacity."""
    rate = item.window.mean("drop_rate")
    if rate is None or config is None or top_k is None:
        return rate, None
    factor = config.number("model.moe.capacity_factor") or 0.0
    micro, length = config.number("train.micro_batch") or 0.0, config.number("train.sequence_length") or 0.0
    if min(factor, micro, length) <= 0:
        return rate, None
    tokens = micro * length
    least = config.number("model.moe.min_capacity") or 0
    capacity = max(math.ceil(tokens * top_k / experts * factor), least)
    return rate, balance.drop_floor(experts, top_k, tokens, capacity)


def _drop_beyond(item: Judged, experts: int, top_k: int | None, config: RunConfig | None) -> bool:
    rate, floor = _drops(item, experts, top_k, config)
    if rate is None:
        return False
    return rate > DROP_WARN_BLIND if floor is None else rate - floor > DROP_WARN
