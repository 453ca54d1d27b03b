"""One trial as a job of its own: started through the launcher, bounded in time, and gone when it is over.

The job is a child in a session of its own, so that a Ctrl-C reaches this process alone, which then ends the job. When
this process is killed, the kernel sends the launcher SIGTERM; what even that leaves behind is found by the trial's
folder in its command line and ended before the trial is repeated.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdtrain.config import to_toml
from pdtrain.config.schema import Run
from pdtrain.recorder.environment import write_config

#: Seconds between two looks at a job.
POLL_SECONDS = 0.1
#: Variables of a surrounding job that a trial must not take for its own.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: its exit status, None when its time was up; the seconds it took, and what it said last."""

    status: int | None
    seconds: float
    said: str


def prepare(run: Run, folder: Path, ranks: int) -> list[str]:
    """The command that trains `run` in the fresh `folder`, rid of what an earlier attempt left there.

    Raises:
        OSError: the folder cannot be written.
    """
    end_leftovers(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = write_config(folder, to_toml(run))
    return [sys.executable, "-P", "-m", "pdtrain.cli", "train", str(config), "--nproc", str(ranks),
            "--run-dir", str(folder / "run")]  # fmt: skip


def execute(command: list[str], folder: Path, *, timeout: float, tick: Callable[[float], None]) -> Ended:
    """Run `command`, whose console goes to `folder`. `tick(seconds)` is called while it runs.

    Raises:
        KeyboardInterrupt: after the job was ended.
        OSError: the folder cannot be written.
    """
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    began = time.monotonic()
    with (folder / "console.log").open("wb") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            while job.poll() is None:
                taken = time.monotonic() - began
                if taken > timeout:
                    break
                tick(taken)
                time.sleep(POLL_SECONDS)
        finally:
            with _undisturbed():
                status = job.poll()
                end_tree(job.pid)
                job.wait()
                end_leftovers(folder)
    return Ended(status, time.monotonic() - began, last_line(folder / "console.log"))


def _die_with_parent() -> None:
    """In the child before it becomes the launcher: SIGTERM when this process dies (Linux only)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # 1: PR_SET_PDEATHSIG


def end_tree(pid: int) -> None:
    """Kill a process and all that it started, and wait until they are gone."""
    try:
        top = psutil.Process(pid)
        with contextlib.suppress(psutil.Error):
            top.suspend()  # it must not start a rank while its ranks are counted
        found = [*top.children(recursive=True), top]
    except psutil.Error:
        return
    _kill(found)


def end_leftovers(folder: Path) -> None:
    """Kill what an earlier attempt in `folder` left: processes of ours whose command line names its run directory."""
    run_dir = str(folder / "run")
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if run_dir in words and "pdtrain.cli" in words and process.pid != os.getpid():
            found.append(process)
    _kill(found)


def _kill(found: list[psutil.Process]) -> None:
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=10)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave half of a job behind."""
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def last_line(path: Path) -> str:
    """The last line that says something, without the pointers to other commands."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 8192))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    said = [text.strip() for text in lines if text.strip() and "pdtrain diag postmortem" not in text]
    return said[-1].removeprefix("pdtrain: ")[:300] if said else ""
