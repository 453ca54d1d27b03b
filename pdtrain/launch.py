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
import re
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from diag.errors import UsageError
from pdtrain.config.mistakes import printable
from pdtrain.recorder.environment import prepare_environment
from pdtrain.restart import LAUNCHER, VARIABLE, Restart

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: torchrun's own shape, so that the same signatures read it.
LINE = "%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s:%(lineno)d] %(message)s"
#: After a rank has failed the others cannot finish a collective, hence not save: this is for their dumps.
GRACE_SECONDS = 10
#: What a rank of the pools says of another that it misses (pdtrain.pools.links).
ACCUSATION = re.compile(r"^PoolError: pools: rank \d+ \(\w+\) (lost|got no answer from) rank (\d+)")
#: Of the exception that ended a rank, in what the next start is told.
MOST_TOLD = 240
INTERRUPTED = 128 + signal.SIGINT


def launch(
    arguments: Sequence[str], *, processes: int, run_dir: Path, threads: int = 1, flight_recorder_entries: int = 2000,
    again: Callable[[int], Sequence[str] | None] = lambda status: None, environment: Mapping[str, str] | None = None,
    restarts: int = 0,
) -> int:
    """Run `python ARGUMENTS` as `processes` ranks on this machine and wait for them.

    After the death of a rank all are started again, at most `restarts` times: each learns of it (`pdtrain.restart`).
    `again` is asked after every end that no signal caused, with the job's exit status: the arguments with which as many
    ranks are to be started once more (pools that regroup), or None. `environment`: more variables for the ranks.

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
        os.environ.update(environment or {})
        with _forwarding() as received:
            following: Sequence[str] | None = arguments
            restart, ended = Restart(uuid.uuid4().hex), Ended(0)
            while following is not None and not received:
                os.environ[VARIABLE] = restart.to_environment()
                ended = _once(following, processes, run_dir, log)
                if ended.rank is not None and ended.mends and restart.count < restarts and not received:
                    restart = restart.after(ended.rank, ended.told)
                    text = f"{ended.line()}; all ranks start again ({restart.count} of {restarts})"
                    log.warning("%s", text)
                    print(f"pdtrain: {text}", file=sys.stderr)
                    continue
                _explain(ended, run_dir)
                restart = Restart(uuid.uuid4().hex)  # what follows is another job
                following = None if received else again(ended.status)
        return INTERRUPTED if ended.status == 0 and signal.SIGINT in received else ended.status


@dataclass(frozen=True, slots=True)
class Ended:
    """How one start of the job ended: its exit status, and where it failed, the rank that did so first.

    `mends`: another start may end better. `said`: that rank's last line, where this terminal has not shown it.
    `message`: of the exception that ended it.
    """

    status: int
    rank: int | None = None
    how: str = ""
    said: str = ""
    mends: bool = False
    message: str = ""

    @property
    def told(self) -> str:
        """How it failed, for the next start."""
        return f'{self.how}, saying "{self.message}"' if self.message else self.how

    def line(self) -> str:
        """Who failed first, and how."""
        return f"rank {self.rank} failed first: it {self.how}{self.said and f'; its last line: {self.said}'}"


def _once(arguments: Sequence[str], processes: int, run_dir: Path, log: logging.Logger) -> Ended:
    """One start of the job."""
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
        return Ended(1)
    except ChildFailedError as failure:
        log.error("%s", failure)
        return _first(failure, run_dir)
    return Ended(0)


def _first(failure: Any, run_dir: Path) -> Ended:
    """Who failed first. A wrong command or configuration, and a run that lost its numbers, end the same every time."""
    rank, first = failure.get_first_failure()
    silent = ""
    said = failure.failures.get(0)
    if int(first.exitcode) == UsageError.exit_status and said is not None and said.exitcode == first.exitcode:
        rank, first = 0, said  # all ranks say the same of a wrong command, and rank 0 did so on this terminal
    if (accused := _accused(failure)) is not None:  # torchrun knows seconds only, and lets the accusers end first
        rank, silent = accused
        first = failure.failures[rank]
    status = int(first.exitcode)
    exited = status > 0 and not silent
    if silent:
        how, status = silent, 128 - status if status < 0 else status
    elif status < 0:
        how, status = f"was killed by {signal.Signals(-status).name}", 128 - status
    else:
        how = f"ended with exit status {status}"
    message = first.message.get("message", "") if isinstance(first.message, dict) else ""
    mends = status != UsageError.exit_status and not str(message).startswith("TrainingFailed")
    own = printable(" ".join(str(message).split()).removeprefix("PoolError: ")[:MOST_TOLD]) if exited else ""
    return Ended(status, rank, how, "" if rank == 0 else _last_line(run_dir, rank), mends, own)


def _accused(failure: Any) -> tuple[int, str] | None:
    """The one rank of the pools that others have lost, which accuses nobody itself; and how, when it was silent."""
    texts = {rank: each.message.get("message", "") for rank, each in failure.failures.items()
             if isinstance(each.message, dict)}
    said = {rank: found for rank, text in texts.items() if (found := ACCUSATION.search(str(text))) is not None}
    accused = {int(found[2]) for found in said.values()} - set(texts)
    if len(accused) != 1 or (rank := accused.pop()) not in failure.failures:
        return None
    lost = any(found[1] == "lost" for found in said.values() if int(found[2]) == rank)
    return rank, "" if lost else "gave no answer"


def _explain(ended: Ended, run_dir: Path) -> None:
    """Say in one line who failed first."""
    if ended.rank is None or (ended.rank == 0 and ended.status == UsageError.exit_status):
        return  # rank 0 has said why, on this terminal
    print(f"pdtrain: {ended.line()}", file=sys.stderr)
    print(f"pdtrain: for the cause: pdtrain diag postmortem {run_dir}", file=sys.stderr)


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
    os.environ[LAUNCHER] = str(os.getpid())
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
