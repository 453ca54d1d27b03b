"""Metric records, one JSON object per line: this trainer's metrics.jsonl, and router records of any other trainer.

    {"step": 1, "time": 1700000000.0, "loss": 5.54, "router/1/counts": [64, 70, 61, 61], "router/1/drop_rate": 0.0}
    {"step": 1, "layer": 1, "counts": [64, 70, 61, 61]}                      one line per layer is welcome too

The format is docs/run-directory.md. NaN and infinities may be strings ("NaN") or Python's bare tokens. Scalars are
kept as columns; router values of a long run are folded into at most `MAX_WINDOWS` windows per layer, so that memory
stays bounded whatever the length of the run. A torn last line is what a killed run leaves: stated, not held against it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from diag.artefacts import Source, Unreadable
from diag.artefacts.metric_table import HasSeries, NullLosses, Series
from diag.errors import ArtefactError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME = "metrics"
#: Windows kept per layer; when full, neighbours are merged and the window doubles.
MAX_WINDOWS = 512
#: A line longer than this is not a metric record (58 layers x 256 counts take about 150 kB).
MAX_LINE_BYTES = 16 << 20
MAX_KEYS = 100_000
MAX_EXPERTS = 65_536

STEP_KEYS = ("step", "iteration", "global_step", "_step")
COUNT_KEYS = ("counts", "tokens_per_expert", "expert_counts", "num_tokens_per_expert")
_ROUTER_KEY = re.compile(r"(?:router|moe)/(?:layers?[._/]?)?(\d+)/(\w+)")
_LAYER_KEY = re.compile(r"(?:layers?[._/]?)?(\d+)")
_START = re.compile(rb'\s*\{\s*"(?:step|iteration|global_step|_step|layer|time|loss|router/|moe/)')
#: A number that no double can hold, like 1e400.
_HUGE = re.compile(rb"\d[eE]\+?\d{3}")
_SPECIAL = {"NaN": float("nan"), "nan": float("nan"), "Infinity": float("inf"), "inf": float("inf"),
            "-Infinity": float("-inf"), "-inf": float("-inf")}


@dataclass(slots=True)
class RouterWindow:
    """Router values of one layer, summed over `records` consecutive logged steps.

    `counts` are tokens per expert [E], never changed in place; None where they were not recorded.
    """

    first_step: int
    last_step: int
    first_line: int
    last_line: int
    records: int = 1
    counts: npt.NDArray[np.int64] | None = None
    #: name -> (sum, number of finite values): drop_rate, token_entropy, aux_loss, ...
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, other: RouterWindow) -> None:
        """Append the later window `other` to this one."""
        self.last_step, self.last_line = other.last_step, other.last_line
        self.records += other.records
        if self.counts is None:
            self.counts = other.counts
        elif other.counts is not None and len(self.counts) == len(other.counts):
            self.counts = self.counts + other.counts
        for name, (total, number) in other.sums.items():
            mine = self.sums.get(name, (0.0, 0))
            self.sums[name] = (mine[0] + total, mine[1] + number)

    def copy(self) -> RouterWindow:
        """An independent copy, so that a pure detector may merge windows."""
        return RouterWindow(self.first_step, self.last_step, self.first_line, self.last_line, self.records,
                            self.counts, dict(self.sums))

    def mean(self, name: str) -> float | None:
        """The mean of scalar `name` over the window, or None where it was never measured."""
        total, number = self.sums.get(name, (0.0, 0))
        return total / number if number else None


@dataclass(slots=True)
class RouterLog:
    """One layer's windows in order, at most `MAX_WINDOWS`."""

    windows: list[RouterWindow] = field(default_factory=list)
    _span: int = 1

    def append(self, window: RouterWindow) -> None:
        """Add one record; merges neighbours when the log is full."""
        last = self.windows[-1] if self.windows else None
        if last is not None and last.records < self._span:
            last.add(window)
            return
        if len(self.windows) >= MAX_WINDOWS:
            for left, right in zip(self.windows[::2], self.windows[1::2], strict=True):
                left.add(right)
            self.windows = self.windows[::2]
            self._span *= 2
        self.windows.append(window)

    def rewind(self, step: int) -> None:
        """Drop the windows beyond `step`; one that was merged across it stays, as its parts are no longer known."""
        while self.windows and self.windows[-1].first_step > step:
            self.windows.pop()


