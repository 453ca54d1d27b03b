"""The black box of one rank: metrics, spans, events, logs and dumps in a run directory. See docs/recorder.md.

Three promises hold everywhere in here. The recorder never ends a run: what fails in it is reported once and the
training goes on. It never reads a device between logging intervals. What it has written is whole lines.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pdtrain.recorder.crash import CrashGuard
from pdtrain.recorder.environment import write_environment
from pdtrain.recorder.events import EventLog, Span
from pdtrain.recorder.files import attempt, line, plain
from pdtrain.recorder.logs import attach_rank_log
from pdtrain.recorder.metrics import MetricsLog
from pdtrain.recorder.reduce import reduce_over_ranks
from pdtrain.recorder.sinks import Sink, open_sinks
from pdtrain.recorder.values import Pending, Unreadable, flatten, hold

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from pdtrain.recorder.reduce import Op, Value
    from pdtrain.recorder.watch import ModuleTimer

logger = logging.getLogger(__name__)

#: Without any log, span or event for this long, stacks and flight recorder are dumped once.
STALL_SECONDS = 300.0


class Recorder:
    """Records one rank of a training run into `run_dir`; rank 0 also writes the metrics of the whole run.

    `rank` and `world` come from torch.distributed where it is initialised, else from RANK and WORLD_SIZE, else 0 of 1.
    `log_every`: the steps between two readings of the device; every logged step keeps its own line of metrics.jsonl.
    `tensorboard`, `wandb`: also write these, in rank 0, where they are installed. `spans`: keep `span()` times.
    `stall_seconds`: silence after which stacks and flight recorder are dumped; 0: never.
    `guard`: install the excepthook, the SIGUSR1 stack dump and the watch on SIGTERM (see `pdtrain.recorder.crash`).

    Never raises because of what it records or cannot write: a full disk, a value of a strange type or a missing
    library is one warning.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], rank: int | None = None, world: int | None = None, *,
        log_every: int = 1, tensorboard: bool = True, wandb: bool = False, spans: bool = True,
        stall_seconds: float = STALL_SECONDS, guard: bool = True,
    ) -> None:
        self.run_dir = Path(run_dir).absolute()
        self.rank, self.world = _identity(rank, world)
        self.log_every = max(1, int(log_every))
        self.step: int | None = None
        """The last step that was logged, or resumed from."""
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        """Called in rank 0 with each row of metrics as plain values, once per logging interval (progress, tests)."""
        self.closers: list[Callable[[], None]] = []
        """Called when the recorder closes, before a traceback is printed (the live line gives the terminal back)."""
        self._stopped: str | None = None
        self._closed = False
        self._owed = False  # an interval ended with a step of which more is to come
        self._crashed = False
        self.complaints: set[str] = set()
        self._timer: ModuleTimer | None = None
        self._pending = Pending()
        self._sinks: list[Sink] | None = None
        self._wanted = (tensorboard, wandb)
        self._metrics = MetricsLog(self.run_dir / "metrics.jsonl")
        self._events = EventLog(self.run_dir / "events" / f"rank_{self.rank}.jsonl", spans=spans)
        self.log_handler: logging.Handler | None = None
        self.earlier_starts = 0
        """How often this rank has started in this run directory before."""
        self._lock = threading.RLock()  # the guard's thread writes too
        self._guard = CrashGuard(self, stall_seconds=stall_seconds) if guard else None
        try:
            self.log_handler = attach_rank_log(self.run_dir / "logs" / f"rank_{self.rank}.log", self.rank, self._stop)
            if self.rank == 0 and not (self.run_dir / "environment.json").exists():
                write_environment(self.run_dir, {"world_size": self.world})
            self.earlier_starts = self._events.count_starts()
            here = _whereabouts(self.rank, self.world)
            self.write_event("start", here)
            logger.info("rank %d of %d on %s, process %d", self.rank, self.world, here["host"], here["pid"])
        except Exception as error:
            self._failed(error)
        if self._guard is not None:
            attempt([self._guard.install])

    # -- what a training loop calls ------------------------------------------------------------------------------

    def log(self, step: int, *, more: bool = False, **values: Any) -> None:
        """Record the values of `step` (optimizer steps completed). Call it on every rank; rank 0 writes them.

        A value may be a number, a text, a list, a tensor on any device (copied there now, read at the end of the
        interval) or a mapping (its keys are joined with "/"). None means "not measured" and is left out.
        `more`: another `log` of this step follows, say after a validation; its line waits for that.
        """
        self._events.beat()
        if self._closed:
            return
        try:
            step = int(step)
            self._owed = self.due(step) or self._owed
            if self.rank == 0 and self._stopped is None:
                row = self._row(step, values, copy=more or not self._owed)
                with self._lock:
                    self._pending.add(row)
            self.step = step
            self._events.end_step(step)
            if self._timer is not None:
                self._timer.end_step(step)
            if self._owed and not more:
                self._owed = False
                self.flush()
        except Exception as error:
            self._failed(error)

    def due(self, step: int) -> bool:
        """Whether `log(step)` ends a logging interval: the moment to reduce over ranks and to read expensive values.

        The same on all ranks that log the same steps.
        """
        step = int(step)
        return step % self.log_every == 0 or (
            self.step is not None and step // self.log_every != self.step // self.log_every
        )

    def span(self, name: str, step: int | None = None) -> Span:
        """`with recorder.span("forward"):` – the wall time on this host of a part of the step, in events/.

        Without `step` it belongs to the step that the next `log` names. On a GPU this is the time to enqueue the work
        and to wait for it where the host waits; `watch` measures time on the device.
        """
        return self._events.span(name, step)

    def event(self, name: str, **fields: Any) -> None:
        """Write one event (`checkpoint_saved`, `resized`, ...) to this rank's events, at once."""
        self._events.beat()
        self.write_event(name, fields)

    def resume(self, step: int) -> None:
        """Say that training continues after `step`: lines of later steps in metrics.jsonl are superseded.

        Without this call the first `log` of a process that finds an older metrics.jsonl says so itself.
        """
        try:
            self.step = int(step)
            self.event("resume", step=self.step)
            if self.rank == 0 and self._stopped is None:
                self._metrics.resume(self.step)
        except Exception as error:
            self._failed(error)

    # -- time per module -----------------------------------------------------------------------------------------

    def watch(self, model: nn.Module, modules: Mapping[str, Sequence[nn.Module]], every: int = 1) -> None:
        """Measure the forward and backward time of groups of `model`'s modules, in every `every`-th step.

        `modules` maps a name (a policy row) to the modules whose time it sums. Time inside a watched module that is
        itself inside another counts for the inner one only. Read the sums with `module_seconds`.
        """
        from pdtrain.recorder.watch import ModuleTimer

        try:
            if self._timer is not None:
                self._timer.remove()
            self._timer = ModuleTimer(model, modules, every=every, steps_done=self.step or 0)
        except Exception as error:
            self._failed(error)

    def module_seconds(self) -> dict[str, float]:
        """Seconds per step in each watched group since the last call, forward plus backward, on this rank.

        Waits for the device: call it at logging intervals only (`due`). Empty when no step was measured.
        """
        try:
            return self._timer.take() if self._timer is not None else {}
        except Exception as error:
            self._failed(error)
            return {}

    @property
    def measuring_seconds(self) -> float:
        """About what measuring the modules adds to a measured step on this rank; 0 while that is not known."""
        return self._timer.cost_seconds if self._timer is not None else 0.0

    def measure_every(self, every: int) -> None:
        """From here on measure the steps whose number `every` divides. All ranks must be told the same."""
        if self._timer is not None:
            self._timer.every = max(1, every)

    def times(self, step: int, seconds: Mapping[str, float]) -> None:
        """Keep this rank's own seconds per step, by module, in events/: the means over ranks hide who is slow."""
        try:
            if seconds and not self._closed and self._stopped is None:
                self._events.times(step, seconds)
        except Exception as error:
            self._failed(error)

    def reduce(
        self, values: Mapping[str, tuple[Value, Op]], group: ProcessGroup | None = None
    ) -> dict[str, float]:
        """Each value's "mean", "max", "min", "sum" or "argmax" over the ranks of `group`, by one small all-gather.

        Every rank of the group must call it, with the same names, at the end of a logging interval (`due`): it is a
        collective, and it reads the result. "argmax" is the group rank of the largest value. Without torch.distributed
        the results are the values themselves. Raises what the collective raises.
        """
        return reduce_over_ranks(values, group, complain=self.complain)

    # -- writing -------------------------------------------------------------------------------------------------

    def flush(self, *, crashed: bool = False, unfinished_step: bool = False) -> None:
        """Read what waits on the device and write all files. `log` does this at the end of each interval.

        `crashed`: touch no device that may never answer. `unfinished_step`: write spans that belong to no step yet.
        """
        if not self._lock.acquire(timeout=5.0 if crashed else -1):
            return  # the main thread is stuck in here itself, and a dying process must not wait for it
        try:
            if self._stopped is not None or self._closed:
                return
            self._events.flush(unfinished_step=unfinished_step)
            rows = [plain_row(row) for row in self._pending.read(crashed=crashed)]
            if rows:
                self._metrics.write(b"".join(line(row) for row in rows), first_step=rows[0]["step"])
                self._publish(rows)
        except Exception as error:
            self._failed(error)
        finally:
            self._lock.release()

    def write_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """`event` without the sign of life: for the guard, whose own notes are none."""
        try:
            if self._stopped is None and not self._closed:
                self._events.event(name, fields)
        except Exception as error:
            self._failed(error)

    def flush_events(self) -> None:
        """Write the spans that wait, those of the unfinished step too; touches no device."""
        try:
            if self._stopped is None and not self._closed:
                self._events.flush(unfinished_step=True)
        except Exception as error:
            self._failed(error)

    @property
    def last_beat(self) -> float:
        """When (time.monotonic) the loop last logged, entered or left a span, or wrote an event."""
        return self._events.last_beat

    def spans_in_progress(self, error: BaseException | None = None) -> list[str]:
        """What the rank is doing, outermost span first; with `error`, what it was doing when that was raised."""
        still_open = sorted((span.start, span.name) for span in list(self._events.open_spans.values()))
        return [name for _, name in still_open] + self._events.spans_left_by(error)

    def disown(self) -> None:
        """In a forked child: the files belong to the parent, so nothing is written here any more."""
        self._closed = True

    def _publish(self, rows: list[dict[str, Any]]) -> None:
        """Hand `rows` to everything that is not needed for a diagnosis: none of it may stop the black box."""
        if self._sinks is None:
            self._sinks = open_sinks(self.run_dir, *self._wanted, complain=self.complain)
        for sink in list(self._sinks):
            try:
                sink.write(rows)
            except Exception as error:
                self._sinks.remove(sink)
                self.complain(f"{sink.name} failed and is off from here: {error!r}")
        for listener in self.listeners:
            for row in rows:
                listener(row)

    def crash(self, error: BaseException) -> None:
        """Record that `error` ends the run: traceback to events and log, flight recorder to dumps/.

        The excepthook and the `with` statement call this; a loop that catches its exceptions may too.
        """
        if self._crashed or self._closed:
            return
        self._crashed = True
        if self._guard is not None:
            self._guard.record_crash(error)
        self.flush(crashed=True, unfinished_step=True)

    def close(self) -> None:
        """Write what is left and let go of everything. May be called twice; runs at interpreter exit if forgotten."""
        if self._closed:
            return
        if self._guard is not None:
            self._guard.settle()
        self.flush(crashed=self._crashed, unfinished_step=True)
        self.write_event("end", {"ok": not self._crashed, "last_step": self.step})
        self._closed = True
        sinks = self._sinks or []
        actions: list[Callable[[], Any]] = [*self.closers, *(sink.close for sink in sinks)]
        if self._timer is not None:
            actions.append(self._timer.remove)
        if self._guard is not None:
            actions.append(self._guard.uninstall)
        actions += [self._events.close, self._metrics.close, self._detach_log]
        for error in attempt(actions):
            self.complain(f"while closing: {error!r}")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.crash(error)
        self.close()

    # -- trouble -------------------------------------------------------------------------------------------------

    def _row(self, step: int, values: Mapping[str, Any], *, copy: bool) -> dict[str, Any]:
        row: dict[str, Any] = {"step": step, "time": time.time()}
        for key, value in flatten(values).items():
            if value is None:
                continue
            try:
                row[key] = hold(value, copy=copy)
            except Unreadable as problem:
                self.complain(f"{key} is not recorded: {problem}")
        return row

    def _failed(self, error: Exception) -> None:
        """An error of the recorder's own: a disk that refuses stops the recording, anything else is one warning."""
        if isinstance(error, OSError):
            self._stop(error)
        else:
            self.complain(f"{error!r}; what it concerns is not recorded")

    def _stop(self, error: BaseException) -> None:
        if self._stopped is not None:
            return
        self._stopped = str(error)
        self._detach_log()
        self._pending = Pending()
        text = f"recording stops, training goes on: {error}"
        self.complain(text)
        # a small line may still fit where a large one did not
        last = {"reason": str(error)}
        attempt([lambda: self._events.event("recording_stopped", last, alone=True), self._events.stop])

    def complain(self, text: str) -> None:
        """One warning on stderr; the same text never twice."""
        if text not in self.complaints and len(self.complaints) < 20:
            self.complaints.add(text)
            print(f"pdtrain recorder, rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _detach_log(self) -> None:
        if self.log_handler is not None:
            logging.getLogger().removeHandler(self.log_handler)
            handler, self.log_handler = self.log_handler, None
            attempt([handler.close])


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with every value as JSON can hold it (`pdtrain.recorder.files.plain`)."""
    return {key: plain(value) for key, value in row.items()}


def _identity(rank: int | None, world: int | None) -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if rank is None and distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), world or distributed.get_world_size()
    try:
        return (int(os.environ.get("RANK", 0)) if rank is None else rank,
                int(os.environ.get("WORLD_SIZE", 1)) if world is None else world)
    except ValueError:
        return rank or 0, world or 1


def _whereabouts(rank: int, world: int) -> dict[str, Any]:
    """Where this rank runs: joins ranks to hosts and GPUs, which no other file does for every rank."""
    found: dict[str, Any] = {"rank": rank, "world_size": world, "host": socket.gethostname(), "pid": os.getpid()}
    if os.environ.get("LOCAL_RANK", "").isdigit():
        found["local_rank"] = int(os.environ["LOCAL_RANK"])
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = {"index": torch.cuda.current_device(), "name": properties.name}
        for name in ("uuid", "pci_bus_id"):
            if hasattr(properties, name):
                found["gpu"][name] = str(getattr(properties, name))
    return found
