"""The numbers of a training run, whoever wrote them: the nouns `Column` and `Run`, and `runs`, which gathers them.

Every numeric detector starts here. Columns have canonical names and units (`diag.series_names`, docs/series.md) and
strictly increasing steps: where a run went back and did steps again, the later record counts, and the place is kept as
a `Resume`. One run seen twice (its metrics file and its console log, or the logs of several ranks) is one `Run`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from diag.artefacts import Artefact, Artefacts
from diag.schema import Evidence

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a run. Records of the run are numbered through; the file holds those from `first` on."""

    path: str
    first: int
    lines_known: bool = True


@dataclass(slots=True)
class Column:
    """One metric over the run: `values` [n] at strictly increasing `steps` [n], written by `records` [n].

    `records` number the lines (or binary records) of all parts of the run; `Run.evidence` turns them into places.
    `key` is the source's own name. Values are in the canonical unit; `convention` says how they were defined.
    """

    name: str
    key: str
    steps: Ints
    values: Floats
    records: Ints
    convention: str | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int) -> float | None:
        """The value at `step`, or the last one before it; None before the first."""
        index = int(np.searchsorted(self.steps, step, side="right")) - 1
        return float(self.values[index]) if index >= 0 else None

    def finite(self) -> Column:
        """The points that are finite numbers."""
        keep = np.isfinite(self.values)
        return self if keep.all() else self.take(keep)

    def take(self, keep: npt.NDArray[np.bool_] | Ints) -> Column:
        """The points chosen by a mask or by indexes."""
        return Column(self.name, self.key, self.steps[keep], self.values[keep], self.records[keep], self.convention)


