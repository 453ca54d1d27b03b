"""Does memory stay behind after each step? Steps, the lowest point of each, and who keeps what was allocated in it.

A step is bounded by the program's own annotations (profiler steps, optimizer steps) where there are some; otherwise
by the shape of the course: the total falls from a peak by a large part of the range, and rises again. A single forward
pass has such a shape too (each layer frees its temporaries and keeps its activations), so where the stacks tell the
phase, a cycle counts as a step only when it holds a forward and a backward or optimizer part.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diag.memory.nouns import Annotation, Growth, Owner, Trace
from diag.memory.replay import Replay
from diag.memory.stacks import NOBODY, Caller

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

#: The first steps allocate what stays: gradients, optimizer states, cuBLAS workspaces.
WARM_UP = 2
#: So many steps after the warm-up must all grow.
MIN_GROWING = 4
#: The smallest growth of a step, as a part of the median growth; leaks repeat, drifts do not.
EVEN = 0.25
#: Growth below this a step is what loggers keep.
MIN_BYTES = 256 << 10
#: A fall by this part of the range ends a cycle.
SWING = 0.2
#: An owner keeps something in at least this part of the steps.
STEADY = 0.7
MAX_STEPS = 5000
MAX_OWNERS = 8
_STEP_NAMES = (re.compile(r"ProfilerStep"), re.compile(r"Optimizer\.step|optimizer_step"),
               re.compile(r"(?:^|[^a-z])(?:train(?:ing)?[_ ]?)?(?:step|iter(?:ation)?)(?:[^a-z]|$)", re.IGNORECASE))
_DIGITS = re.compile(r"\d+")


def growth_of(replayed: Replay, trace: Trace, annotations: list[Annotation], callers: list[Caller],
              tags: list[str]) -> Growth | None:
    """What stays behind per step; None when nothing steadily does, or no steps can be told."""
    import numpy as np

    if replayed.events < 20:
        return None
    bounds, how = _annotated(trace, annotations)
    if len(bounds) < WARM_UP + MIN_GROWING + 1:
        bounds, how = _tagged(trace, tags)
    by_shape = len(bounds) < WARM_UP + MIN_GROWING + 1
    if by_shape:
        bounds, how = _cycles(replayed.course), "the shape of the course"
    if len(bounds) < WARM_UP + MIN_GROWING + 1:
        return None
    bounds = bounds[-MAX_STEPS:]
    edges = np.array(bounds, np.int64)
    troughs = np.minimum.reduceat(replayed.course, edges)[:-1]  # the last step may be unfinished
    steady = troughs[WARM_UP:]
    rises = np.diff(steady)
    if len(rises) < MIN_GROWING:
        return None
    median = float(np.median(rises))
    if median < MIN_BYTES or int(rises.min()) < EVEN * median:
        return None
    if not _whole_steps(edges, trace, callers, by_shape):
        return None
    since = int(edges[WARM_UP])
    last = int(edges[-1])
    kept = (replayed.begin >= since) & (replayed.begin < last) & (replayed.end >= replayed.events)
    owners = _keepers(replayed, kept, edges[WARM_UP:], callers)
    if not owners:
        return None
    return Growth(steps=len(rises), how=how, bytes_per_step=int((steady[-1] - steady[0]) / len(rises)),
                  troughs=[int(t) for t in troughs[-64:]], owners=owners)


def _annotated(trace: Trace, annotations: list[Annotation]) -> tuple[list[int], str]:
    """Events at which annotated steps begin, the name that bounds them."""
    import numpy as np

    if not len(trace.time) or not annotations:
        return [], ""
    starts: dict[str, list[int]] = {}
    for item in annotations:
        if item.stage == "START":
            starts.setdefault(_DIGITS.sub("N", item.name), []).append(item.time)
    for pattern in _STEP_NAMES:
        for name, times in starts.items():
            if pattern.search(name) and len(times) > WARM_UP + MIN_GROWING:
                places = np.searchsorted(trace.time, np.sort(np.array(times, np.int64)))
                inside = np.unique(places[places < len(trace.time)])
                return inside.tolist(), f'the annotation "{name}"'
    return [], ""


def _tagged(trace: Trace, tags: list[str]) -> tuple[list[int], str]:
    """Events at which user metadata that counts steps changes."""
    import numpy as np

    if not len(trace.tag) or not tags:
        return [], ""
    steps = np.array([int(m[0]) if (m := _DIGITS.search(t)) and _STEP_NAMES[2].search(t) else -1 for t in tags] + [-1])
    marks = steps[trace.tag]
    marked = np.flatnonzero(marks >= 0)
    if not len(marked):
        return [], ""
    changes = marked[np.flatnonzero(np.diff(marks[marked], prepend=-1))]
    return changes.tolist(), "user metadata"


def _cycles(course: Ints) -> list[int]:
    """Events of the local lows between swings of at least `SWING` of the range."""
    import numpy as np

    if len(course) > 100_000:  # lows and highs of buckets are enough to see cycles
        width = len(course) // 25_000
        used = len(course) // width * width
        grid = course[:used].reshape(-1, width)
        at = np.sort(np.concatenate([grid.argmin(1) + np.arange(len(grid)) * width,
                                     grid.argmax(1) + np.arange(len(grid)) * width]))
    else:
        at = np.flatnonzero(np.diff(course, prepend=course[0] - 1))
    values = course[at].tolist()
    if not values:
        return []
    swing = SWING * (max(values) - min(values))
    if swing <= 0:
        return []
    lows: list[int] = []
    low = high = values[0]
    low_at, falling = 0, False
    for place, value in enumerate(values):
        if falling:
            if value < low:
                low, low_at = value, place
            elif value > low + swing:
                lows.append(int(at[low_at]))
                falling, high = False, value
        elif value > high:
            high = value
        elif value < high - swing:
            falling, low, low_at = True, value, place
    return lows


def _whole_steps(edges: Ints, trace: Trace, callers: list[Caller], by_shape: bool) -> bool:
    """Whether the cycles are steps of a training loop, as far as the stacks tell."""
    import numpy as np

    if not by_shape or not callers:
        return True
    kinds = {"forward": 1, "backward": 2, "optimizer": 2}
    codes = np.array([kinds.get(c.phase, 0) for c in callers] + [0], np.int8)[trace.stack]
    if not (codes == 1).any():
        return True  # nothing says forward: the stacks tell no phases
    counts = [np.add.reduceat((codes == kind).astype(np.int64), edges)[WARM_UP:-1] for kind in (1, 2)]
    return bool(((counts[0] > 0) & (counts[1] > 0)).mean() > STEADY)


def _keepers(replayed: Replay, kept: npt.NDArray[np.bool_], edges: Ints, callers: list[Caller]) -> list[Owner]:
    import numpy as np

    rows = np.flatnonzero(kept)
    if not len(rows):
        return []
    step = np.searchsorted(edges, replayed.begin[rows], side="right") - 1
    names: dict[str, int] = {}
    who = [callers[s] if s >= 0 else NOBODY for s in range(-1, len(callers))]
    lookup = np.array([names.setdefault(c.owner, len(names)) for c in who])
    owner = lookup[replayed.stack[rows] + 1]
    total = np.bincount(owner, replayed.requested[rows].astype(np.float64), len(names))
    found = []
    steps = len(edges) - 1
    for index in np.argsort(-total)[:MAX_OWNERS].tolist():
        mine = owner == index
        if total[index] < MIN_BYTES or len(np.unique(step[mine])) < STEADY * steps:
            continue
        caller = next(c for c in who if names[c.owner] == index)
        found.append(Owner(owner=caller.owner, phase=caller.phase, module=caller.module,
                           bytes=int(total[index] / steps), blocks=round(int(mine.sum()) / steps)))
    return found
