"""One expert far above its share: seen at few tokens and, when it lasts, even during warm-up.

The Gini index needs some hundred tokens per expert to rise above chance. A single expert with more than `TIMES` its
share does not: with 8 tokens per expert on average chance gives one expert 32 or more with probability 1e-10. So this
check looks at windows of `TOKENS` tokens per expert, and wants the *same* expert to stay hot. With K experts per token
no expert can get more than E / K times its share, so one that nearly all tokens visit is hot as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diag.artefacts.metrics import RouterWindow

#: An expert with more than this many times an even share is hot.
TIMES = 4.0
#: ... or one that this share of all tokens visits, if that is so many times its share.
VISITED, VISITED_TIMES = 0.8, 3.0
#: Mean tokens per expert in a window of this check.
TOKENS = 8.0
#: Steps after which it counts: after warm-up, and during it, where routers swing before they find their balance.
STEPS, STEPS_IN_WARM_UP = 10, 35
RECORDS = 3


@dataclass(frozen=True, slots=True)
class Hot:
    """`expert` took `times` its share from `first_step` to `last_step`; `ongoing`: to the end of the records."""

    expert: int
    times: float
    first_step: int
    last_step: int
    ongoing: bool


def hot_expert(windows: Sequence[RouterWindow], warm_up: int, top_k: int | None) -> Hot | None:
    """The last expert that was hot for long enough; `windows` hold at least `TOKENS` tokens per expert each."""
    found: Hot | None = None
    first = 0
    while first < len(windows):
        same = _hot(windows[first], top_k)
        if not same:
            first += 1
            continue
        last = first
        while last + 1 < len(windows) and (both := same & _hot(windows[last + 1], top_k)):
            same, last = both, last + 1
        begin, end = windows[first].first_step, windows[last].last_step
        records = sum(w.records for w in windows[first : last + 1])
        after = end - max(begin, warm_up + 1) + 1
        if records >= RECORDS and (after >= STEPS or end - begin + 1 >= STEPS_IN_WARM_UP):
            counts = sum(w.counts for w in windows[first : last + 1] if w.counts is not None)
            hottest = max(same, key=lambda expert: counts[expert])  # type: ignore[index]
            times = float(counts[hottest] / counts.mean())  # type: ignore[union-attr,index]
            found = Hot(hottest, times, begin, end, ongoing=last == len(windows) - 1)
        first = last + 1
    return found


def _hot(window: RouterWindow, top_k: int | None) -> set[int]:
    """The experts that are hot in `window`."""
    if window.counts is None or (mean := float(window.counts.mean())) < TOKENS:
        return set()
    limit = TIMES * mean
    if top_k:
        limit = min(limit, max(VISITED * mean * len(window.counts) / top_k, VISITED_TIMES * mean))
    return {int(expert) for expert in (window.counts > limit).nonzero()[0]}
