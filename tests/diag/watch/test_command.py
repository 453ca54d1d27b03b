"""The command as its user has it: output, hooks, signals, exit status."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diag.watch.hooks import Hooks
from diag.watch.screen import screen, sparkline
from tests.diag.watch.helpers import Watched, append, events, metrics

WATCH = [sys.executable, "-m", "pdtrain.cli", "diag", "watch"]
WAIT = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append(tmp_path / "run" / "metrics.jsonl", metrics(range(1, 60)))
    return tmp_path / "run"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []
    yield children
    for child in children:
        child.kill()
        child.communicate()


def once(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WATCH, *map(str, arguments)], capture_output=True, text=True, timeout=WAIT)


def until(happened: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_once_prints_what_stands_and_its_exit_status(run: Path) -> None:
    good = once(run, "--once")
    assert (good.returncode, good.stdout) == (0, ""), good.stderr
    append(run / "metrics.jsonl", metrics(range(60, 63), loss="NaN"))
    bad = once(run, "--once")
    assert bad.returncode == 1
    assert "loss_nan" in bad.stdout and "pdtrain playbook show loss-nan" in bad.stdout
    (alarm,) = [json.loads(line) for line in once(run, "--once", "--json-lines").stdout.splitlines()]
    assert (alarm["event"], alarm["cause"], alarm["where"]["step"]) == ("raised", "loss_nan", 60)
    assert {"time", "role", "severity", "confidence", "summary", "evidence", "playbook", "fix",
            "numbers"} <= alarm.keys()


def test_once_names_what_it_could_not_read(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "late.jsonl.gz"
    broken.write_bytes(b"\x1f\x8b broken")
    done = once(run, broken, "--once")
    assert done.returncode == 0 and f"not read: {broken}: " in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments, words", [
    (["no-such-run"], "no such file"), (["RUN", "--once", "--forever"], "--once"), (["RUN", "--exec", "'"], "--exec"),
    (["RUN", "--webhook", "file:///etc/passwd"], "http"), (["EMPTY", "--once"], "nothing in it")])
def test_wrong_usage_is_one_line(run: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "empty").mkdir()
    done = once(*[str(run) if a == "RUN" else str(tmp_path / "empty") if a == "EMPTY" else a for a in arguments])
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_alarms_go_to_a_pipe_a_command_and_a_failing_one_and_ctrl_c_ends(
        run: Path, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    taken = tmp_path / "taken; touch shell"
    script = f"import sys; open({str(taken)!r}, 'ab').write(sys.stdin.buffer.read())"
    child = subprocess.Popen(
        [*WATCH, str(run), "--json-lines", "--interval", "0.1", "--exec", shlex.join([sys.executable, "-c", script]),
         "--exec", "false", "--exec", "/no/such/command"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.append(child)
    time.sleep(2)
    append(run / "metrics.jsonl", metrics(range(60, 61), loss="NaN"))
    assert child.stdout is not None
    alarm = json.loads(child.stdout.readline())
    assert (alarm["event"], alarm["cause"]) == ("raised", "loss_nan")
    until(taken.exists)
    until(lambda: taken.read_text().endswith("\n"))
    assert json.loads(taken.read_text()) == alarm
    assert not (tmp_path / "shell").exists()
    child.send_signal(signal.SIGINT)
    rest, said = child.communicate(timeout=WAIT)
    assert child.returncode == 1 and rest == ""
    assert said.count("--exec false: exit status 1") == 1 and "/no/such/command: cannot be started" in said
    assert "Traceback" not in said


def test_sigterm_of_a_healthy_watch_is_0(run: Path, started: list[subprocess.Popen[str]]) -> None:
    child = subprocess.Popen([*WATCH, str(run), "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    started.append(child)
    time.sleep(3)
    child.send_signal(signal.SIGTERM)
    out, said = child.communicate(timeout=WAIT)
    assert (child.returncode, out, said) == (0, "", "")


def test_a_finished_run_ends_the_watch(run: Path) -> None:
    append(run / "events" / "rank_0.jsonl", events(0, range(1, 60), start=True))
    append(run / "events" / "rank_0.jsonl", '{"event":"end","time":1,"ok":true}\n')
    done = once(run, "--interval", "0.1")
    assert done.returncode == 0 and "the run has finished" in done.stderr


def test_webhooks_get_json_and_a_dead_one_is_named_once_without_its_secret() -> None:
    got: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(500 if len(got) > 1 else 200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said: list[str] = []
    hooks = Hooks([], [f"http://127.0.0.1:{server.server_port}/x?token=secret", "http://127.0.0.1:1/y?token=secret"],
                  said.append)
    for number in range(4):
        hooks.send(b'{"number": %d}' % number)
    hooks.close()
    server.shutdown()
    server.server_close()
    assert got == [("application/json", {"number": number}) for number in range(4)]
    assert len(said) == 2 and any("500" in text for text in said) and "secret" not in "".join(said)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_screen_fits_and_shows_text_as_text(tmp_path: Path, width: int) -> None:
    path = tmp_path / "[red]run"
    append(path / "metrics.jsonl", metrics(range(1, 90), loss={s: 3.0 - s / 100 for s in range(1, 80)}))
    append(path / "train.log", "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.\x1b[2J\n")
    watched = Watched(path)
    watched.ticks(4)
    console = Console(width=width, record=True, file=open(os.devnull, "w"), markup=False, highlight=False)  # noqa: SIM115,PTH123
    console.print(screen(watched.watch, watched.now, width, str(path)))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert "cuda_oom" in text and "\x1b" not in text and "loss" in text
    assert "pdtrain playbook show" in text or width < 50


def test_sparklines() -> None:
    assert sparkline([1, 2, 3], 3) == "▁▅█" or sparkline([1, 2, 3], 3) == "▁▄█"
    assert sparkline([1.0, float("nan"), 3.0], 3)[1] == "×"
    assert sparkline([5.0] * 100, 10) == "▁" * 10
    assert sparkline([], 10) == "" and sparkline([float("nan")], 10) == "×"
    assert len(sparkline(list(range(1000)), 17)) == 17


def test_a_command_that_hangs_does_not_outlive_the_watch(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hooks = Hooks([[sys.executable, "-c", code]], [], complain=lambda text: None)
    hooks.send(b"{}\n")
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    hooks.close(0.1)
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.02)
