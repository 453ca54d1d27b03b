"""Is this step's loss a spike? One number at a time, on the host, without any library.

Used where nobody can wait for the rest of the curve: by the trainer before it moves the weights (`train.on_spike`),
and by `pdtrain diag watch` to look at once instead of at its next turn. The curve as a whole is judged by `diag loss`.

A step is compared with the steps that were accepted before it, never with rejected ones: a spike let into its own
reference would hide the next. Level: median of the last `LEVEL` logarithms. Scatter: 1.4826 times the median absolute
difference of neighbours over sqrt(2), which a falling curve does not widen, with a floor, because a window of equal
values would otherwise make anything a spike. Logarithms, since noise and spikes of both loss and norm are relative.

Sources of the limits: OLMo-core's SkipStepOptimizer skips at 6 standard deviations over 128 steps, of loss or gradient
norm; PaLM (arXiv 2204.02311, 5.1) skips the batches around a spike and restarts from a checkpoint before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

WINDOW = 128
LEVEL = 32
#: Accepted steps before anything but NaN is judged: the first steps of a run bounce.
WARM_UP = 32
Z_LIMIT = 6.0
#: Floors of the scatter of log-loss and of log-norm.
LOSS_FLOOR, NORM_FLOOR = 0.005, 0.08
#: A spike is at least this factor above the level: single batches of real runs differ by some per cent for no reason.
#: Of norms single ones are several times the level in healthy runs (llm.c's 350M run: 7 times), and clipping is there
#: for them: a norm alone must be out of all proportion.
LOSS_RATIO, NORM_RATIO = 1.12, 10.0
NORM_STRICTER = 2.0
#: So many rejections in a row are a new level (a data mixture, a longer context): the comparison begins anew.
NEW_LEVEL = 16

Kind = Literal["nan", "loss", "grad_norm"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a step is suspect: `kind` is what moved; `value` against the `level` it had, `z` robust deviations above."""

    kind: Kind
    value: float
    level: float | None = None
    z: float | None = None

    def words(self) -> str:
        """In words, for a log line."""
        what = "gradient norm" if self.kind == "grad_norm" else "loss"
        if self.kind == "nan":
            return "loss or gradient norm is not finite"
        if self.level is None or self.z is None:
            return f"{what} {self.value:.4g}"
        return f"{what} {self.value:.4g} after a level of {self.level:.4g} ({self.z:.1f} robust deviations)"


@dataclass(slots=True)
class Track:
    """The accepted history of one positive quantity, as logarithms."""

    kind: Kind
    floor: float
    ratio: float
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def judge(self, value: float, z_limit: float) -> Verdict | None:
        """Whether a finite `value` lies above what the history allows."""
        if len(self.values) < WARM_UP or value <= 0:
            return None
        history = list(self.values)
        level = median(history[-LEVEL:])
        noise = 1.4826 * median(abs(b - a) for a, b in pairwise(history)) / math.sqrt(2)
        rise = math.log(value) - level
        z = rise / max(noise, self.floor)
        if z > z_limit and rise > math.log(self.ratio):
            return Verdict(self.kind, value, math.exp(level), z)
        return None

    def add(self, value: float) -> None:
        """Let an accepted value into the history."""
        if value > 0:
            self.values.append(math.log(value))


class OnlineDetector:
    """`judge` a step, then `accept` or `reject` it. All ranks of a job that feed it the same numbers judge alike."""

    def __init__(self, z_limit: float = Z_LIMIT) -> None:
        self.z_limit = z_limit
        self.loss = Track("loss", LOSS_FLOOR, LOSS_RATIO)
        self.norm = Track("grad_norm", NORM_FLOOR, NORM_RATIO)
        self.rejected = 0
        """Rejections in a row."""

    def judge(self, loss: float | None, grad_norm: float | None = None) -> Verdict | None:
        """None for a step like those before it. Changes nothing. Absent values are not judged."""
        for value in (loss, grad_norm):
            if value is not None and not math.isfinite(value):
                return Verdict("nan", value)
        if loss is not None and (verdict := self.loss.judge(loss, self.z_limit)) is not None:
            return verdict
        return self.norm.judge(grad_norm, NORM_STRICTER * self.z_limit) if grad_norm is not None else None

    def accept(self, loss: float | None, grad_norm: float | None = None) -> None:
        """The step belongs to the run: later ones are compared with it."""
        self.rejected = 0
        for track, value in ((self.loss, loss), (self.norm, grad_norm)):
            if value is not None and math.isfinite(value):
                track.add(value)

    def reject(self) -> None:
        """The step does not count. After `NEW_LEVEL` of these in a row the history is given up: the run has moved."""
        self.rejected += 1
        if self.rejected >= NEW_LEVEL:
            self.reset()

    def reset(self) -> None:
        """Forget everything: a new level, or a run that went back."""
        self.rejected = 0
        self.loss.values.clear()
        self.norm.values.clear()

    def feed(self, points: Iterable[tuple[float | None, float | None]]) -> list[Verdict | None]:
        """Judge (loss, gradient norm) pairs in order, letting in what is accepted; one verdict each."""
        found = []
        for loss, norm in points:
            verdict = self.judge(loss, norm)
            if verdict is None:
                self.accept(loss, norm)
            else:
                self.reject()
            found.append(verdict)
        return found
