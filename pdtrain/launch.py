"""Start a job of several processes on this machine: torchrun's own agent, in this process.

The agent is used through its public interface (`torch.distributed.launcher.api`), as `torchrun --standalone` does, so
that its verdict - which rank failed first, with which status - comes back as a value and not as a page of traceback.

Console: rank 0 writes to this terminal. The other ranks' streams, every rank's error.json and the agent's own log are
under `<run_dir>/logs/`, where `pdtrain diag postmortem` finds them.

Signals: SIGINT, SIGTERM and SIGHUP become SIGTERM for every rank, which then saves and exits; the agent would kill them
after 30 s. A second one kills.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from diag.errors import UsageError
from pdtrain.config.mistakes import printable
from pdtrain.recorder.environment import prepare_environment

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: torchrun's own shape, so that the same signatures read it.
LINE = "%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s:%(lineno)d] %(message)s"
#: After a rank has failed the others cannot finish a collective, hence not save: this is for their dumps.
GRACE_SECONDS = 10
INTERRUPTED = 128 + signal.SIGINT


def launch(
    arguments: Sequence[str], *, processes: int, run_dir: Path, threads: int = 1, flight_recorder_entries: int = 2000,
    again: Callable[[int], Sequence[str] | None] = lambda status: None,
) -> int:
    """Run `python ARGUMENTS` as `processes` ranks on this machine and wait for them.

    `again` is asked after every end that no signal caused, with the job's exit status: the arguments with which as many
    ranks are to be started once more (pools that regroup), or None.

    Returns the exit status of the job: 0, or that of the rank that failed first (128 + n for signal n), or 130 when it
    was interrupted and all ranks ended well.

    Raises:
        UsageError: the log directory cannot be made.
    """
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {run_dir}: {error.strerror}") from None
    with _environment(run_dir, threads, flight_recorder_entries), _agent_log(logs / "launcher.log") as log:
        with _forwarding() as received:
            following: Sequence[str] | None = arguments
            status = 0
            while following is not None and not received:
                status = _once(following, processes, run_dir, log)
                following = None if received else again(status)
        return INTERRUPTED if status == 0 and signal.SIGINT in received else status


def _once(arguments: Sequence[str], processes: int, run_dir: Path, log: logging.Logger) -> int:
    """One start of the job; its exit status, explained where it failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        # torchrun names its log folder after it; `diag` tells the starts of one run apart by the time.
        run_id=f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:4]}",
        role="default",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
        # Rank 0 keeps the terminal, so that its progress line stays alive.
        logs_specs=DefaultLogsSpecs(
            log_dir=str(run_dir / "logs" / "torchrun"), redirects=dict.fromkeys(range(1, processes), Std.ALL)
        ),
        signals_to_handle="SIGQUIT",  # the others are ours
        shutdown_timeout=GRACE_SECONDS,
    )
    log.warning("pdtrain starts %d rank%s", processes, "s" if processes > 1 else "")
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except json.JSONDecodeError:  # a rank died while its error.json could not be written: a full disk
        log.error("a rank failed and left a damaged error.json")
        print(f"pdtrain: a rank failed; is the disk of {run_dir} full?", file=sys.stderr)
        return 1
    except ChildFailedError as failure:
        log.error("%s", failure)
        return _explain(failure, run_dir)
    return 0


def _explain(failure: Any, run_dir: Path) -> int:
    """Say in one line who failed first; the status of that rank."""
    rank, first = failure.get_first_failure()
    status = int(first.exitcode)
    if status < 0:
        how, status = f"was killed by {signal.Signals(-status).name}", 128 - status
    else:
        how = f"ended with exit status {status}"
    if rank == 0 and status == UsageError.exit_status:
        return status  # rank 0 has said why, on this terminal
    said = "" if rank == 0 else _last_line(run_dir, rank)
    print(f"pdtrain: rank {rank} failed first: it {how}{said and f'; its last line: {said}'}", file=sys.stderr)
    print(f"pdtrain: for the cause: pdtrain diag postmortem {run_dir}", file=sys.stderr)
    return status


def _last_line(run_dir: Path, rank: int) -> str:
    """The last line that `rank` wrote to stderr in the newest attempt."""
    files = (run_dir / "logs" / "torchrun").glob(f"*/attempt_*/{rank}/stderr.log")
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return ""
    with newest.open("rb") as stream:
        stream.seek(max(0, newest.stat().st_size - 4096))
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return printable(lines[-1].strip()[:200]) if lines else ""


@contextmanager
def _environment(run_dir: Path, threads: int, entries: int) -> Iterator[None]:
    """The variables that every rank inherits, in force only while the job runs."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # a killed rank's last lines are the evidence
    prepare_environment(run_dir, entries)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _LikeTorchrun(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        module = logging.makeLogRecord(record.__dict__ | {"name": f"{record.name.replace('.', '/')}.py"})
        return super().format(module)


@contextmanager
def _agent_log(path: Path) -> Iterator[logging.Logger]:
    """The agent's log goes to a file instead of the terminal."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_LikeTorchrun(LINE, "%m%d %H:%M:%S"))
    propagate, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
        handler.close()


@contextmanager
def _forwarding() -> Iterator[list[signal.Signals]]:
    """Pass stop signals on to the ranks; yields the list of those received."""
    received: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        ranks = psutil.Process().children(recursive=bool(received))
        for process in ranks:
            try:
                process.send_signal(signal.SIGKILL if received else signal.SIGTERM)
            except psutil.NoSuchProcess:
                continue
        if not received:
            print("pdtrain: stopping: the ranks save and exit; once more to kill them", file=sys.stderr)
        received.append(signal.Signals(number))

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
