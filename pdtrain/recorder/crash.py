"""What is saved when a rank crashes, hangs, is told to end, or is asked where it is.

    uncaught exception      traceback to events and log, flight recorder to dumps/
    SIGTERM                 the same without traceback. A program with its own handler keeps it, and is only dumped
                            when it shows no sign of life for TERM_GRACE; without one the process still dies by SIGTERM
    SIGUSR1                 stacks of all threads to dumps/stacks_<rank>.txt, even while the interpreter is blocked
    SIGSEGV, SIGABRT, ...   the same by faulthandler, unless the program has switched faulthandler on for itself
    silence                 nothing logged for `stall_seconds`: stacks and flight recorder, once per stall

Python runs its signal handlers in the main thread only, which never happens while that thread waits in a collective.
So the guard lets C's part of the handler write to a pipe (`signal.set_wakeup_fd`) and a thread of its own reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from pdtrain.recorder.files import attempt
from pdtrain.recorder.flight import dump_flight_recorder, set_aside_earlier

if TYPE_CHECKING:
    from pdtrain.recorder.recorder import Recorder

#: After SIGTERM, a program that handles it itself is dumped when silent for this long (torchrun kills after 30 s).
TERM_GRACE = 5.0
MAX_STALL_DUMPS = 3
POLL_SECONDS = 5.0
#: A traceback or message beyond this is cut in events, where a line should stay a line.
MAX_TEXT = 20_000

_guards: weakref.WeakSet[CrashGuard] = weakref.WeakSet()


class CrashGuard:
    """Installs the hooks for one recorder; `uninstall` puts back what was there before."""

    def __init__(self, recorder: Recorder, *, stall_seconds: float) -> None:
        self._recorder = recorder
        self._folder = recorder.run_dir / "dumps"
        self._stall = stall_seconds
        self._pid = os.getpid()
        self._stacks: TextIO | None = None
        self._previous_hooks: tuple[Any, Any] | None = None
        self._previous_signals: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._watcher: threading.Thread | None = None
        self._ending = threading.Event()
        self._stalled_at: float | None = None
        self._stall_dumps = 0
        self._term_at: float | None = None
        self._fatal = False
        self._installed = False

    # -- installing ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the hooks. Raises OSError when dumps/ cannot be written; what needs no file works all the same."""
        self._installed = True
        _guards.add(self)
        self._previous_hooks = (sys.excepthook, threading.excepthook)
        sys.excepthook = self._excepthook
        threading.excepthook = self._thread_excepthook
        atexit.register(self._recorder.close)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            set_aside_earlier(self._folder, self._recorder.rank, self._recorder.earlier_starts)
            self._stacks = (self._folder / f"stacks_{self._recorder.rank}.txt").open("a")
        finally:
            if threading.current_thread() is threading.main_thread():
                self._install_signals()
            self._watcher = threading.Thread(target=self._watch, name="pdtrain-recorder", daemon=True)
            self._watcher.start()

    def _install_signals(self) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if previous != -1:  # an event loop owns it: leave it, our handlers run in the main thread then
            signal.set_wakeup_fd(previous)
            os.close(read)
            os.close(write)
        else:
            self._pipe = (read, write)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._previous_signals[number] = signal.signal(number, self._noticed)
        if self._stacks is not None:
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True, chain=True)
            if not faulthandler.is_enabled():
                faulthandler.enable(file=self._stacks, all_threads=True)
                self._fatal = True

    def settle(self) -> None:
        """Stop the watching thread, after it has dealt with the signals that have arrived."""
        self._ending.set()
        attempt([self._stop_watcher])

    def uninstall(self) -> None:
        """Put back hooks and signals, stop the thread, remove an empty stack file."""
        if not self._installed:
            return
        self._installed = False
        _guards.discard(self)
        self.settle()
        attempt([self._restore_hooks, self._restore_signals, self._deliver_what_came_late, self._close_files])

    def _deliver_what_came_late(self) -> None:
        """A SIGTERM that came after the thread had ended was swallowed by our handler: send it again."""
        if self._pipe is not None and signal.SIGTERM in self._previous_signals:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in os.read(self._pipe[0], 64).rpartition(b"\0")[2]:
                    os.kill(self._pid, signal.SIGTERM)

    def _restore_hooks(self) -> None:
        if self._previous_hooks is not None:
            if sys.excepthook == self._excepthook:
                sys.excepthook = self._previous_hooks[0]
            if threading.excepthook == self._thread_excepthook:
                threading.excepthook = self._previous_hooks[1]
        atexit.unregister(self._recorder.close)

    def _restore_signals(self) -> None:
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            if self._fatal:
                faulthandler.disable()
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous_signals.items():
                if signal.getsignal(number) == self._noticed:
                    signal.signal(number, previous)
            if self._pipe is not None:
                signal.set_wakeup_fd(-1)

    def _stop_watcher(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=2.0)

    def _close_files(self) -> None:
        if self._pipe is not None and not (self._watcher and self._watcher.is_alive()):
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = None
        if self._stacks is not None:
            path, empty = Path(self._stacks.name), os.fstat(self._stacks.fileno()).st_size == 0
            self._stacks.close()
            self._stacks = None
            if empty:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # only when nothing else was dumped
                    self._folder.rmdir()

    def forget_after_fork(self) -> None:
        """In a forked child (a data-loader worker): record nothing, and let signals do what they do by default."""
        self._recorder.disown()
        self._installed = False
        sys.excepthook, threading.excepthook = self._previous_hooks or (sys.__excepthook__, threading.__excepthook__)
        atexit.unregister(self._recorder.close)
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
        for number, previous in self._previous_signals.items():
            if signal.getsignal(number) == self._noticed:
                signal.signal(number, previous)

    # -- what happens --------------------------------------------------------------------------------------------

    def record_crash(self, error: BaseException) -> None:
        """Traceback of `error` to events and log, flight recorder to dumps/."""
        text = "".join(traceback.format_exception(error))
        self._event(
            "interrupted" if isinstance(error, KeyboardInterrupt) else "exception",
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            message=str(error)[:MAX_TEXT], traceback=text[-MAX_TEXT:], error=error,
        )
        self._note(logging.ERROR, "the run ends here\n%s", text.rstrip())
        if not isinstance(error, KeyboardInterrupt):
            self._dump_flight()

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        attempt([lambda: self._recorder.crash(error)])
        previous = self._previous_hooks[0] if self._previous_hooks else sys.__excepthook__
        previous(kind, error, trace)

    def _thread_excepthook(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None and not isinstance(error, SystemExit):
            text = "".join(traceback.format_exception(error))
            attempt([lambda: self._event(
                "thread_exception", thread=args.thread.name if args.thread else None,
                type=type(error).__qualname__, message=str(error)[:MAX_TEXT], traceback=text[-MAX_TEXT:],
            ), lambda: self._note(logging.ERROR, "a thread ends here\n%s", text.rstrip())])
        previous = self._previous_hooks[1] if self._previous_hooks else threading.__excepthook__
        previous(args)

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        """The Python handler of a signal whose real work the watching thread does, woken through the pipe."""
        if self._pipe is None:
            self._signal(number)

    def _watch(self) -> None:
        poll = min(POLL_SECONDS, self._stall / 4 if self._stall > 0 else POLL_SECONDS)
        while self._pipe is not None or not self._ending.is_set():
            try:
                if self._pipe is not None:
                    waiting = 0.5 if self._term_at is not None else poll
                    ready, _, _ = select.select([self._pipe[0]], [], [], waiting)
                    for number in os.read(self._pipe[0], 64) if ready else b"":
                        if not number:  # `settle` asks to end, after every signal before it
                            return
                        self._signal(number)
                else:
                    self._ending.wait(poll)
                self._check_silence()
            except Exception as error:  # this thread has nobody above it, and the run must not notice
                if self._ending.is_set():
                    return
                self._recorder.complain(f"the crash guard stumbled: {error!r}")
                self._ending.wait(poll)

    def _signal(self, number: int) -> None:
        if number == signal.SIGUSR1 and self._stacks is not None:
            attempt([lambda: self._stack_line("the stacks above: SIGUSR1"),
                     lambda: self._event("stack_dump", reason="SIGUSR1")])
        elif number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(number).name
            attempt([lambda: self._event("signal", signal=name),
                     lambda: self._note(logging.WARNING, "received %s", name)])
            if number == signal.SIGTERM:
                self._term_at = time.monotonic()
                if signal.getsignal(number) == self._noticed:
                    self._die(number)

    def _die(self, number: int) -> None:
        """Save everything, then let `number` do what it would have done without a recorder."""
        attempt([self._dump_flight, lambda: self._recorder.flush(crashed=True, unfinished_step=True)])
        # signal.signal works in the main thread only, which may be waiting in a collective for ever
        ctypes.CDLL(None).signal(int(number), ctypes.c_void_p(0))
        os.kill(self._pid, number)

    def _check_silence(self) -> None:
        now, beat = time.monotonic(), self._recorder.last_beat
        if self._term_at is not None and now - self._term_at > TERM_GRACE:
            if beat <= self._term_at:
                attempt([lambda: self._dump_stacks("SIGTERM, and no sign of life since"), self._dump_flight])
            self._term_at = None
        if self._stall <= 0 or now - beat < self._stall or self._stall_dumps >= MAX_STALL_DUMPS:
            return
        if self._stalled_at == beat:
            return
        self._stalled_at = beat
        self._stall_dumps += 1
        silent = now - beat
        self._recorder.complain(
            f"nothing logged for {silent:.0f} s; stacks and flight recorder go to {self._folder}"
        )
        attempt([lambda: self._event("stalled", seconds=round(silent, 3)),
                 lambda: self._dump_stacks(f"nothing logged for {silent:.0f} s"), self._dump_flight,
                 lambda: self._recorder.flush_events()])

    # -- writing -------------------------------------------------------------------------------------------------

    def _dump_flight(self) -> None:
        try:
            paths = dump_flight_recorder(self._folder, self._recorder.rank)
        except OSError as error:
            self._recorder.complain(f"no flight-recorder dump: {error}")
            return
        for path in paths:
            self._event("flight_recorder_dump", file=path.name)

    def _dump_stacks(self, reason: str) -> None:
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)
            self._stack_line(f"the stacks above: {reason}")

    def _stack_line(self, reason: str) -> None:
        """Close a block of stacks with when, who and why: the C code that writes the stacks cannot say it."""
        if self._stacks is not None:
            when = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            step = self._recorder.step
            self._stacks.write(f"==== {when} rank {self._recorder.rank} pid {self._pid} last step "
                               f"{'none' if step is None else step}: {reason} ====\n\n")
            self._stacks.flush()

    def _event(self, name: str, error: BaseException | None = None, **fields: Any) -> None:
        spans = self._recorder.spans_in_progress(error)
        if spans:
            fields["open_spans"] = spans
        if self._recorder.step is not None:
            fields["last_step"] = self._recorder.step
        self._recorder.write_event(name, fields)

    def _note(self, level: int, text: str, *args: Any) -> None:
        """To logs/rank_R.log only: the console hears of it from elsewhere."""
        handler = self._recorder.log_handler
        if handler is not None:
            handler.handle(logging.LogRecord(__name__, level, __file__, 0, text, args, None))


def _after_fork() -> None:
    for guard in list(_guards):
        attempt([guard.forget_after_fork])
    _guards.clear()


os.register_at_fork(after_in_child=_after_fork)
