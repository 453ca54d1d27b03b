"""Whole lines: after kill -9, on a full disk, beyond a file size limit."""

from __future__ import annotations

import random
import signal
import subprocess
import time

import pytest

from pdtrain.recorder.files import LineFile, write_atomically
from tests.recorder.helpers import events, rows, run, start, wait_for

WRITER = """
    import sys
    from pdtrain.recorder import Recorder
    recorder = Recorder(sys.argv[1], tensorboard=False)
    step = int(sys.argv[2])
    while True:
        with recorder.span("forward"):
            pass
        recorder.log(step, loss=1.0 / step, counts=list(range(int(sys.argv[3]))))
        step += 1
"""


@pytest.mark.parametrize("length", [8, 20_000], ids=["short lines", "lines of 100 kB"])
def test_kill_9_at_random_moments_leaves_whole_lines_and_a_resumed_run_goes_on(tmp_path, length):
    clock = random.Random(length)
    metrics = tmp_path / "metrics.jsonl"
    step, kills = 1, 6
    for _ in range(kills):
        size = metrics.stat().st_size if metrics.exists() else 0
        process = start(WRITER, tmp_path, step, length)
        wait_for(lambda size=size: metrics.exists() and metrics.stat().st_size > size)
        time.sleep(clock.random() * 0.1)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.communicate()
        # SIGKILL in the middle of a line longer than a memory page may cut it: only the last, which has no newline
        text = metrics.read_bytes()
        whole, _, rest = text.rpartition(b"\n")
        assert rest == b"" or length > 1000, rest[:100]
        step = int(whole.rpartition(b"\n")[2].partition(b'"step":')[2].split(b",")[0]) + 1
    done = start(WRITER, tmp_path, step, length)
    wait_for(lambda: metrics.read_bytes().count(b'"resume"') == kills)
    done.send_signal(signal.SIGTERM)
    assert done.wait(30) == -signal.SIGTERM
    done.communicate()
    logged = rows(metrics)
    steps = [row["step"] for row in logged if "event" not in row]
    assert steps == list(range(1, len(steps) + 1)), "each process goes on where the whole lines ended"
    assert len([row for row in logged if row.get("event") == "resume"]) == kills
    assert all(len(row["counts"]) == length for row in logged if "event" not in row)
    rows(tmp_path / "events" / "rank_0.jsonl")


def test_a_cut_tail_is_removed_on_reopening_whatever_it_is(tmp_path):
    path = tmp_path / "lines"
    cases = [(b"", b""), (b"a\nb\n", b"a\nb\n"), (b"a\nb", b"a\n"), (b"torn", b""), (b"a\n\xff\x00", b"a\n")]
    for before, kept in cases:
        path.write_bytes(before)
        lines = LineFile(path)
        lines.write(b"new\n")
        lines.close()
        assert path.read_bytes() == kept + b"new\n"
        assert lines.last_line == (kept.splitlines(keepends=True) or [None])[-1]


def test_an_unwritten_file_is_not_created(tmp_path):
    LineFile(tmp_path / "folder" / "lines").close()
    assert not (tmp_path / "folder").exists()


def test_a_failed_replacement_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "config.toml"
    write_atomically(path, b"old")
    (tmp_path / "config.toml.d").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "config.toml.d", b"new")
    assert path.read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.toml", "config.toml.d"]


FULL = """
    import logging, sys
    from pathlib import Path
    from pdtrain.recorder import Recorder
    {limit}
    recorder = Recorder(sys.argv[1], tensorboard={tensorboard})
    for step in range(1, 2001):
        with recorder.span("forward"):
            pass
        logging.getLogger("pdtrain").info("step %d", step)
        recorder.log(step, loss=1.0, text="x" * 500)
    recorder.event("never")
    recorder.close()
    print("trained", step)
"""


def _whole_up_to_the_limit(run_dir, done):
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 2000\n"
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "recording stops, training goes on" in done.stderr
    steps = [row["step"] for row in rows(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and 0 < len(steps) < 2000
    rows(run_dir / "events" / "rank_0.jsonl")


def test_a_file_that_may_not_grow_stops_the_recording_not_the_run(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    done = run(FULL.format(limit=limit, tensorboard=False), tmp_path)
    _whole_up_to_the_limit(tmp_path, done)
    assert "recording_stopped" in events(tmp_path)


@pytest.mark.root
def test_a_full_disk_stops_the_recording_not_the_run(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        done = run(FULL.format(limit="", tensorboard=True), disk)
        _whole_up_to_the_limit(disk, done)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("trouble", ["a file", "a file inside"])
def test_a_run_directory_that_cannot_be_written_is_one_warning(tmp_path, trouble):
    blocked = tmp_path / "runs"
    blocked.write_text("in the way")
    done = run(FULL.format(limit="", tensorboard=False), blocked if trouble == "a file" else blocked / "mine")
    assert (done.returncode, done.stdout) == (0, "trained 2000\n")
    assert len(done.stderr.splitlines()) == 1, done.stderr
