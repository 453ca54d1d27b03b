"""Batches that repeat what the run has read before, from `data_repeated` of metrics.jsonl.

Sees: the share of passages that were read before within the run's recent memory (docs/run-directory.md), within the
first pass over the data. Cannot see: repetition that is further apart than the memory, or that other ranks read;
paraphrases. After the first epoch repetition is what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import HasSeries
from diag.detectors import NotChecked, detector
from diag.schema import Finding, Where
from diag.series import Column, Run, runs

#: Of web text 3 to 19 % of 50-token passages occur twice in the whole corpus (arXiv 2107.06499); inside a memory of
#: half a million tokens far less. Bytes of source code showed at most 23 % in one step, 8 % in most.
REPEATED = 0.3
#: Points in the running median, and the length of a stretch.
WINDOW = 5


@detector("loss", needs=HasSeries, subject="metrics with data_repeated")
def data_repeats(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """At most one finding per run: its longest stretch of repetition."""
    told = False
    for run in runs(artefacts):
        column = run.get("data_repeated")
        if column is None or len(column) < WINDOW:
            continue
        told = True
        column = _first_epoch(run, column.finite())
        stretch = _stretch(column)
        if stretch is not None:
            yield _finding(run, column, *stretch)
    if not told:
        yield NotChecked("repeated data: no data_repeated in the metrics")


def _first_epoch(run: Run, column: Column) -> Column:
    epoch = run.get("epoch")
    if epoch is None:
        return column
    over = epoch.steps[epoch.values > 1.0]
    return column.take(column.steps < over[0]) if len(over) else column


def _stretch(column: Column) -> tuple[int, int] | None:
    """(first, last) index of the longest stretch whose running median is beyond the threshold."""
    values = column.values
    if len(values) < WINDOW:
        return None
    middle = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    beyond = np.flatnonzero(middle > REPEATED)
    if not len(beyond):
        return None
    groups = np.split(beyond, np.flatnonzero(np.diff(beyond) > WINDOW) + 1)
    longest = max(groups, key=len)
    if len(longest) < WINDOW:
        return None
    first, last = int(longest[0]), int(longest[-1]) + WINDOW - 1
    inside = np.flatnonzero(values[first : last + 1] > REPEATED)
    return first + int(inside[0]), first + int(inside[-1])


def _finding(run: Run, column: Column, first: int, last: int) -> Finding:
    part = column.values[first : last + 1]
    share = float(np.median(part))
    begin, end = int(column.steps[first]), int(column.steps[last])
    ongoing = last >= len(column) - WINDOW
    when = f"since step {begin:,}" if ongoing else f"from step {begin:,} to {end:,}"
    loss = _fall(run, begin)
    after = f" The loss fell by {loss:.2f} from then on, by memorising." if loss is not None and loss > 0.1 else ""
    places = [run.evidence(column, first, "loss")]
    if last != first:
        places.append(run.evidence(column, last, "loss"))
    return Finding(
        cause="data_repeated", severity="warning", confidence=0.9 if share > 0.5 else 0.75,
        summary=f"The batches repeat earlier data {when}: {share:.0%} of the passages had been read before, in the "
                f"first pass over the data.{after}",
        where=Where(module="data", step=begin if run.steps_known else None), evidence=places,
        numbers={"repeated": round(share, 4), "first_step": begin, "last_step": end},
    )


def _fall(run: Run, step: int) -> float | None:
    """By how much the loss is lower at the end than just before `step`."""
    loss = run.get("loss")
    if loss is None:
        return None
    before, after = loss.values[loss.steps < step][-10:], loss.values[loss.steps >= step][-10:]
    if len(before) < 3 or len(after) < 3:
        return None
    return float(np.median(before) - np.median(after))
