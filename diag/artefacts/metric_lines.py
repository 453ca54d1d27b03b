"""Every number that a console log prints with a step: what `diag loss` and `diag steps` read instead of facts.

Lines are understood by `line_layouts`; here the writer with most losses is chosen (ranks repeat each other), and its
lines become columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diag.artefacts import Source
from diag.artefacts.line_layouts import Layout, Lines, number_of
from diag.artefacts.log_facts import Progress, Speaker
from diag.artefacts.log_lines import Style, style_of
from diag.artefacts.log_progress import find_progress, grad_norm_of, loss_of
from diag.artefacts.log_scan import blocks
from diag.artefacts.metric_table import MetricTable, Series
from diag.errors import ArtefactError

#: Values over several lines cannot be learned; such logs are read line by line up to this size.
MAX_BLOCKED = 128 << 20


def read_table(source: Source) -> MetricTable:
    """The numbers of one console log. `series` holds the columns of the writer with most losses."""
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
    for layout in state.layouts:
        writer = writers.setdefault((layout.mark, _family(layout.kind)), _Writer())
        writer.layouts.append(layout)
        probe = _probe(layout)
        writer.losses += len(layout.rows) * (probe is not None and loss_of(probe) is not None)
    for item in state.loose:
        writer = writers.setdefault((item.speaker.mark, _family(item.kind)), _Writer())
        writer.loose.append(item)
        writer.losses += loss_of(item) is not None
    useful = {k: w for k, w in writers.items() if k[1] not in ("summary", "evaluation") and
              (w.losses or k[1] in ("megatron", "olmo") or any("loss_scale" in p.values for p in w.loose))}
    if not useful:
        return
    chosen_key = max(useful, key=lambda k: (useful[k].losses, _count(useful[k])))
    table.style = {"megatron": "megatron", "olmo": "olmo", "dict": "hf", "llmc": "nanogpt"}.get(chosen_key[1], "")
    chosen = useful[chosen_key]
    lines, steps, total, entries = _merged(chosen)
    steps, table.steps_known = _numbered(steps, total, lines)
    table.total_steps = total if not chosen_key[1].startswith("epoch") else None
    _fill(table, lines, steps, entries, chosen_key[1])
    have = set(table.series)
    for key, writer in writers.items():
        if writer is chosen or not table.steps_known or key[1].startswith(("summary", "bar", "epoch", "loose")):
            continue
        if key[1] == chosen_key[1] and key[1] not in ("step", "llmc"):
            continue
        if key[0] != chosen_key[0] and key[1] == chosen_key[1]:
            continue  # another rank
        more_lines, more_steps, _, more = _merged(writer)
        for name, (rows, values) in more.items():
            if name not in have and ("loss" not in name or name.startswith(("val", "eval"))):
                column = table.column(name)
                for row, value in zip(rows, values, strict=True):
                    if more_steps[row] >= 0:
                        column.add(int(more_steps[row]), more_lines[row], value)
    table.series = {key: series for key, series in table.series.items() if len(series.steps)}


def _family(kind: str) -> str:
    return "bar" if kind.startswith("bar") else kind.split(" ")[0]


def _count(writer: _Writer) -> int:
    return sum(len(layout.rows) for layout in writer.layouts) + len(writer.loose)


def _probe(layout: Layout) -> Progress | None:
    if not layout.rows:
        return None
    row = layout.rows[0]
    return Progress(step=0, line=0, offset=0, text="", speaker=Speaker(),
                    values={key: number_of(row[i]) for key, i in layout.keys}, kind=layout.kind)


Entries = dict[str, tuple[list[int], list[float]]]


def _merged(writer: _Writer) -> tuple[list[int], list[int], int | None, Entries]:
    """(line of each row, step of each row or -1, total, values by key as (rows, values)), in the order of lines."""
    lines: list[int] = []
    steps: list[int] = []
    total: int | None = None
    parts: list[tuple[int, dict[str, list[float]]]] = []
    for layout in writer.layouts:
        own_steps, own_total, values = layout.columns()
        parts.append((len(lines), values))
        lines += layout.lines
        steps += [_step(s) for s in own_steps] if own_steps else [-1] * len(layout.lines)
        total = own_total or total
    loose_base = len(lines)
    lines += [item.line for item in writer.loose]
    steps += [item.step for item in writer.loose]
    total = next((item.total for item in reversed(writer.loose) if item.total), total)
    import numpy as np

    order = np.argsort(np.asarray(lines, dtype=np.int64), kind="stable")
    identity = bool((order[1:] > order[:-1]).all()) if len(order) > 1 else True
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    entries: Entries = {}
    for base, values in parts:
        for key, column in values.items():
            rows, numbers = entries.setdefault(key, ([], []))
            rows += place[base : base + len(column)].tolist()
            numbers += column
    for index, item in enumerate(writer.loose):
        for key, value in item.values.items():
            rows, numbers = entries.setdefault(key, ([], []))
            rows.append(int(place[loose_base + index]))
            numbers.append(value)
    if not identity:
        lines, steps = [lines[i] for i in order], [steps[i] for i in order]
        entries = {key: _ordered(rows, numbers) for key, (rows, numbers) in entries.items()}
    return lines, steps, total, entries


def _ordered(rows: list[int], numbers: list[float]) -> tuple[list[int], list[float]]:
    pairs = sorted(zip(rows, numbers, strict=True), key=lambda pair: pair[0])
    return [row for row, _ in pairs], [number for _, number in pairs]


def _step(value: float) -> int:
    return int(value) if value == value and 0 <= value < 10**15 else -1


def _numbered(steps: list[int], total: int | None, lines: list[int]) -> tuple[list[int], bool]:
    """Steps over all epochs: a counter that falls from its end to its beginning has begun the next epoch."""
    if sum(step < 0 for step in steps) > 0.5 * len(steps):
        return list(range(1, len(steps) + 1)), False
    offset, last = 0, None
    found: list[int] = []
    for step in steps:
        if step < 0:
            found.append((found[-1] + 1) if found else 0)
            continue
        if last is not None and step < last and total and last >= 0.9 * total and step <= max(0.1 * total, 1):
            offset += total
        found.append(step + offset)
        last = step
    return found, True


def _fill(table: MetricTable, lines: list[int], steps: list[int], entries: Entries, family: str) -> None:
    """The columns; "loss" and "grad_norm" under whichever name they were printed."""
    names = {key: values[1][0] if values[1] else 0.0 for key, values in entries.items()}
    probe = Progress(step=0, line=0, offset=0, text="", speaker=Speaker(), values=_ranked(names), kind=family)
    for target, find in (("loss", loss_of), ("grad_norm", grad_norm_of)):
        value = find(probe)
        if value is not None and target not in entries:
            entries[target] = entries.pop(list(names)[int(value)])
    import numpy as np

    line_array, step_array = np.asarray(lines, dtype=np.int64), np.asarray(steps, dtype=np.int64)
    for key, (rows, values) in entries.items():
        if key in ("step", "iteration", "global_step", "num_updates"):
            continue
        index = np.asarray(rows, dtype=np.int64)
        series = table.column(key)
        series.steps.frombytes(step_array[index].tobytes())
        series.lines.frombytes(line_array[index].tobytes())
        series.values.frombytes(np.asarray(values, dtype=np.float64).tobytes())
    if family == "megatron":
        _vanished(table.series, entries, lines, steps)


def _ranked(names: dict[str, float]) -> dict[str, float]:
    """Keys with their place as value, so that `loss_of` answers which key it is."""
    return {key: float(index) for index, key in enumerate(names)}


def _vanished(series: dict[str, Series], entries: Entries, lines: list[int], steps: list[int]) -> None:
    """Lines that lost their loss field although no step was skipped are NaN (Megatron-LM prints no NaN)."""
    counted, losses = entries.get("number_of_nan_iterations"), entries.get("loss")
    if counted is None or losses is None or not losses[0]:
        return
    skipped = dict(zip(*entries.get("number_of_skipped_iterations", ([], [])), strict=True))
    have = set(losses[0])
    first = min(have)
    gone = [row for row in counted[0] if row > first and row not in have and not skipped.get(row)]
    if not gone:
        return
    whole = sorted([(row, value) for row, value in zip(*losses, strict=True)] + [(row, float("nan")) for row in gone])
    column = series["loss"] = Series()
    for row, value in whole:
        column.add(steps[row], lines[row], value)
