"""Tables with a header: Lightning's metrics.csv, exports of W&B and TensorBoard, anybody's own loss.csv.

The separator is a comma, semicolon or tab. A column of steps and at least one more column of numbers make it a metrics
table; empty cells are steps at which a metric was not logged. W&B names its columns "<run> - <metric>" and adds the
minimum and maximum of each. A table without any step column is numbered by its rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import PurePath

from diag.artefacts import Source, Unreadable
from diag.artefacts.metric_table import MetricTable, Series
from diag.errors import ArtefactError

NAME = "csv"
ARTEFACT = MetricTable

STEP_NAMES = ("step", "global_step", "iteration", "iter", "steps", "_step", "trainer/global_step", "train_step",
              "iterations", "num_updates", "update", "batch")
_LOSS = re.compile(r"loss|perplexity|\bppl\b|grad.?norm|nll|cross.?entropy", re.I)
_EXTREMES = re.compile(r"__(?:MIN|MAX)$")
_DECIMAL_COMMA = re.compile(r"\s*[-+]?\d+,\d+(?:[eE][-+]?\d+)?\s*")
MAX_COLUMNS = 10_000
#: Rows that do not fit are worth a warning from this share on.
BAD_SHARE = 0.01
_EMPTY = {"", "none", "null", "na", "n/a", "-"}


def _dialect(head: bytes) -> tuple[str, list[str]] | None:
    """Separator and header of a table, or None."""
    line = head.lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8", "replace").strip("\r")
    for separator in (",", "\t", ";"):
        try:
            cells = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:
            continue
        if 2 <= len(cells) <= MAX_COLUMNS and all(len(cell) < 200 for cell in cells):
            return separator, [cell.strip().lstrip("#").strip() for cell in cells]
    return None


def _number(cell: str, *, comma: bool = False) -> float | None:
    """The number in a cell; with `comma` a decimal comma counts too, as spreadsheets of half of Europe write it."""
    try:
        return float(cell)
    except ValueError:
        return float(cell.replace(",", ".")) if comma and _DECIMAL_COMMA.fullmatch(cell) else None


def sniff(head: bytes, name: str) -> float:
    """A header that speaks of steps or losses, above rows of numbers."""
    if b"\0" in head[:4096] or head.lstrip()[:1] in (b"{", b"["):
        return 0.0
    found = _dialect(head)
    if found is None:
        return 0.0
    separator, header = found
    if any(_number(cell) is not None for cell in header):
        return 0.0
    stepped = any(cell.lower() in STEP_NAMES for cell in header)
    lossy = any(_LOSS.search(cell) for cell in header)
    if not stepped and not lossy:
        return 0.0
    rows = head.split(b"\n")[1:4]
    cells = [c.strip() for row in rows if row.strip() for c in row.decode("utf-8", "replace").split(separator)]
    numbers = sum(_number(c, comma=separator != ",") is not None or c.lower() in _EMPTY for c in cells)
    if cells and numbers < 0.4 * len(cells):
        return 0.0
    return 0.9 if name.endswith((".csv", ".tsv")) else (0.6 if stepped and lossy else 0.0)


def named(head: bytes, columns: Sequence[str]) -> float:
    """A header that holds a column which the user has named, whatever else it speaks of."""
    found = None if b"\0" in head[:4096] else _dialect(head)
    return 0.95 if found is not None and not set(columns).isdisjoint(found[1]) else 0.0


def read(source: Source) -> MetricTable | Unreadable:
    """Every column of numbers; rows that do not fit the header are counted and stated."""
    found = _dialect(source.head)
    table = MetricTable(path=source.path, format=NAME, bytes=source.bytes, style="csv")
    if found is None:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="has no header")
    separator, header = found
    comma = separator != ","
    place = next((header.index(c) for name in STEP_NAMES for c in header if c.lower() == name), None)
    table.steps_known = place is not None
    keys = [None if i == place or _EXTREMES.search(cell) or not cell else _key(cell, source.name)
            for i, cell in enumerate(header)]
    columns: list[tuple[int, Series]] = [(i, table.column(key)) for i, key in enumerate(keys) if key is not None]
    bad, first_bad, row_number, rows = 0, 0, 1, 0
    try:
        with source.open() as stream:
            reader = csv.reader(io.TextIOWrapper(stream, "utf-8", "replace", newline=""), delimiter=separator)
            next(reader, None)
            for row in reader:
                row_number = reader.line_num
                if not row or not any(row) or [cell.strip() for cell in row] == header:  # appended with its header
                    continue
                rows += 1
                step = float(rows) if place is None else _number(row[place], comma=comma) if place < len(row) else None
                if step is None or step != step or abs(step) > 2**53 or len(row) > len(header):
                    bad, first_bad = bad + 1, first_bad or row_number
                    continue
                for index, series in columns:
                    cell = row[index] if index < len(row) else ""
                    if cell and (value := _number(cell, comma=comma)) is not None:
                        series.add(int(step), row_number, value)
    except (ArtefactError, csv.Error) as error:
        table.problem, table.problem_severity = f"{error}; read up to line {row_number:,}", "warning"
    table.lines = row_number
    table.series = {key: series for key, series in table.series.items() if len(series.steps)}
    if not table.series:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, lines=row_number,
                          problem=table.problem or "holds no row of numbers below its header")
    if bad and not table.problem:
        table.problem = f"{bad:,} rows do not fit the header, the first is line {first_bad:,}"
        last = bad == 1 and first_bad == row_number
        table.problem_severity = "info" if last or bad < BAD_SHARE * rows else "warning"
    return table


def _key(cell: str, name: str) -> str:
    """The metric's own name: without W&B's run name in front; TensorBoard calls its only column "Value"."""
    if " - " in cell:
        return cell.rsplit(" - ", 1)[1]
    return PurePath(name).stem if cell.lower() == "value" else cell
