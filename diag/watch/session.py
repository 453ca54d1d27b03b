"""The loop around a watch: ticks at an interval, shows, tells the hooks, and knows when to end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from diag.report.text import printable
from diag.watch.alarms import Change
from diag.watch.hooks import Hooks
from diag.watch.live import Watch
from diag.watch.messages import encode, line

#: A tick that takes long is followed by a pause so much longer.
IDLE_SHARE = 0.005
MOST_PAUSE = 10.0
#: The screen is drawn anew when something changed, and else so often ("12 s ago").
REDRAW_SECONDS = 10.0
#: While what was there before is being read, nobody waits for the interval.
READING_PAUSE = 0.0


class View(Protocol):
    """Where a watch is shown."""

    def show(self, watch: Watch, now: float, changes: Sequence[Change], *, news: bool) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Ended(Exception):
    """A signal asked the watch to end."""


def run(watch: Watch, view: View, hooks: Hooks, *, interval: float = 1.0, once: bool = False, forever: bool = False,
        clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep) -> int:
    """Watch until the run ends, or a signal comes; the exit status: 1 while an alarm stands, else 0."""
    reason = ""
    try:
        with ending_on_signals():
            while True:
                now, began = clock(), time.perf_counter()
                seen = watch.judgements
                changes = watch.tick(now)
                view.show(watch, now, changes, news=watch.judgements != seen or watch.reading)
                for change in changes:
                    hooks.send(encode(change))
                if once and not watch.reading and (watch.judgements or not watch.follower.tails):
                    break
                if watch.ended and not forever:
                    reason = {"finished": "the run has finished", "gone": "its files are gone"}[watch.ended]
                    break
                cost = time.perf_counter() - began
                idle = watch.judgements == seen and not watch.reading and not watch.grown
                pause = max(interval, min(cost / IDLE_SHARE, MOST_PAUSE)) if idle else interval
                sleep(READING_PAUSE if watch.reading else pause)
    except (KeyboardInterrupt, Ended):
        reason = "ended"
    try:
        hooks.close()
        view.close()
        if reason and reason != "ended":
            view.say(reason)
    except KeyboardInterrupt:  # a second Ctrl-C does not wait for a pager
        pass
    return watch.exit_status()


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM ends the watch as Ctrl-C does, with its exit status."""

    def end(number: int, frame: object) -> None:
        raise Ended

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread: embedded somewhere
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class JsonLines:
    """One JSON object per alarm raised or cleared, on standard output; nothing else goes there."""

    def show(self, watch: Watch, now: float, changes: Sequence[Change], *, news: bool) -> None:
        for change in changes:
            sys.stdout.buffer.write(encode(change))
        if changes:
            sys.stdout.buffer.flush()

    def say(self, text: str) -> None:
        print(f"pdtrain: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to give back."""


class Lines:
    """One line of text per alarm raised or cleared: where there is no terminal."""

    def show(self, watch: Watch, now: float, changes: Sequence[Change], *, news: bool) -> None:
        for change in changes:
            print(line(change), flush=True)
            if change.event == "raised":
                from diag.watch.messages import details

                for label, text in details(change.alarm):
                    print(f"           {label}: {text}", flush=True)

    def say(self, text: str) -> None:
        print(f"pdtrain: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to give back."""


class Screen:
    """The live screen, on a terminal."""

    def __init__(self, title: str, *, colour: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self.title = title
        self.console = Console(no_color=not colour, highlight=False, markup=False, emoji=False)
        self.live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        self.live.start()
        self.drawn = float("-inf")
        self.shape: object = None
        self.notes: list[str] = []

    def show(self, watch: Watch, now: float, changes: Sequence[Change], *, news: bool) -> None:
        shape = (self.console.size, watch.finished, watch.pulse.step, len(watch.follower.tails))
        if not (changes or news or shape != self.shape or now - self.drawn >= REDRAW_SECONDS):
            return
        from rich.console import Group
        from rich.text import Text

        from diag.watch.screen import screen

        self.drawn, self.shape = now, shape
        body = screen(watch, now, self.console.width, self.title)
        notes = [Text(printable(note), style="yellow") for note in self.notes[-3:]]
        self.live.update(Group(body, *notes), refresh=True)

    def say(self, text: str) -> None:
        if self.live.is_started:
            self.notes.append(text)
            self.drawn = float("-inf")
        else:
            print(f"pdtrain: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.live.stop()
