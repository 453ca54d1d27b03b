"""Artefacts -> raw runs: which files and which lines of a console log belong to one run, in the order of writing."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from diag.artefacts import Artefact, Artefacts
from diag.artefacts.log_facts import Log, Progress
from diag.artefacts.log_progress import DURATIONS, LEAST_DURATIONS, WAITS, grad_norm_of, loss_of
from diag.artefacts.metric_table import HasSeries, MetricTable, Series
from diag.artefacts.metrics import MetricsLog
from diag.series import Part, RawColumn, RawRun

#: Keys of a console line that lie beside the loss and mean nothing as a series.
_NOT_METRICS = {"step", "iteration", "global_step", "num_updates"}
#: Signatures of a run that continues from a checkpoint or is started anew.
RESTARTS = ("ckpt-loading", "agent-restart")
MAX_RESTARTS = 100
#: A counter that falls from its end to its beginning has begun the next epoch.
EPOCH_END, EPOCH_BEGIN = 0.9, 0.1


def raw_runs(artefacts: Artefacts) -> Iterator[RawRun]:
    """One raw run per metrics file, per group of files that continue each other, and per console log."""
    groups: dict[str, list[MetricTable]] = {}
    logs: list[Log] = []
    for item in artefacts.of(HasSeries):
        if isinstance(item, MetricsLog):
            yield _metrics(item)
        elif isinstance(item, MetricTable):
            groups.setdefault(item.joins or item.path, []).append(item)
        elif isinstance(item, Log):
            logs.append(item)
    for tables in groups.values():
        yield _tables(tables)
    for group in _log_groups(logs):
        raw = _console(group)
        if raw is not None:
            yield raw


def _ints(column: array[int]) -> np.ndarray:
    return np.frombuffer(column, dtype=np.int64).copy() if len(column) else np.zeros(0, dtype=np.int64)


def _floats(column: array[float]) -> np.ndarray:
    return np.frombuffer(column, dtype=np.float64).copy() if len(column) else np.zeros(0)


def _raw(key: str, series: Series, base: int = 0) -> RawColumn:
    """`base` is added to record numbers, which start at 1 in the source and at 0 in the run."""
    return RawColumn(key, _ints(series.steps), _ints(series.lines) - 1 + base, _floats(series.values))


def _metrics(log: MetricsLog) -> RawRun:
    ours = {"step_seconds", "tokens_per_second"} <= set(log.series)
    return RawRun(label=log.path, format=log.format, parts=[Part(log.path, 0)], artefacts=[log],
                  columns=[_raw(key, series) for key, series in log.series.items()],
                  resumes=[(line - 1, step) for line, step in log.resumes], steps_known=log.steps_known,
                  style="pdtrain" if ours else "")


def _tables(tables: list[MetricTable]) -> RawRun:
    tables = sorted(tables, key=lambda t: (t.created if t.created is not None else 0.0, t.path))
    parts: list[Part] = []
    columns: dict[str, list[RawColumn]] = {}
    resumes: list[tuple[int, int]] = []
    base = 0
    for table in tables:
        parts.append(Part(table.path, base, table.lines_known))
        for key, series in table.series.items():
            columns.setdefault(key, []).append(_raw(key, series, base))
        resumes += [(record - 1 + base, step) for record, step in table.resumes]
        base += max((int(s.lines[-1]) for s in table.series.values() if len(s.lines)), default=0) + 1
    label = tables[0].path if len(tables) == 1 else tables[0].directory
    total = next((t.total_steps for t in reversed(tables) if t.total_steps), None)
    joined = [RawColumn(key, np.concatenate([c.steps for c in pieces]), np.concatenate([c.records for c in pieces]),
                        np.concatenate([c.values for c in pieces])) for key, pieces in columns.items()]
    items: list[Artefact] = list(tables)
    return RawRun(label=label, format=tables[0].format, parts=parts, columns=joined, artefacts=items, resumes=resumes,
                  total_steps=total, steps_known=all(t.steps_known for t in tables), style=tables[0].style)


# Console logs

def _log_groups(logs: list[Log]) -> list[list[Log]]:
    """Each log alone, but those that carry on where another of the same folder ended, with the same total of steps."""
    spans = {id(log): _span(log) for log in logs}
    groups: list[list[Log]] = []
    places: dict[tuple[str, int], list[list[Log]]] = {}  # a folder may hold a log per rank of thousands
    for log in sorted(logs, key=lambda item: ((spans[id(item)] or (0, 0, 0, 0.0))[3], item.path)):
        span = spans[id(log)]
        if span is None:
            continue
        alike = places.setdefault((log.directory, span[2]), []) if span[2] else []
        for group in alike if log.name_rank is None else ():
            tail = spans[id(group[-1])]
            if tail is not None and span[0] > max(tail[0], 1) and span[0] <= tail[1] + 1 + (tail[1] - tail[0]) and \
                    span[1] >= tail[1]:
                group.append(log)
                break
        else:
            groups.append([log])
            alike.append(groups[-1])
    return groups


def _span(log: Log) -> tuple[int, int, int, float] | None:
    """First and last step, total and time of a log that prints progress."""
    if log.table is not None:
        longest = max(log.table.series.values(), key=lambda s: len(s.steps), default=None)
        if longest is None or not len(longest.steps):
            return None
        return longest.steps[0], longest.steps[-1], log.table.total_steps or 0, log.table.created or 0.0
    points = [p for p in log.progress if p.kind != "summary"]
    if not points:
        return None
    known = [p.step for p in points if p.step >= 0] or [0]
    total = next((p.total for p in reversed(points) if p.total), None)
    time = next((p.speaker.time for p in points if p.speaker.time), None)
    return known[0], known[-1], total or 0, time or 0.0


def _console(group: list[Log]) -> RawRun | None:
    parts: list[Part] = []
    pieces: defaultdict[str, Series] = defaultdict(Series)
    texts: dict[int, str] = {}
    offsets: dict[int, int] = {}
    base, total, known, style = 0, None, True, ""
    resumes: list[tuple[int, int]] = []
    for log in group:
        parts.append(Part(log.path, base))
        if log.table is not None:
            for key, series in log.table.series.items():
                raw = _raw(key, series, base)
                pieces[key].extend(raw.steps, raw.records, raw.values)
            total, style = log.table.total_steps or total, log.table.style
            known = known and log.table.steps_known
        else:
            chosen = _writer(log.progress)
            style = _style(chosen) or style
            steps, steps_known = _steps(chosen)
            known = known and steps_known
            total = next((p.total for p in reversed(chosen) if p.total and not p.kind.startswith("epoch")), total)
            _collect(chosen, steps, base, pieces, texts, offsets)
            _others(log.progress, chosen, base, pieces, known)
            resumes += _restarts(log, chosen, steps, base)
        base += (log.lines or 0) + 1
    columns = [RawColumn(key, _ints(s.steps), _ints(s.lines), _floats(s.values)) for key, s in pieces.items()]
    if not columns:
        return None
    items: list[Artefact] = list(group)
    return RawRun(label=group[0].path, format="log", parts=parts, columns=columns, artefacts=items, total_steps=total,
                  resumes=resumes, steps_known=known, style=style, texts=texts, offsets=offsets)


def _restarts(log: Log, points: Sequence[Progress], steps: Sequence[int], base: int) -> list[tuple[int, int]]:
    """Where lines say, between two points, that a checkpoint was loaded or the workers were started anew."""
    found = []
    for event in log.events:
        if event.rule in RESTARTS and not event.quoted:
            before = [step for item, step in zip(points, steps, strict=True) if item.line < event.line]
            if before and len(before) < len(points):
                found.append((event.line - 1 + base, before[-1]))
    return found[:MAX_RESTARTS]


def _writer(progress: Sequence[Progress]) -> list[Progress]:
    """The progress of the writer with most loss lines; ranks that repeat the same step count once."""
    groups: dict[tuple[str, str], list[Progress]] = {}
    for item in progress:
        if item.kind != "summary" and (loss_of(item) is not None or "loss_scale" in item.values
                                       or item.kind in ("megatron", "olmo")):
            kind = "bar" if item.kind.startswith("bar") else item.kind.split(" ")[0]
            groups.setdefault((item.speaker.mark, kind), []).append(item)
    if not groups:  # a log that prints durations alone
        took = [item for item in progress if item.kind == "took"]
        return took if len(took) >= LEAST_DURATIONS else []
    return max(groups.values(), key=len)


def _style(points: Sequence[Progress]) -> str:
    kinds = {p.kind for p in points[:20]}
    if "megatron" in kinds:
        return "megatron"
    if "olmo" in kinds:
        return "olmo"
    if "dict" in kinds:
        return "hf"
    if any("tps" in p.values and "mfu" in p.values for p in points[:20]):
        return "torchtitan"
    return ""


def _steps(points: Sequence[Progress]) -> tuple[list[int], bool]:
    """The step of each point over all epochs, and whether it is one: counters of batches go on across epochs."""
    unnumbered = sum(p.step < 0 for p in points) > 0.5 * len(points)
    loose = bool(points) and points[0].kind.startswith("loose")
    ends = len(points) > 2 and all(p.total and p.step == p.total for p in points)  # a line at the end of each epoch
    if unnumbered or ends or loose and len({p.step for p in points}) < 0.5 * len(points):  # an epoch on every line
        return list(range(1, len(points) + 1)), False
    found: list[int] = []
    offset, last = 0, None
    for item in points:
        if item.step < 0:
            found.append((found[-1] + 1) if found else 0)
            continue
        if last is not None and item.step < last.step and item.total and item.total == last.total and \
                last.step >= EPOCH_END * item.total and item.step <= max(EPOCH_BEGIN * item.total, 1):
            offset += item.total
        found.append(item.step + offset)
        last = item
    return found, True


def _collect(points: Sequence[Progress], steps: Sequence[int], base: int, pieces: defaultdict[str, Series],
             texts: dict[int, str], offsets: dict[int, int]) -> None:
    seen_loss = False
    for item, step in zip(points, steps, strict=True):
        record = item.line - 1 + base
        texts[record], offsets[record] = item.text, item.offset
        loss, norm = loss_of(item), grad_norm_of(item)
        if loss is None and item.kind == "megatron" and seen_loss and vanished(item.values):
            loss = float("nan")
        seen_loss = seen_loss or loss is not None
        if loss is not None:
            pieces["loss"].add(step, record, loss)
        if norm is not None:
            pieces["grad_norm"].add(step, record, norm)
        waits = bool(item.values.keys() & WAITS)
        for key, value in item.values.items():
            if key in _NOT_METRICS or key in ("loss", "grad_norm") or (loss is not None and value == loss):
                continue
            key = DURATIONS.get(key, key) if waits else key
            pieces[key].add(step, record, value)
        if item.speaker.time is not None:
            pieces["time"].add(step, record, item.speaker.time)


def vanished(values: dict[str, float]) -> bool:
    """Whether a Megatron line without its loss means NaN: it counts NaN iterations, or has a scale that skips nothing
    (the rest of the line may be cut off), and no step was skipped."""
    counted = "number_of_nan_iterations" in values or values.get("loss_scale") == 1.0
    return counted and values.get("number_of_skipped_iterations", 0) == 0


def _others(progress: Sequence[Progress], chosen: Sequence[Progress], base: int, pieces: defaultdict[str, Series],
            known: bool) -> None:
    """Columns that only other lines of the same log carry (timers, optimizer lines), where they name the step."""
    if not known:
        return
    mine = {id(p) for p in chosen}
    have = set(pieces)
    kinds = {p.kind.split(" ")[0] for p in chosen}
    for item in progress:
        if id(item) in mine or item.step < 0 or item.kind.startswith(("summary", "bar", "epoch", "loose")):
            continue
        if item.kind.split(" ")[0] in kinds and item.kind != "step":
            continue
        for key, value in item.values.items():
            if key not in have and key not in _NOT_METRICS and "loss" not in key:
                pieces[key].add(item.step, item.line - 1 + base, value)
