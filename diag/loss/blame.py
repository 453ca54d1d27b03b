"""What moved first: the gradient norm before the loss, which module's norm, the learning rate and the batches then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from diag.learning_rate import largest_jump
from diag.loss.baseline import scatter, trend

if TYPE_CHECKING:
    import numpy.typing as npt

    from diag.series import Column, Run

#: A gradient norm is out of its way above so many times its median before, and so many scatters (of its log).
NORM_FACTOR, NORM_SIGMA = 2.0, 6.0
#: With one or two norms before it, whose scatter is not known.
FEW_FACTOR = 10.0
#: It led when it was so before the onset of the loss, within so many points of it.
LEAD_POINTS = 10
#: Points before that whose norms are normal.
HISTORY = 60
#: A learning rate that changes by more than this share around the onset is worth saying.
LR_CHANGE = 0.2


@dataclass(slots=True)
class Blame:
    """What is known about an onset; absent things are None."""

    norm_led: bool | None = None
    norm_step: int | None = None
    norm_ratio: float | None = None
    module: str | None = None
    lr: float | None = None
    lr_rose: bool = False
    lr_jump: tuple[int, float] | None = None
    batch_size: float | None = None
    changed: list[str] = field(default_factory=list)
    samples: tuple[int, int] | None = None
    documents: list[str | int] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """The keys of `Finding.numbers`; only what is known."""
        found: dict[str, Any] = {}
        for name, value in (("grad_norm_led", self.norm_led), ("grad_norm_step", self.norm_step),
                            ("grad_norm_ratio", self.norm_ratio), ("first_module", self.module), ("lr", self.lr),
                            ("lr_jump_step", self.lr_jump[0] if self.lr_jump else None),
                            ("lr_jump_factor", round(self.lr_jump[1], 2) if self.lr_jump else None),
                            ("batch_size", self.batch_size), ("changed", self.changed or None),
                            ("suspect_samples", list(self.samples) if self.samples else None),
                            ("suspect_documents", self.documents or None)):
            if value is not None:
                found[name] = value
        return found


def blame(run: Run, step: int, before: int, peak: int) -> Blame:
    """What moved around an onset at `step`; `before` is the last step that was well, `peak` that of the peak."""
    found = Blame()
    norm = run.get("grad_norm")
    if norm is not None and (norm.values > 0).any():
        moved = departure(norm, step, peak)
        led = moved is not None and moved[0] < step
        if led or (norm.steps < step).sum() > 2:  # from fewer norms nothing follows
            found.norm_led = led
        if moved is not None:
            found.norm_step, found.norm_ratio = moved[0], round(moved[1], 2)
    modules = {name.removeprefix("grad_norm/"): departure(column, step, peak)
               for name, column in run.match("grad_norm/*").items()}
    first = sorted((moved[0], -moved[1], name) for name, moved in modules.items() if moved is not None)
    if first:
        found.module = first[0][2]
        if found.norm_led is None:
            found.norm_led = first[0][0] < step
    found.lr = run.value("lr", step)
    earlier = run.value("lr", before)
    found.lr_rose = found.lr is not None and earlier is not None and found.lr > earlier * (1 + LR_CHANGE)
    found.lr_jump = lr_jump(run, step)
    found.batch_size = run.value("batch_size", step)
    for name in ("batch_size", "sequence_length"):
        now, then = run.value(name, step), run.value(name, before)
        if now is not None and then is not None and now != then:
            found.changed.append(name)
    consumed = run.get("consumed_samples")
    if consumed is not None:
        low, high = consumed.at(before), consumed.at(step)
        if low is not None and high is not None and high > low:
            found.samples = int(low), int(high)
    documents = run.get("document_ids")
    if documents is not None:
        near = (documents.steps > before) & (documents.steps <= step) & np.isfinite(documents.values)
        found.documents = sorted({int(v) for v in documents.values[near][:64]})
    noted = next((run.batches[s] for s in sorted(run.batches) if before < s <= max(step, peak)), None)
    if noted is not None:
        found.samples = noted.samples or found.samples
        found.documents = noted.documents or found.documents
    elif found.samples is None and run.train_batch and run.steps_known:
        found.samples = before * run.train_batch, step * run.train_batch - 1
    return found


def lr_jump(run: Run, step: int) -> tuple[int, float] | None:
    """(step, factor) of the largest leap of the learning rate within `LEAD_POINTS` records up to `step`."""
    column = run.get("lr")
    if column is None:
        return None
    stop = int(np.searchsorted(column.steps, step, side="right"))
    return largest_jump(column.steps, column.values, range(stop - LEAD_POINTS, stop))  # type: ignore[arg-type]


def norms_moved(run: Run, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
    """At which of `steps` the gradient norm was out of its way, or had been one record before; None without norms."""
    norm = run.get("grad_norm")
    if norm is None:
        return None
    good = np.isfinite(norm.values) & (norm.values > 0)
    if good.sum() < HISTORY // 2:
        return None
    logs = np.log(norm.values[good])
    rise = logs - trend(logs)
    out = rise > np.maximum(np.log(NORM_FACTOR), NORM_SIGMA * scatter(rise, 0.02))
    out[1:] |= out[:-1].copy()
    known = norm.steps[good]
    place = np.minimum(np.searchsorted(known, steps), len(known) - 1)
    return np.asarray((known[place] == steps) & out[place])


def departure(column: Column, step: int, peak: int) -> tuple[int, float] | None:
    """(step, ratio) where a norm first left its way, at the onset of the loss or shortly before it; None when it did
    not. `peak` bounds the search from above."""
    good = np.isfinite(column.values) & (column.values > 0)
    steps, values = column.steps[good], column.values[good]
    at = int(np.searchsorted(steps, step))
    first = max(at - LEAD_POINTS, 0)
    past = values[max(first - HISTORY, 0) : first]
    if len(past) < 3:
        first = max(min(at - 1, len(values)), 0)
        past = values[:first]
        if len(past) < 1:
            first, past = at, values[:at]
            if len(past) < 1:
                return None
    logs = np.log(past)
    level = float(np.median(logs))
    sigma = max(1.4826 * float(np.median(np.abs(logs - level))), 0.02)
    bound = np.log(FEW_FACTOR) if len(past) < 3 else max(np.log(NORM_FACTOR), NORM_SIGMA * sigma)
    stop = int(np.searchsorted(steps, peak, side="right"))
    above = np.flatnonzero(np.log(values[first:stop]) - level > bound)
    if not len(above):
        return None
    # a single blip well before the onset is no lead; the stretch that reaches the onset counts
    places = first + above
    start = int(places[-1])
    for place in places[::-1]:
        if start - place > 2:
            break
        start = int(place)
    if start < at and not (places >= at - 2).any():
        return None
    return int(steps[start]), float(np.exp(np.log(values[first:stop]).max() - level))
