"""Scalars by name and step: what every reader of metrics returns, before `diag.series` gives the names one meaning.

Columns carry the names of their source. Records are numbered in file order: by line in text files, by record in binary
ones (`lines_known` says which). Replayed steps are kept as they were written; `diag.series` stitches them.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from diag.artefacts import Artefact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class Series:
    """One scalar over the run: three columns of equal length. `lines` are 1-based record numbers."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, line: int, value: float) -> None:
        """Append one point."""
        self.steps.append(step)
        self.lines.append(line)
        self.values.append(value)

    def extend(self, steps: npt.NDArray[np.int64], lines: npt.NDArray[np.int64],
               values: npt.NDArray[np.float64]) -> None:
        """Append many points. No copies on the way: a log may hold millions."""
        for column, more, kind in ((self.steps, steps, "int64"), (self.lines, lines, "int64"),
                                   (self.values, values, "float64")):
            column.frombytes(more.astype(kind, order="C", copy=False).data.cast("B"))

    def rewind(self, step: int) -> None:
        """Drop what lies beyond `step`: the run went back there and did the steps again."""
        while self.steps and self.steps[-1] > step:
            for column in (self.steps, self.lines, self.values):
                column.pop()


_LOSSLIKE = re.compile(r"loss|nll|ppl|perplexity|grad.?norm|(?:^|[/_])ce(?:$|[/_])", re.I)


@lru_cache(maxsize=4096)
def _losslike(key: str) -> bool:
    return _LOSSLIKE.search(key) is not None


class NullLosses:
    """Finds NaN that a strict JSON writer turned into null, as JavaScript's and pandas' do.

    A null is NaN where the record lacks nothing but losses and norms of the last record that had this loss, and has
    nothing beyond it. Others are the empty cells of a table: a record of validation has null for the training loss, and
    numbers of its own.
    """

    def __init__(self) -> None:
        self._there: dict[str, frozenset[str]] = {}

    def of(self, record: dict[str, Any]) -> list[str]:
        """The keys of `record` whose null is NaN. Called for each record, in order."""
        losses = [key for key in record if _losslike(key)]
        if not losses:
            return []
        there = frozenset(key for key, value in record.items() if value is not None)
        found = []
        for key in losses:
            if record[key] is not None:
                self._there[key] = there
            elif (before := self._there.get(key)) and there < before and all(_losslike(k) for k in before - there):
                found.append(key)
        return found


@dataclass(kw_only=True)
class HasSeries(Artefact):
    """Anything that holds numbers over steps: metrics files, event files, console logs."""


@dataclass(kw_only=True)
class MetricTable(HasSeries):
    """Numbers over steps from a file that holds little else.

    `steps_known` is false where records carry no step: they are then numbered from 1. `resumes` are (record, step)
    where the source itself says that training went on after `step`. `joins` is a key shared by files that are parts of
    one run, written one after the other in the order of `created` (Unix seconds). `style` names the program that wrote
    it, where that decides what a name means ("megatron", "hf", ...).
    """

    series: dict[str, Series] = field(default_factory=dict)
    resumes: list[tuple[int, int]] = field(default_factory=list)
    steps_known: bool = True
    lines_known: bool = True
    total_steps: int | None = None
    created: float | None = None
    joins: str | None = None
    style: str = ""

    def column(self, key: str) -> Series:
        """The column called `key`, made when it is new."""
        found = self.series.get(key)
        if found is None:
            found = self.series[key] = Series()
        return found
