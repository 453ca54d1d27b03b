"""Values by step in bins that double when there are too many of them: what every per-step record is folded into."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Bins of steps kept per name; beyond this the bins double.
MAX_BINS = 128


@dataclass(slots=True)
class StepTimes:
    """Seconds by step: bin b covers steps b·width … (b+1)·width-1 and holds [seconds, steps recorded in it]."""

    width: int = 1
    bins: dict[int, list[float]] = field(default_factory=dict)
    _last: int = -1

    def add(self, step: int, seconds: float) -> None:
        """Add a part of `step`; the parts of one step come in a row."""
        entry = self.bins.setdefault(step // self.width, [0.0, 0])
        entry[0] += seconds
        if step != self._last:
            entry[1] += 1
            self._last = step
        if len(self.bins) > MAX_BINS:
            self.widen(2 * self.width)

    def widen(self, width: int) -> None:
        """Bins of `width` steps, a multiple of the present width."""
        factor, bins = width // self.width, self.bins
        self.width, self.bins = width, {}
        for number, (seconds, steps) in bins.items():
            entry = self.bins.setdefault(number // factor, [0.0, 0])
            entry[0] += seconds
            entry[1] += steps

    def rewind(self, step: int) -> None:
        """Drop what lies beyond `step`: it was done again."""
        self.bins = {number: entry for number, entry in self.bins.items() if number * self.width <= step}