@dataclass(frozen=True, slots=True)
class Resume:
    """The run started again: it continued after `step`; `record` is the first record written then.

    `replayed` counts the steps that were done again. `told` is true where a record says so; otherwise the steps went
    back, or another file begins.
    """

    step: int
    record: int
    replayed: int
    told: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step read, as far as the run says it: its first and last sequence, and documents in it."""

    samples: tuple[int, int] | None
    documents: list[str | int]


@dataclass(slots=True)
class Run:
    """One training run. Use `get("loss")`, `match("grad_norm/*")`, `evidence(column, index)`."""

    label: str
    format: str
    parts: list[Part]
    columns: dict[str, Column]
    artefacts: list[Artefact]
    resumes: list[Resume] = field(default_factory=list)
    total_steps: int | None = None
    #: false where records carry no step: they are then numbered from 1, and no step may be reported
    steps_known: bool = True
    style: str = ""
    #: record -> the line as it was printed, where it was kept
    texts: dict[int, str] = field(default_factory=dict, repr=False)
    #: record -> byte offset of the line
    offsets: dict[int, int] = field(default_factory=dict, repr=False)
    #: superseded stretches: (column name, points that were done again later)
    replaced: list[Column] = field(default_factory=list, repr=False)
    #: step -> its batch, where the run noted it; sequences per step; the configuration (`diag.loss.batches`)
    batches: dict[int, Batch] = field(default_factory=dict, repr=False)
    train_batch: int | None = None
    config_path: str | None = None

    @property
    def path(self) -> str:
        """The first file of the run."""
        return self.parts[0].path

    def get(self, name: str) -> Column | None:
        """The column with this canonical name, if it was recorded at least once."""
        return self.columns.get(name)

    def match(self, pattern: str) -> dict[str, Column]:
        """The columns whose names match a shell pattern ("grad_norm/*"), by name."""
        return {name: c for name, c in self.columns.items() if fnmatchcase(name, pattern)}

    def losses(self) -> list[Column]:
        """The training losses, the one that is optimised first ("loss", then "loss/...")."""
        first = [self.columns["loss"]] if "loss" in self.columns else []
        return first + list(self.match("loss/*").values())

    def value(self, name: str, step: int) -> float | None:
        """The value of a column at `step` or last before it."""
        column = self.columns.get(name)
        return column.at(step) if column is not None else None

    def place(self, record: int) -> tuple[str, int | None]:
        """The file and 1-based line of a record; no line in binary files."""
        index = max(bisect_right([p.first for p in self.parts], record) - 1, 0)
        part = self.parts[index]
        return part.path, record - part.first + 1 if part.lines_known else None

    def evidence(self, column: Column, index: int, *beside: str) -> Evidence:
        """One point of a column as evidence: the printed line, or step and value, with the columns named `beside`."""
        record = int(column.records[index])
        path, line = self.place(record)
        text = self.texts.get(record)
        if text is None:
            step = int(column.steps[index])
            shown = [f"{column.key} = {column.values[index]:.6g}"]
            for name in beside:
                other = self.columns.get(name)
                value = other.at(step) if other is not None else None
                if other is not None and value is not None:
                    shown.append(f"{other.name} = {value:.6g}")
            text = (f"step {step}: " if self.steps_known else "") + ", ".join(shown)
        return Evidence(path=path, line=line, offset=self.offsets.get(record), text=text[:600])

    def step(self, column: Column, index: int) -> int | None:
        """The step of a point, or None where steps are only counted."""
        return int(column.steps[index]) if self.steps_known else None


@dataclass(slots=True)
class RawColumn:
    """A column as written: `steps` may go back."""

    key: str
    steps: Ints
    records: Ints
    values: Floats


@dataclass(slots=True)
class RawRun:
    """What one source, or several that are parts of one run, wrote in file order."""

    label: str
    format: str
    parts: list[Part]
    columns: list[RawColumn]
    artefacts: list[Artefact]
    resumes: list[tuple[int, int]] = field(default_factory=list)
    total_steps: int | None = None
    steps_known: bool = True
    style: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)


#: More resets than this share of records are not restarts: several writers share the file.
INTERLEAVED = 0.05
#: Two runs are one when so many of their common steps carry the same loss.
SAME_SHARE, SAME_POINTS, SAME_TOLERANCE = 0.9, 5, 2e-3
#: A run is compared with so many others, those with most points: a job's ranks may each log a loss of their own.
MOST_COMPARED = 64


def runs(artefacts: Artefacts) -> list[Run]:
    """The runs that the artefacts tell of, the one with most loss points first. Made once per set of artefacts."""
    memo = artefacts.__dict__.setdefault("runs", {})
    key = artefacts.columns
    if key not in memo:
        from diag.series_sources import raw_runs

        found = [run for raw in raw_runs(artefacts) if (run := stitch(raw, key)).columns]
        memo[key] = _distinct(found)
    return list(memo[key])


def stitch(raw: RawRun, columns: Sequence[tuple[str, str]] = ()) -> Run:
    """`raw` with canonical names, each step once: the last time it was done."""
    steps, records, interleaved = _timeline(raw)
    resumes = [] if interleaved else _resumes(raw, steps, records)
    run = Run(label=raw.label, format=raw.format, parts=raw.parts, columns={}, artefacts=raw.artefacts,
              resumes=resumes, total_steps=raw.total_steps, steps_known=raw.steps_known, style=raw.style,
              texts=raw.texts, offsets=raw.offsets)
    for name, convention, scale, column in _named(raw, columns):
        order = column.records
        keep = np.ones(len(order), dtype=bool)
        for resume in resumes:
            keep &= ~((order < resume.record) & (column.steps > resume.step))
        if name == "loss" and not keep.all() and run.steps_known:
            run.replaced.append(_sorted(name, column, ~keep, scale, convention))
        run.columns[name] = _sorted(name, column, keep, scale, convention)
    run.columns = {name: c for name, c in run.columns.items() if len(c)}
    return run


def _named(raw: RawRun, chosen: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str | None, float, RawColumn]]:
    from diag.series_names import meaning_of, normal

    wanted = {normal(key): name for name, key in chosen}
    taken: dict[str, list[tuple[int, int, str | None, float, RawColumn]]] = {}
    for place, column in enumerate(raw.columns):
        own = wanted.get(normal(column.key))
        meaning = meaning_of(column.key, raw.style)
        if own is not None:
            taken.setdefault(own, []).append((-1, place, None, 1.0, column))
        elif meaning is not None:
            taken.setdefault(meaning.name, []).append((meaning.rank, place, meaning.convention, meaning.scale, column))
    for name, candidates in taken.items():
        candidates.sort(key=lambda c: (c[0], -len(c[4].steps) if name != "loss" else 0, c[1]))
        best = candidates[0]
        if name == "loss" and best[0] >= 0 and len(best[4].steps) < 3:
            best = max(candidates, key=lambda c: len(c[4].steps))
        yield name, best[2], best[3], best[4]
        for other in candidates:
            if other is not best:
                yield f"{name}/{normal(other[4].key)}", other[2], other[3], other[4]


def _sorted(name: str, column: RawColumn, keep: npt.NDArray[np.bool_], scale: float, convention: str | None) -> Column:
    steps, values, records = column.steps[keep], column.values[keep], column.records[keep]
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        order = np.lexsort((records, steps))
        steps, values, records = steps[order], values[order], records[order]
        last = np.append(steps[1:] != steps[:-1], True)
        steps, values, records = steps[last], values[last], records[last]
    return Column(name, column.key, steps, values * scale if scale != 1.0 else values, records, convention)


def _timeline(raw: RawRun) -> tuple[Ints, Ints, bool]:
    """Steps in the order in which they were recorded, their records, and whether several writers are interleaved."""
    if not raw.columns:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, False
    longest = max(raw.columns, key=lambda c: len(c.steps))
    steps, records = longest.steps, longest.records
    back = int((np.diff(steps) < 0).sum()) if len(steps) > 1 else 0
    return steps, records, back > 3 and back > INTERLEAVED * len(steps)


def _resumes(raw: RawRun, steps: Ints, records: Ints) -> list[Resume]:
    found: list[Resume] = []
    for record, step in raw.resumes:
        replayed = int(((records < record) & (steps > step)).sum())
        found.append(Resume(step=step, record=record, replayed=replayed, told=True))
    told = [r.record for r in found]
    for index in np.flatnonzero(np.diff(steps) < 0):
        record = int(records[index + 1])
        previous = int(records[index])
        if any(previous < r <= record for r in told):
            continue
        step = int(steps[index + 1])
        before = steps[: index + 1]
        replayed = int((before >= step).sum())
        found.append(Resume(step=step - 1, record=record, replayed=replayed, told=False))
    for part in raw.parts[1:]:
        later = np.flatnonzero(records >= part.first)
        if len(later) and later[0] > 0 and not any(
                int(records[later[0] - 1]) < r.record <= int(records[later[0]]) for r in found):
            step = int(steps[later[0] - 1])
            found.append(Resume(step=step, record=int(records[later[0]]), replayed=0, told=True))
    return sorted(found, key=lambda r: r.record)


def _distinct(found: Iterable[Run]) -> list[Run]:
    """Runs whose loss is the same at their common steps count once: the one that tells most."""
    ordered = sorted(found, key=lambda r: (-len(r.columns.get("loss", ())), -len(r.columns), r.label))
    kept: list[Run] = []
    for run in ordered:
        place = next((i for i, other in enumerate(kept[:MOST_COMPARED]) if _same(other, run)), None)
        if place is None:
            kept.append(run)
            continue
        twin = kept[place]
        if len(run.columns) > len(twin.columns) and len(run.columns["loss"]) >= 0.5 * len(twin.columns["loss"]):
            kept[place] = run
            run, twin = twin, run
        known = {id(item) for item in twin.artefacts}
        twin.artefacts = [*twin.artefacts, *(item for item in run.artefacts if id(item) not in known)]
        twin.total_steps = twin.total_steps or run.total_steps
    return kept


def _same(a: Run, b: Run) -> bool:
    one, two = a.get("loss"), b.get("loss")
    if one is None or two is None or not (a.steps_known and b.steps_known):
        return False
    if one.steps[0] > two.steps[-1] or two.steps[0] > one.steps[-1]:
        return False
    x, y = one.values, two.values
    if not np.array_equal(one.steps, two.steps):
        _, left, right = np.intersect1d(one.steps, two.steps, assume_unique=True, return_indices=True)
        if len(left) < min(SAME_POINTS, len(one), len(two)) or len(left) < 0.5 * min(len(one), len(two)):
            return False
        x, y = x[left], y[right]
    with np.errstate(invalid="ignore"):
        near = np.abs(x - y) <= SAME_TOLERANCE * np.maximum(np.abs(x), np.abs(y)) + 1e-9
    return bool((near | (~np.isfinite(x) & ~np.isfinite(y))).mean() >= SAME_SHARE)
