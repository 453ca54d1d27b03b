"""Hugging Face `trainer_state.json`: the `log_history` of a Trainer, one record per logging step.

Training records and evaluation records ("eval_loss") are in one list; the closing summary ("train_runtime") is left
out. NaN may be a bare token. A file that is cut off is read as far as its records are whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from diag.artefacts import Source, Unreadable
from diag.artefacts.metric_table import MetricTable, NullLosses

NAME = "trainer-state"
ARTEFACT = MetricTable
#: A trainer state holds some hundred bytes per logged step.
MAX_BYTES = 2 << 30
_ENTRY = re.compile(rb"\{[^{}]*\}")
_STEP = re.compile(rb'"step"\s*:')


def sniff(head: bytes, name: str) -> float:
    """A JSON object with a `log_history`."""
    if not head.lstrip().startswith(b"{"):
        return 0.0
    if b'"log_history"' in head:
        return 1.0
    return 0.9 if name == "trainer_state.json" else 0.0


def read(source: Source) -> MetricTable | Unreadable:
    """Every number of `log_history` by key."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="is larger than 2 GiB")
    problem = None
    state: dict[str, Any] = {}
    try:
        state = _decode(data)
        history = state.get("log_history", []) if isinstance(state, dict) else []
    except ValueError:
        history = list(_whole_entries(data))
        problem = "is not whole JSON: cut off or damaged; the records before that were read"
    table = MetricTable(path=source.path, format=NAME, bytes=source.bytes, style="hf", problem=problem,
                        problem_severity="warning")
    lines = _step_lines(data)
    exact = len(lines) == sum(isinstance(r, dict) and "step" in r for r in history)
    table.lines_known = exact
    place, nulls = 0, NullLosses()
    for number, record in enumerate(history if isinstance(history, list) else [], 1):
        if not isinstance(record, dict) or "step" not in record:
            continue
        line, place = (lines[place] if exact else number), place + 1
        step = record["step"]
        if isinstance(step, bool) or not isinstance(step, (int, float)) or step != step or abs(step) > 2**53 or \
                "train_runtime" in record:
            continue
        lost = nulls.of(record)
        for key, value in record.items():
            if isinstance(value, str):
                value = _special(value)
            elif value is None and key in lost:
                value = float("nan")
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                table.column(key).add(int(step), line, float(value))
    if not table.series:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes,
                          problem=problem or "its log_history holds no number")
    table.lines = data.count(b"\n") + 1
    total = state.get("max_steps")
    table.total_steps = total if isinstance(total, int) and total > 0 else None
    return table


def _special(value: str) -> float | None:
    return float(value) if value.lower().lstrip("+-") in ("nan", "inf", "infinity") else None


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(data)  # bare NaN
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole_entries(data: bytes) -> Iterator[Any]:
    start = data.find(b'"log_history"')
    for found in _ENTRY.finditer(data, max(start, 0)):
        try:
            yield _decode(found[0])
        except ValueError:
            continue


def _step_lines(data: bytes) -> list[int]:
    """The line of each record's step."""
    start = max(data.find(b'"log_history"'), 0)
    lines, line, at = [], 1, 0
    for found in _STEP.finditer(data):
        line += data.count(b"\n", at, found.start())
        at = found.start()
        if at >= start:
            lines.append(line)
    return lines
