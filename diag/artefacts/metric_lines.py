"""Every number that a console log prints with a step: what `diag loss` and `diag steps` read instead of facts.

Lines are understood by `line_layouts`; here the writer with most losses is chosen (ranks repeat each other), and its
lines become columns.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from diag.artefacts import Source
from diag.artefacts.line_layouts import Layout, Lines
from diag.artefacts.log_facts import Progress, Speaker
from diag.artefacts.log_lines import Style, style_of
from diag.artefacts.log_progress import DURATIONS, LEAST_DURATIONS, WAITS, find_progress, grad_norm_of, loss_of
from diag.artefacts.log_scan import blocks
from diag.artefacts.metric_table import MetricTable
from diag.errors import ArtefactError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

#: Values over several lines cannot be learned; such logs are read line by line up to this size.
MAX_BLOCKED = 128 << 20


def read_table(source: Source) -> MetricTable:
    """The numbers of one console log. `series` holds the columns of the writer with most losses."""
    collecting = gc.isenabled()
    gc.disable()  # millions of small tuples and no cycle: the collector would only count them
    try:
        return _read(source)
    finally:
        if collecting:
            gc.enable()


def _read(source: Source) -> MetricTable:
    state = Lines(style_of(source.head))
    table = MetricTable(path=source.path, format="log", bytes=source.bytes)
    size = 0
    try:
        with source.open() as stream:
            for block in blocks(stream):
                size += len(block)
                if not state.blocked or size > MAX_BLOCKED:
                    state.feed(block)
                if state.blocked:
                    break
        if state.blocked:
            state = _whole(source, state.style)
    except (ArtefactError, OSError) as error:
        table.problem, table.problem_severity = f"{error}; read up to line {state.number:,}", "warning"
    table.lines = state.number
    if state.unread:
        table.problem = f"{state.unread:,} lines that may hold metrics follow no layout and were not read"
        table.problem_severity = "warning"
    state.finish()
    assemble(state, table)
    return table


def _whole(source: Source, style: Style) -> Lines:
    """A log whose values come in blocks of several lines."""
    state = Lines(style)
    done = 0
    with source.open() as stream:
        for block in blocks(stream):
            for item in find_progress(block, style):
                item.line += state.number + 1
                state.loose.append(item)
            state.number += block.count(b"\n") + (not block.endswith(b"\n"))
            done += len(block)
            if done > MAX_BLOCKED:
                break
    return state


@dataclass(slots=True)
class _Writer:
    """All lines of one writer and kind, layouts and single lines together."""

    layouts: list[Layout] = field(default_factory=list)
    loose: list[Progress] = field(default_factory=list)
    losses: int = 0


def assemble(state: Lines, table: MetricTable) -> None:
    """Choose the writer, put its lines in order and fill the columns of `table`."""
    writers: dict[tuple[str, str], _Writer] = {}
    for layout in [*state.layouts, *state.retired]:
        probe = layout.probe()
        if probe is None:
            continue
        writer = writers.setdefault((layout.mark, _family(layout.kind)), _Writer())
        writer.layouts.append(layout)
        writer.losses += layout.count * (loss_of(probe) is not None)
    for item in state.loose:
        writer = writers.setdefault((item.speaker.mark, _family(item.kind)), _Writer())
        writer.loose.append(item)
        writer.losses += loss_of(item) is not None
    useful = {k: w for k, w in writers.items() if k[1] != "summary" and
              (w.losses or k[1] in ("megatron", "olmo") or any("loss_scale" in p.values for p in w.loose))}
    useful = useful or {k: w for k, w in writers.items() if k[1] == "took" and _count(w) >= LEAST_DURATIONS}
    if not useful:
        return
    chosen_key = max(useful, key=lambda k: (useful[k].losses, _count(useful[k])))
    table.style = {"megatron": "megatron", "olmo": "olmo", "dict": "hf", "llmc": "nanogpt"}.get(chosen_key[1], "")
    chosen = useful[chosen_key]
    lines, steps, total, entries = _merged(chosen)
    if chosen_key[1] == "loose" and len(np.unique(steps)) < 0.5 * len(steps):
        steps = np.full_like(steps, -1)  # an epoch, repeated on every line
    steps, table.steps_known = _numbered(steps, total)
    table.total_steps = total if not chosen_key[1].startswith("epoch") else None
    _fill(table, lines, steps, entries, chosen_key[1])
    have = set(table.series)
    for key, writer in writers.items():
        if writer is chosen or not table.steps_known or key[1].startswith(("bar", "epoch", "loose")):
            continue
        if key[1] == chosen_key[1] and key[1] not in ("step", "llmc"):
            continue
        if key[0] != chosen_key[0] and key[1] == chosen_key[1]:
            continue  # another rank
        more_lines, more_steps, _, more = _merged(writer)
        for name, (rows, values) in more.items():
            if name not in have and ("loss" not in name or name.startswith(("val", "eval"))):
                keep = more_steps[rows] >= 0
                table.column(name).extend(more_steps[rows[keep]], more_lines[rows[keep]], values[keep])
    table.series = {key: series for key, series in table.series.items() if len(series.steps)}


def _family(kind: str) -> str:
    return "bar" if kind.startswith("bar") else kind.split(" ")[0]


def _count(writer: _Writer) -> int:
    return sum(layout.count for layout in writer.layouts) + len(writer.loose)


#: values by key: rows of the table of lines, and the numbers there
Entries = dict[str, tuple["Ints", "Floats"]]


def _merged(writer: _Writer) -> tuple[Ints, Ints, int | None, Entries]:
    """(line of each row, step of each row or -1, total, values by key), in the order of lines."""
    lines: list[Ints] = []
    steps: list[Ints] = []
    parts: dict[str, list[tuple[Ints, Floats]]] = {}
    total, base = None, 0
    for layout in writer.layouts:
        total = layout.last_total or total
        for chunk_lines, chunk_steps, values in layout.chunks:
            rows = np.arange(base, base + len(chunk_lines))
            lines.append(chunk_lines)
            steps.append(_whole_steps(chunk_steps, len(chunk_lines)))
            for key, column in values.items():
                parts.setdefault(key, []).append((rows, column))
            base += len(chunk_lines)
    loose: dict[str, tuple[list[int], list[float]]] = {}
    for index, item in enumerate(writer.loose):
        for key, value in item.values.items():
            places, numbers = loose.setdefault(key, ([], []))
            places.append(base + index)
            numbers.append(value)
    for key, (places, numbers) in loose.items():
        parts.setdefault(key, []).append((np.array(places, dtype=np.int64), np.array(numbers)))
    lines.append(np.array([item.line for item in writer.loose], dtype=np.int64))
    steps.append(np.array([item.step for item in writer.loose], dtype=np.int64))
    total = next((item.total for item in reversed(writer.loose) if item.total), total)
    all_lines, all_steps = np.concatenate(lines), np.concatenate(steps)
    order = np.argsort(all_lines, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    entries = {}
    shared: dict[tuple[int, ...], tuple[Ints, Ints]] = {}  # columns of the same lines share their rows
    for key in list(parts):
        pieces = parts.pop(key)
        same = tuple(id(r) for r, _ in pieces)
        if same not in shared:
            rows = place[np.concatenate([r for r, _ in pieces])]
            inside = np.argsort(rows, kind="stable")
            shared[same] = rows[inside], inside
        rows, inside = shared[same]
        entries[key] = rows, np.concatenate([v for _, v in pieces])[inside]
    return all_lines[order], all_steps[order], total, entries


def _whole_steps(steps: Floats | None, count: int) -> Ints:
    if steps is None:
        return np.full(count, -1, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        good = (steps >= 0) & (steps < 1e15)
    return np.where(good, np.where(good, steps, 0.0).astype(np.int64), -1)


def _numbered(steps: Ints, total: int | None) -> tuple[Ints, bool]:
    """Steps over all epochs: a counter that falls from its end to its beginning has begun the next epoch."""
    if (steps < 0).sum() > 0.5 * len(steps) or total and len(steps) > 2 and (steps == total).all():
        return np.arange(1, len(steps) + 1), False  # no counter, or only the ends of epochs
    if (steps >= 0).all() and (np.diff(steps) >= 0).all():
        return steps, True
    offset, last = 0, None
    found: list[int] = []
    for step in steps.tolist():
        if step < 0:
            found.append((found[-1] + 1) if found else 0)
            continue
        if last is not None and step < last and total and last >= 0.9 * total and step <= max(0.1 * total, 1):
            offset += total
        found.append(step + offset)
        last = step
    return np.array(found, dtype=np.int64), True


def _fill(table: MetricTable, lines: Ints, steps: Ints, entries: Entries, family: str) -> None:
    """The columns; "loss" and "grad_norm" under whichever name they were printed."""
    names = list(entries)
    probe = Progress(step=0, line=0, offset=0, text="", speaker=Speaker(), kind=family,
                     values={key: float(index) for index, key in enumerate(names)})  # answers which key it is
    for target, find in (("loss", loss_of), ("grad_norm", grad_norm_of)):
        value = find(probe)
        if value is not None and target not in entries:
            entries[target] = entries.pop(names[int(value)])
    if family == "megatron":
        _vanished(entries)
    waits = bool(entries.keys() & WAITS)
    for key, (rows, values) in entries.items():
        key = DURATIONS.get(key, key) if waits else key
        if key not in ("step", "iteration", "global_step", "num_updates"):
            table.column(key).extend(steps[rows], lines[rows], values)


def _vanished(entries: Entries) -> None:
    """Lines that lost their loss field although no step was skipped are NaN (Megatron-LM prints no NaN)."""
    losses = entries.get("loss")
    if losses is None or not len(losses[0]):
        return
    counted = entries.get("number_of_nan_iterations", (np.zeros(0, dtype=np.int64), np.zeros(0)))[0]
    if "loss_scale" in entries:  # a scale of 1 skips nothing, and the rest of the line may be cut off
        rows, numbers = entries["loss_scale"]
        ones = rows[numbers == 1.0]
        counted = counted if len(ones) == 0 else ones if len(ones) >= len(counted) and _among(counted, ones).all() \
            else np.union1d(counted, ones)
    gone = counted[counted > losses[0][0]]
    if "number_of_skipped_iterations" in entries:
        rows, numbers = entries["number_of_skipped_iterations"]
        gone = gone[~_among(gone, rows[numbers > 0])]
    gone = gone[~_among(gone, losses[0])]
    if len(gone):
        rows = np.concatenate([losses[0], gone])
        order = np.argsort(rows, kind="stable")
        entries["loss"] = rows[order], np.concatenate([losses[1], np.full(len(gone), np.nan)])[order]


def _among(values: Ints, ordered: Ints) -> npt.NDArray[np.bool_]:
    """Which of `values` occur in `ordered`, which is sorted."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