@dataclass(kw_only=True)
class MetricsLog(HasSeries):
    """A metrics file: scalar columns by key, router windows by layer, and the first and last step seen.

    `steps_known` is false where records carry no step: they are then numbered from 1, and no step is reported.
    """

    series: dict[str, Series] = field(default_factory=dict)
    routers: dict[int, RouterLog] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    steps_known: bool = True
    #: (line, step) where a record says that training went on after `step`
    resumes: list[tuple[int, int]] = field(default_factory=list)
    #: the columns of the last record, when it held a step and known scalars only: most records are like the one before
    plain: dict[str, Series] = field(default_factory=dict, repr=False)
    nulls: NullLosses = field(default_factory=NullLosses, repr=False)


ARTEFACT = MetricsLog


def sniff(head: bytes, name: str) -> float:
    """Lines that are JSON objects with a step and numbers, or router values."""
    if not head.lstrip().startswith(b"{"):
        return 0.0
    *lines, rest = head.split(b"\n")
    for line in lines[:5] or [rest]:
        try:
            record = _decode(line)
        except ValueError:
            continue  # torn, or longer than the head
        if isinstance(record, dict) and _is_record(record):
            if name.endswith((".log", ".txt", ".out", ".err")) and not _routed(record):
                return 0.0  # a console log whose program prints JSON
            return 0.9 if name.endswith(".jsonl") or "metrics" in name else 0.8
        return 0.0
    return 0.5 if name.endswith(".jsonl") and _START.match(head) else 0.0


def named(head: bytes, columns: Sequence[str]) -> float:
    """Lines of JSON objects that hold a key which the user has named, with or without a step."""
    try:
        record = _decode(head.split(b"\n", 1)[0])
    except ValueError:
        return 0.0
    return 0.95 if isinstance(record, dict) and not set(columns).isdisjoint(record) else 0.0


def _is_record(record: dict[str, Any]) -> bool:
    if isinstance(record.get("span"), str) or isinstance(record.get("event"), str):
        return False  # another file of the run directory
    numbers = sum(isinstance(value, (int, float)) and not isinstance(value, bool) for value in record.values())
    special = any(value in _SPECIAL for value in record.values() if isinstance(value, str))
    return _routed(record) or (any(key in record for key in STEP_KEYS) and (numbers >= 2 or special))


def _routed(record: dict[str, Any]) -> bool:
    return any(_ROUTER_KEY.fullmatch(key) for key in record) or any(
        key in values for _, values in _routers(record) for key in COUNT_KEYS)


def read(source: Source) -> MetricsLog | Unreadable:
    """The whole file in one pass. Lines that are no record are counted and stated in `problem`."""
    result = MetricsLog(path=source.path, format=NAME, bytes=source.bytes, lines=0)
    bad: list[int] = []
    number, records, torn = 0, 0, False
    try:
        with source.open() as stream:
            for number, line, whole in _lines(stream):
                if not line.strip():
                    continue
                try:
                    if add_line(result, line, number, records):
                        records, torn = records + 1, False
                except (ValueError, OverflowError):
                    bad.append(number)
                    torn = not whole
    except ArtefactError as error:
        result.problem, result.problem_severity = f"{error}; read up to line {number:,}", "warning"
    result.lines = number
    if not records:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, lines=number,
                          problem=result.problem or "holds no metric record")
    if bad and not result.problem:
        result.problem = _bad_lines(bad, torn)
        result.problem_severity = "info" if bad == [number] else "warning"
    return result


def add_line(result: MetricsLog, line: bytes, number: int, records: int) -> bool:
    """Add the line of this number to `result`, which holds `records` records so far; whether it was one more.

    Raises ValueError or OverflowError for what is no record.
    """
    record = _decode(line)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    if record.get("event") == "resume":
        _rewind(result, record.get("step"), number)
        return False
    _take(result, record, number, records)
    return True


def _rewind(result: MetricsLog, step: object, line: int) -> None:
    """Training continued after `step`: later lines so far are superseded (docs/run-directory.md)."""
    if isinstance(step, int) and not isinstance(step, bool):
        result.resumes.append((line, step))
        for series in result.series.values():
            series.rewind(step)
        for router in result.routers.values():
            router.rewind(step)


def _bad_lines(bad: list[int], torn: bool) -> str:
    if len(bad) == 1:
        return f"line {bad[0]:,} is {'cut off' if torn else 'not a JSON object'}"
    return f"{len(bad):,} lines are not JSON objects, the first is line {bad[0]:,}"


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(1-based number, line, ends with a newline); of an over-long line only the first `MAX_LINE_BYTES`."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        whole = tail = line.endswith(b"\n")
        yield number, line, whole
        while not tail and (rest := stream.readline(MAX_LINE_BYTES)):
            tail = rest.endswith(b"\n")


