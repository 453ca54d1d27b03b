"""The line of progress."""

from __future__ import annotations

import io
import math

from pdtrain.recorder.progress import Progress, describe, time_shares

ROW = {
    "step": 120, "time": 0.0, "loss": 2.13449, "tokens_per_second": 31234.5, "mfu": 0.4123, "step_seconds": 2.0,
    "time/attention": 0.8, "time/experts": 1.0, "time/router": 0.02, "time/experts/forward": 0.4,
}


def test_the_whole_line():
    assert describe(ROW | {"val_bits_per_byte": 1.98}, 300, 83.4) == (
        "step 120/300  loss 2.134  val 1.98 bit/byte  31.2k tokens/s  MFU 41.2%  experts 50% attention 40% router 1%"
        "  1:23 left"
    )


def test_unknown_numbers_are_said_or_left_out():
    assert describe({"step": 1, "loss": "NaN"}, 9) == "step 1/9  loss NaN  MFU n/a"
    assert describe({"step": 9, "tokens_per_second": math.inf, "val_loss": 1.25}, 9, 0.0) == (
        "step 9/9  val loss 1.25  inf tokens/s  MFU n/a")
    assert describe({"step": 1, "tokens_per_second": 2.5e7}, 9, 7384.0) == (
        "step 1/9  25.0M tokens/s  MFU n/a  2:03:04 left")


def test_shares_of_the_step():
    assert time_shares(ROW) == {"experts": 0.5, "attention": 0.4, "router": 0.01}
    assert time_shares({"time/a": 1.0, "time/b": 3.0}) == {"b": 0.75, "a": 0.25}
    assert time_shares({"loss": 1.0}) == {}


def feed(progress, steps, seconds=0.5):
    with progress:
        progress.note("hello [bold]")
        for step in range(1, steps + 1):
            progress.update({"step": step, "time": step * seconds, "loss": 1.0 / step})


def test_a_pipe_gets_the_first_and_the_last_line_and_no_control_characters():
    out = io.StringIO()
    feed(Progress(50, stream=out), 50)
    assert out.getvalue().splitlines() == [
        "hello [bold]", "step 1/50  loss 1  MFU n/a", "step 50/50  loss 0.02  MFU n/a"]


def test_time_left_comes_from_the_recent_pace():
    out = io.StringIO()
    feed(Progress(100, stream=out, plain_seconds=0.0), 60)
    assert out.getvalue().splitlines()[-1].endswith("0:20 left")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_changes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(50, stream=out)
    feed(progress, 50)
    assert "step 50/50" in out.getvalue() and "hello [bold]" in out.getvalue()
    assert "\x1b" in out.getvalue()


def test_quiet_when_told_or_not_enabled():
    for options in ({"mode": "quiet"}, {"enabled": False}):
        out = Terminal()
        progress = Progress(5, stream=out, **options)
        feed(progress, 5)
        assert out.getvalue() == "" and progress.step == 5
