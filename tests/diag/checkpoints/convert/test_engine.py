"""Interrupted, it goes on; killed, there is nothing or a temporary folder; what it writes is what it read."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diag.checkpoints.convert import engine
from diag.checkpoints.convert.reshard import Done, Limits, Options, Wish, reshard
from diag.errors import ArtefactError, UsageError
from tests.diag.checkpoints.convert.samples import mixtral, read_all, write_hf

ROOT = str(Path(__file__).resolve().parents[4])
#: Writes slowly, so that a signal lands in the middle.
SLOW = """
import sys, time
from diag.checkpoints.convert import engine
fast = engine._pwrite
def slow(*arguments):
    time.sleep(0.004)
    fast(*arguments)
engine._pwrite = slow
print("ready", flush=True)
from pdtrain.cli import main
main(sys.argv[1:])
"""


def convert(source: Path, target: Path, progress: Any = None, **options: Any) -> Done:
    return reshard(Wish(source=source, destination=target, options=Options(to="dcp", ranks=3), **options), progress)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", mixtral())


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Stop(Exception):
    pass


def interrupted(source: Path, target: Path, share: float) -> None:
    def stop(done: int, total: int, phase: str) -> None:
        if phase == "writing" and done > share * total:
            raise Stop

    with pytest.raises(Stop):
        convert(source, target, stop, limits=Limits(1))
    assert not target.exists()


def test_an_interrupted_conversion_goes_on_where_it_stopped(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole")
    interrupted(source, tmp_path / "cut", 0.6)
    result = convert(source, tmp_path / "cut").result
    assert result is not None and result.resumed > 0.5 * (result.resumed + result.written)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert not list(tmp_path.glob("*.reshard.tmp"))


def test_what_was_lost_of_the_first_part_is_written_again(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole")
    interrupted(source, tmp_path / "cut", 0.6)
    shard = tmp_path / "cut.reshard.tmp" / "__0_0.distcp"
    damaged = bytearray(shard.read_bytes())
    damaged[2000:2400] = bytes(400)  # a page that never reached the disk
    shard.write_bytes(damaged)
    assert convert(source, tmp_path / "cut").result.resumed > 0
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.parametrize("change", ["source", "options", "journal"])
def test_a_leftover_of_another_conversion_is_not_taken_over(change: str, source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "cut", 0.6)
    if change == "source":
        os.utime(source / "model.safetensors", (1, 1))
    elif change == "journal":
        (tmp_path / "cut.reshard.tmp" / engine.JOURNAL).write_bytes(b"\0\xff nonsense")
    ranks = 2 if change == "options" else 3
    done = reshard(Wish(source=source, destination=tmp_path / "cut", options=Options(to="dcp", ranks=ranks)))
    assert done.result is not None and done.result.restarted and done.result.resumed == 0
    assert not (tmp_path / "cut" / engine.JOURNAL).exists()
    reshard(Wish(source=source, destination=tmp_path / "new", options=Options(to="dcp", ranks=ranks)))
    assert files(tmp_path / "cut") == files(tmp_path / "new")


def test_killed_as_the_journal_was_gone_another_conversion_leaves_nothing_of_it(
        source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(folder: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(engine, "sync_folder", kill)
        convert(source, tmp_path / "cut")
    assert not (tmp_path / "cut.reshard.tmp" / engine.JOURNAL).exists()
    for target in (tmp_path / "cut", tmp_path / "new"):
        reshard(Wish(source=source, destination=target, options=Options(to="universal")))
    assert files(tmp_path / "cut") == files(tmp_path / "new")


def test_a_disk_that_writes_something_else_is_found_out(source: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = engine._pwrite, [0]

    def lying(descriptor: int, data: Any, at: int) -> None:
        calls[0] += 1
        raw = bytearray(data)
        if calls[0] == 40:
            raw[len(raw) // 2] ^= 4
        honest(descriptor, raw, at)

    monkeypatch.setattr(engine, "_pwrite", lying)
    with pytest.raises(ArtefactError, match="reads back differently"):
        convert(source, tmp_path / "out", limits=Limits(1))
    assert not (tmp_path / "out").exists()


def test_refusals_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("x")
    with pytest.raises(UsageError, match="exists; nothing is overwritten"):
        convert(source, tmp_path / "there")
    with pytest.raises(UsageError, match="there is no directory"):
        convert(source, tmp_path / "no" / "such")
    with pytest.raises(UsageError, match="inside the source"):
        convert(source, source / "out")
    with pytest.raises(UsageError, match="--max-memory 20 MB is too little"):
        convert(source, tmp_path / "out", limits=Limits(2, 20_000_000))
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real[0], 1, real[2], 5, 5, *real[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(UsageError, match=r"needs 0\.3 MB, 0\.0 MB are free"):
            convert(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "there"]
    (tmp_path / "out.reshard.tmp").mkdir()
    with (tmp_path / "out.reshard.tmp" / engine.JOURNAL).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another pdtrain is writing there"):
            convert(source, tmp_path / "out")


def test_an_empty_destination_is_taken_and_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", dry_run=True)
    assert done.result is None and done.plan.total > 0 and [p.name for p in tmp_path.iterdir()] == ["hf"]
    (tmp_path / "out").mkdir()
    assert convert(source, tmp_path / "out").result.written > 0
    assert sum(len(data) for data in files(tmp_path / "out").values()) == done.plan.total


def test_slabs_smaller_than_tensors_change_nothing(source: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "whole")
    monkeypatch.setattr(engine, "SLAB", 52)
    monkeypatch.setattr(engine, "_LEAST", 1)
    convert(source, tmp_path / "small")
    assert files(tmp_path / "small") == files(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_random_moments_there_is_nothing_or_all_of_it(number: int, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole")
    moments = random.Random(number)
    target = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, "diag", "reshard", str(source), str(target), "--to", "dcp", "--ranks", "3"]
    for _ in range(3):
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=os.environ | {"PYTHONPATH": ROOT})
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(moments.uniform(0.1, 0.6))
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        if child.returncode == 0:
            break  # it was through already
        assert not target.exists()
        if number == signal.SIGINT:
            assert child.returncode in (130, -signal.SIGINT) and "Traceback" not in said
    if not target.exists():
        convert(source, target)
    assert files(target) == files(tmp_path / "whole")
    assert read_all(target).keys() == read_all(source).keys()
