"""Metric records in all their shapes, whole, cut and hostile."""

from __future__ import annotations

import json
import math

import pytest

from diag.artefacts import Unreadable, memory_source, recognise
from diag.artefacts import metrics as reader
from diag.artefacts.metrics import MetricsLog
from diag.errors import ArtefactError


def lines(*records: object) -> bytes:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()


def read(data: bytes) -> MetricsLog | Unreadable:
    return reader.read(memory_source(data, "metrics.jsonl"))


def whole(data: bytes) -> MetricsLog:
    log = read(data)
    assert isinstance(log, MetricsLog)
    return log


def test_scalars_become_columns_with_their_lines() -> None:
    log = whole(lines({"step": 10, "loss": 2.5, "grad_norm/router": 0.1}, {"step": 20, "loss": 2.25, "note": "x"}))
    loss = log.series["loss"]
    assert (list(loss.steps), list(loss.lines), list(loss.values)) == ([10, 20], [1, 2], [2.5, 2.25])
    assert (log.first_step, log.last_step, log.lines, log.problem) == (10, 20, 2, None)
    assert "note" not in log.series and list(log.series["grad_norm/router"].steps) == [10]


def test_nan_as_text_and_as_a_bare_token() -> None:
    log = whole(lines({"step": 1, "loss": "NaN"}, '{"step": 2, "loss": NaN}', '{"step": 3, "loss": -Infinity}',
                      {"step": 4, "loss": "Infinity"}))
    values = list(log.series["loss"].values)
    assert all(map(math.isnan, values[:2])) and values[2:] == [-math.inf, math.inf] and log.problem is None


@pytest.mark.parametrize("records", [
    [{"step": s, "router/3/counts": [s, 1], "router/3/drop_rate": 0.5} for s in (1, 2)],
    [{"step": s, "layer": 3, "counts": [s, 1], "drop_rate": 0.5} for s in (1, 2)],
    [{"iteration": s, "layer": "layers.3", "tokens_per_expert": [s, 1], "drop_rate": 0.5} for s in (1, 2)],
    [{"global_step": s, "layers": {"3": {"counts": [s, 1], "drop_rate": 0.5}}} for s in (1, 2)],
    [{"_step": s, "moe/layer_3/tokens_per_expert": [s, 1.0], "moe/layer_3/drop_rate": 0.5} for s in (1, 2)],
])
def test_router_values_in_any_shape(records: list[dict]) -> None:
    data = lines(*records)
    assert recognise(memory_source(data, "router.jsonl")) is reader
    (window, second) = whole(data).routers[3].windows
    assert (window.counts.tolist(), window.mean("drop_rate")) == ([1, 1], 0.5)
    assert (window.first_step, window.first_line) == (1, 1)
    assert (second.counts.tolist(), second.first_step) == ([2, 1], 2)


def test_records_without_a_step_are_numbered_and_say_so() -> None:
    log = whole(lines({"layer": 0, "counts": [1, 2]}, {"layer": 0, "counts": [3, 4]}))
    assert not log.steps_known and [w.first_step for w in log.routers[0].windows] == [1, 2]


def test_a_torn_last_line_is_stated_and_normal() -> None:
    log = whole(lines({"step": 1, "loss": 1.0}) + b'{"step": 2, "lo')
    assert (log.problem, log.problem_severity, log.last_step) == ("line 2 is cut off", "info", 1)


def test_damage_in_the_middle_is_a_warning() -> None:
    log = whole(lines({"step": 1, "loss": 1.0}, "garbage", '["no", "record"]', {"step": 2, "loss": 1.0}))
    assert log.problem == "2 lines are not JSON objects, the first is line 2"
    assert (log.problem_severity, log.last_step) == ("warning", 2)


@pytest.mark.parametrize("hostile", [
    b"[" * 100_000 + b"\n", b'{"step": 1, "x": ' + b'{"a":' * 50_000 + b"\n", b"\xff\xfe\0\0" * 100 + b"\n",
    b'{"step": NaN, "loss": 1}\n', b'{"step": 1e308, "router/1/counts": [1e308, -5, true, null]}\n',
    b'{"step": true, "router/99999999999999/counts": [1]}\n', b'{"router/1/counts": "\\ud800", "step": 1}\n',
])
def test_hostile_lines_never_raise(hostile: bytes) -> None:
    log = read(lines({"step": 1, "loss": 1.0}) + hostile + lines({"step": 2, "loss": 1.0}))
    assert isinstance(log, MetricsLog) and log.last_step == 2


def test_nothing_readable_is_unreadable() -> None:
    assert isinstance(read(b"\n\n"), Unreadable)
    assert isinstance(read(b"hello\nworld\n"), Unreadable)


def test_an_archive_that_breaks_off_keeps_what_came_before() -> None:
    class Breaks:
        def __init__(self) -> None:
            self.parts = [lines({"step": 1, "loss": 1.0})]

        def readline(self, limit: int) -> bytes:
            if self.parts:
                return self.parts.pop()
            raise ArtefactError("compressed data ends early")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    source = memory_source(b"", "metrics.jsonl")
    object.__setattr__(source, "open", Breaks)
    log = reader.read(source)
    assert isinstance(log, MetricsLog) and log.last_step == 1
    assert log.problem_severity == "warning" and "ends early" in str(log.problem)


@pytest.mark.parametrize("data", [
    b'{"span": "forward", "step": 1, "start": 1.0, "seconds": 0.1}\n', b'{"event": "start", "step": 1, "time": 1.0}\n',
    b'{"name": "config", "layers": 4}\n', b"step 1 loss 2.0\n", b"", b"{}\n",
    b'{"step": 1, "message": "hello"}\n{"step": 2, "message": "world"}\n',
])
def test_other_files_are_not_metrics(data: bytes) -> None:
    assert reader.sniff(data, "x.jsonl") == 0.0


def test_steps_done_again_after_a_resume_count_once() -> None:
    """The lines beyond the step that the run went back to are superseded, and the mark itself is no record."""
    rows = [{"step": step, "loss": 10.0 - step, "router/0/counts": [step, 1]} for step in (1, 2, 3)]
    again = [{"step": step, "loss": 20.0 - step, "router/0/counts": [step, 2]} for step in (2, 3, 4)]
    log = whole(lines(*rows, {"event": "resume", "time": 1.0, "step": 1}, *again))
    assert list(log.series["loss"].steps) == [1, 2, 3, 4]
    assert list(log.series["loss"].values) == [9.0, 18.0, 17.0, 16.0]
    assert [window.first_step for window in log.routers[0].windows] == [1, 2, 3, 4]
    assert log.last_step == 4
