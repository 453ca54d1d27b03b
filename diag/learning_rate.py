"""A learning rate that leaps is a broken schedule. Plain arithmetic, for the loss and for the router."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: It rose this many times from one record to the next, not among the first of the run: warm-up rises too, but gently.
JUMP, JUMP_AFTER = 3.0, 10


def largest_jump(
    steps: Sequence[int], values: Sequence[float], places: Iterable[int]
) -> tuple[int, float] | None:
    """(step, factor) of the largest leap among the records `places` of a run's learning rate; None where it has none.

    `steps` and `values` are those of the run from its beginning.
    """
    rises = [(int(steps[i]), float(values[i] / values[i - 1])) for i in places
             if i >= JUMP_AFTER and values[i - 1] > 0 and values[i] >= JUMP * values[i - 1]]
    return max(rises, key=lambda rise: rise[1], default=None)
