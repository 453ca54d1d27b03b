"""One rank of a probe: three threads, of which the main one waits for nobody without a bound.

The measuring thread calls torch and may hang for ever in it; the control thread speaks to the store; the main thread
ends the process, with the report if this rank is the one that prints it: rank 0, or the lowest that still answers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from diag.commands.output import Output
from diag.errors import MissingExtra, PdtrainError, UsageError
from diag.probes.comm.ask import Ask
from diag.probes.comm.control import TICK, Control, Verdict, identity, speaker
from diag.probes.comm.records import Probe
from diag.probes.comm.watch import watched
from diag.probes.comm.work import Work
from diag.probes.launched import job

#: Seconds that a rank waits for another to print the report, and that an interrupted one waits for a reason.
FAREWELL = 10.0
REASON = 4.0


@dataclass(frozen=True, slots=True)
class Shown:
    """Where the answer goes: the shared options, `--save` and `--png`."""

    output: Output
    save: str | None = None
    png: str | None = None

    def printed(self) -> Shown:
        """The same without files."""
        files = {"--save": self.save, "--png": self.png, "--html": self.output.html, "--md": self.output.markdown,
                 "--output": self.output.file}
        left = [option for option, name in files.items() if name not in (None, "-")]
        if left:
            print(f"pdtrain: {', '.join(left)} not written on this host, which knows a part only", file=sys.stderr)
        return Shown(Output(json=self.output.json))


def run_rank(ask: Ask, shown: Shown) -> int | None:
    """Take part in the job of the environment; the exit status on the rank that printed the report, None on others.

    Raises:
        UsageError, MissingExtra: the job cannot be measured.
    """
    place = job()
    if place is None or place[1] < 2:
        raise UsageError("a probe needs at least two ranks: --nproc 2 starts them here, torchrun on several hosts")
    with watched(ask.timeout):
        return _run_rank(ask, shown, *place)


def _run_rank(ask: Ask, shown: Shown, rank: int, world: int) -> int | None:
    try:
        import torch
    except ImportError:
        raise MissingExtra("pdtrain diag comm", "train", "torch") from None
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    if cuda and here > torch.cuda.device_count():
        raise UsageError(f"{here} ranks and {torch.cuda.device_count()} GPUs on this host; start one rank for each "
                         "GPU, or set CUDA_VISIBLE_DEVICES= to measure with Gloo")
    device = torch.cuda.get_device_name(local) if cuda else ""
    control = Control(lambda: _client(ask.timeout), rank, world, ask.timeout, identity(device=device))
    work = Work(ask, control, rank, world, "cuda" if cuda else "cpu")
    with _signals() as stopped:
        control.start()
        work.start()
        try:
            _watch(work, control, stopped, rank)
        except PdtrainError:
            if rank != 0:  # rank 0 says it, unless the launcher ends it first
                time.sleep(1.0)
                _leave(PdtrainError.exit_status)
            raise
        if control.verdict is not None or control.store_error or work.is_alive():
            _give_up(work, control, shown, rank, world)
        control.good_bye()
        return _report(work.probe, shown) if rank == 0 else None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The stop signals received; whoever is stopped first says what is known."""
    stopped: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: stopped.append(number)) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _watch(work: Work, control: Control, stopped: list[int], rank: int) -> None:
    """Until everything is measured, or there is a verdict. Raises what is the user's to correct."""
    progress = _Progress(rank)
    since = 0.0
    while work.is_alive() or work.error is not None:
        work.join(TICK)
        progress.show(control.label)
        if control.verdict is not None or control.store_silent():
            break
        if isinstance(work.error, PdtrainError):  # the same on every rank: wrong usage, not a fault
            raise work.error
        if work.error is not None:
            control.failure = control.failure or _one_line(work.error)
            time.sleep(TICK)
        if stopped:
            since, control.asked_to_stop = since or time.monotonic(), True
            if time.monotonic() - since > REASON:
                control.decide(control.interrupted(signal.Signals(stopped[0]).name))
    progress.clear()


def _client(timeout: float) -> Any:
    """An own connection to the job's store, so that no other thread's wait stands in the way."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ.get("RANK") == "0"
    store = dist.TCPStore(address, port, is_master=hosts_it, wait_for_workers=False, multi_tenant=hosts_it,
                          timeout=timedelta(seconds=max(timeout, 60.0)))
    return dist.PrefixStore("pdtrain-comm", store)


def _give_up(work: Work, control: Control, shown: Shown, rank: int, world: int) -> NoReturn:
    """The probe ends early: report what is known, or wait until somebody has, and end the process.

    A thread that hangs in a collective ends with the process only.
    """
    verdict = control.verdict
    if verdict is None:
        verdict = Verdict(kind="store", text=control.store_error or "no answer")
    guilty = {item.rank for item in verdict.lost}
    local = {other for other, item in control.identities.items() if item.node == control.me.node}
    if verdict.kind == "store" or guilty >= local | {rank}:  # cut off: nobody else can be told, nobody else is heard
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        talks = rank == 0 or local_rank == int(rank == local_rank)  # beside rank 0 the next one: it may be what is lost
        shown = shown if rank == 0 else shown.printed()  # never over the files of those who know more
    else:
        talks = rank == speaker(world, verdict)
    status: int | None = None
    if talks:
        probe = work.early(verdict, control.records() if verdict.kind != "store" else [])
        try:
            status = _report(probe, shown)
        except PdtrainError as error:  # a file that cannot be written; the others wait to hear that this is over
            print(f"pdtrain: {error}", file=sys.stderr)
            status = 1
        control.say()
        _end_stopped(verdict, control)
    else:
        end = time.monotonic() + FAREWELL
        while not control.said and not control.store_error and time.monotonic() < end:
            time.sleep(TICK / 5)
        time.sleep(TICK)
    sys.stdout.flush()
    sys.stderr.flush()
    _leave(status)


def _end_stopped(verdict: Verdict, control: Control) -> None:
    """End stopped ranks of this host: a launcher would wait half a minute for each."""
    for item in verdict.lost:
        known = control.identities.get(item.rank)
        ours = item.how == "stopped" or "PDTRAIN_COMM_STATUS" in os.environ  # those that --nproc started here
        if ours and known is not None and known.alive_as(control.me):
            with suppress(OSError):
                os.kill(known.pid, signal.SIGKILL)


def _leave(status: int | None) -> NoReturn:
    from pathlib import Path

    name = os.environ.get("PDTRAIN_COMM_STATUS")
    if name and status is not None and status != PdtrainError.exit_status:
        Path(name).write_text(str(status), "ascii")
    os._exit(1 if status is None else status)


def _report(probe: Probe, shown: Shown) -> int:
    from diag.probes.comm.report import emit_live

    return emit_live(probe, shown)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


class _Progress:
    """What is measured now, on rank 0's terminal and nowhere else."""

    def __init__(self, rank: int) -> None:
        self.on = rank == 0 and sys.stderr.isatty()
        self.last = ""

    def show(self, label: str) -> None:
        if self.on and label != self.last:
            self.last = label
            print(f"\r\033[Kmeasuring {label[:60]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.on and self.last:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