def _decode(line: bytes) -> Any:
    """`line` as JSON. Raises ValueError for anything that is not, however hostile."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        if b"NaN" not in line and b"Infinity" not in line and not _HUGE.search(line):
            raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        return json.loads(line)  # Python's own writer leaves bare NaN tokens; 1e400 is infinite to it, as to all others
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _plain(result: MetricsLog, record: dict[str, Any]) -> dict[str, Series]:
    """The columns of a record that holds "step" and known scalars, and nothing else; empty where it holds more."""
    keys = [key for key in record if key != "step"]
    if len(keys) == len(record) or any(key not in result.series or _ROUTER_KEY.fullmatch(key) for key in keys):
        return {}
    return {key: result.series[key] for key in keys}


def _take_plain(result: MetricsLog, record: dict[str, Any], line: int) -> bool:
    """Add a record with the keys of the one before when all its values are numbers; False when it is not so."""
    plain = result.plain
    step = record.get("step")
    if len(record) != len(plain) + 1 or type(step) is not int or abs(step) > 2**53 or not result.steps_known:
        return False
    for key, value in record.items():
        if key != "step" and (key not in plain or type(value) is not float and type(value) is not int):
            return False
    result.last_step = step
    for key, value in record.items():
        if key != "step":
            column = plain[key]
            column.steps.append(step)
            column.lines.append(line)
            column.values.append(value)
    return True


def _take(result: MetricsLog, record: dict[str, Any], line: int, index: int) -> None:
    if result.plain and _take_plain(result, record, line):
        return
    step = next((record[key] for key in STEP_KEYS if isinstance(record.get(key), (int, float))), None)
    if isinstance(step, bool) or step is None or step != step or abs(step) > 2**53:
        step, result.steps_known = index + 1, False
    step = int(step)
    result.first_step = step if result.first_step is None else result.first_step
    result.last_step = step
    nulls = result.nulls.of(record)
    for layer, fields in _routers(record):
        _take_router(result, layer, fields, step, line)
    for key, value in record.items():
        if key in STEP_KEYS or _ROUTER_KEY.fullmatch(key):
            continue
        if isinstance(value, str):
            value = _SPECIAL.get(value)
        elif value is None and key in nulls:
            value = float("nan")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            column = result.series.get(key)
            if column is None:
                if len(result.series) >= MAX_KEYS:
                    raise ValueError("more keys than a metrics file has")
                column = result.series[key] = Series()
            column.add(step, line, float(value))
    result.plain = _plain(result, record)


def _routers(record: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(layer, values) for each layer that a record speaks of, in any of the shapes above."""
    flat: dict[int, dict[str, Any]] = {}
    for key, value in record.items():
        if match := _ROUTER_KEY.fullmatch(key):
            flat.setdefault(int(match[1][:9]), {})[match[2]] = value
    yield from flat.items()
    if any(key in record for key in COUNT_KEYS):
        layer = record.get("layer", record.get("layer_idx", 0))
        if (match := _LAYER_KEY.fullmatch(str(layer))) is not None:
            yield int(match[1][:9]), record
    layers = record.get("layers")
    nested: Iterable[tuple[Any, Any]] = ()
    if isinstance(layers, dict):
        nested = layers.items()
    elif isinstance(layers, list):
        nested = enumerate(layers)
    for layer, values in nested:
        if isinstance(values, dict) and (match := _LAYER_KEY.fullmatch(str(layer))) is not None:
            yield int(match[1][:9]), values


def _take_router(result: MetricsLog, layer: int, fields: dict[str, Any], step: int, line: int) -> None:
    counts = next((fields[key] for key in COUNT_KEYS if isinstance(fields.get(key), list)), None)
    sums: dict[str, tuple[float, int]] = {}
    for key, value in fields.items():
        if isinstance(value, str):
            value = _SPECIAL.get(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf"):
            sums[key] = (float(value), 1)
    window = RouterWindow(step, step, line, line, 1, _counts(counts), sums)
    result.routers.setdefault(layer, RouterLog()).append(window)


def _counts(values: list[Any] | None) -> npt.NDArray[np.int64] | None:
    """`values` as tokens per expert, or None for anything that cannot be that."""
    import numpy as np

    if not values or len(values) > MAX_EXPERTS:
        return None
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    if found.ndim != 1 or found.dtype.kind not in "if" or not ((found >= 0) & (found < 2**40)).all():
        return None
    return np.rint(found).astype(np.int64)
