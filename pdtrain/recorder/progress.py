"""The live line that says how the training goes; one plain line now and then where there is no terminal.

    step 120/300  loss 2.134  val 1.98 bit/byte  31.2k tokens/s  MFU n/a  attention 38% experts 31%  1:23 left
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, TextIO

Mode = Literal["auto", "live", "plain", "quiet"]
#: Seconds between plain lines, and the least time between redraws of the live one.
PLAIN_SECONDS = 10.0
REDRAW_SECONDS = 0.2
#: Modules named in the line; the rest has no room.
SHARES = 4


class Progress:
    """Shows rows of metrics; hand `progress.update` to `recorder.listeners`. A context manager. Rank 0 only.

    mode "auto": a live line on a terminal, else one plain line every `plain_seconds`; "quiet", or not `enabled`:
    nothing.
    """

    def __init__(
        self, steps: int, *, mode: Mode = "auto", enabled: bool = True, stream: TextIO | None = None,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        self.step: int | None = None
        """The last step it was told of."""
        self._steps = steps
        self._stream = stream if stream is not None else sys.stderr
        if not enabled:
            mode = "quiet"
        elif mode == "auto":
            mode = "live" if self._stream.isatty() else "plain"
        self._mode = mode
        self._every = REDRAW_SECONDS if mode == "live" else plain_seconds
        self._shown = -math.inf
        self._recent: deque[tuple[int, float]] = deque(maxlen=50)
        self._latest: dict[str, Any] = {}
        self._live: Any = None

    def update(self, row: Mapping[str, Any]) -> None:
        """Take one row of metrics (keys of docs/run-directory.md) and show it when it is time to."""
        if "step" not in row:
            return
        self.step = int(row["step"])
        if self._mode == "quiet":
            return
        self._latest |= row  # validation and module times do not come with every step: their last value stays
        self._recent.append((int(row["step"]), float(row.get("time", time.time()))))
        now = time.monotonic()
        if now - self._shown >= self._every or row["step"] >= self._steps:
            self._shown = now
            try:
                self._show(describe(self._latest, self._steps, self._seconds_left()))
            except OSError:  # whoever watched has left (`| head`): the run and its recording go on
                self._mode = "quiet"

    def _show(self, text: str) -> None:
        if self._mode == "plain":
            print(text, file=self._stream, flush=True)
            return
        from rich.text import Text

        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
            atexit.register(self.close)  # a run that dies must not leave the terminal without a cursor
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _seconds_left(self) -> float | None:
        (first, start), (last, end) = self._recent[0], self._recent[-1]
        if last <= first or end <= start:
            return None
        return (self._steps - last) * (end - start) / (last - first)

    def note(self, text: str) -> None:
        """Print `text` above the live line."""
        try:
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif self._mode != "quiet":
                print(text, file=self._stream, flush=True)
        except OSError:
            self._mode = "quiet"

    def close(self) -> None:
        """Leave the last line standing and give the terminal back."""
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()
            atexit.unregister(self.close)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def describe(row: Mapping[str, Any], steps: int, seconds_left: float | None = None) -> str:
    """One row of metrics as one line of text; what was not measured is left out, except MFU ("n/a")."""
    parts = [f"step {row['step']}/{steps}"]
    if "loss" in row:
        parts.append(f"loss {_number(row['loss'])}")
    if "val_bits_per_byte" in row:
        parts.append(f"val {_number(row['val_bits_per_byte'])} bit/byte")
    elif "val_loss" in row:
        parts.append(f"val loss {_number(row['val_loss'])}")
    if "tokens_per_second" in row:
        parts.append(f"{_short(row['tokens_per_second'])} tokens/s")
    mfu = row.get("mfu")
    parts.append(f"MFU {mfu:.1%}" if isinstance(mfu, float) and math.isfinite(mfu) else "MFU n/a")
    shares = time_shares(row)
    if shares:
        parts.append(" ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:SHARES]))
    busy = [row.get(f"pools/{pool}_busy") for pool in ("compute", "update")]
    if all(isinstance(share, float) for share in busy):
        parts.append(f"busy: compute {busy[0]:.0%} update {busy[1]:.0%}")
    if seconds_left is not None and row["step"] < steps:
        parts.append(f"{_duration(seconds_left)} left")
    return "  ".join(parts)


def time_shares(row: Mapping[str, Any]) -> dict[str, float]:
    """Share of the step spent in each module, largest first: `time/<module>` / `step_seconds`, or / their sum."""
    seconds = {key.removeprefix("time/"): value for key, value in row.items()
               if key.startswith("time/") and key.count("/") == 1 and isinstance(value, float)}
    whole = row.get("step_seconds")
    total = whole if isinstance(whole, float) and whole > 0 else sum(seconds.values())
    if not total:
        return {}
    return {name: value / total for name, value in sorted(seconds.items(), key=lambda item: -item[1])}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def _short(value: Any) -> str:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return str(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
