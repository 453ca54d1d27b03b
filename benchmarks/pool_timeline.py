"""What both pools and the link between them did when, from a run's spans: seconds per step, a drawing, and text.

Used by pool_overlap.py. Times are Unix seconds of one machine's clock. "Exposed" is the time in which a compute rank is
busy with the exchange, or waits for it (`pool_send`, `pool_wait_weights`), and the update rank does not compute either.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

Interval = tuple[float, float]
#: Steps of a start that are not judged: connections, first allocations.
SETTLING = 3
COLOURS = {"forward": "#4c78a8", "backward": "#2f4b7c", "optimizer": "#e0a030", "exchange": "#d64545",
           "sending": "#e9a3a3", "gradients": "#7a9e5b", "weights": "#5ba3a0"}


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's spans by name, each (start, end, step), and its `pool_step` events by step."""

    spans: dict[str, list[tuple[float, float, int]]]
    steps: dict[int, dict[str, Any]]

    def of(self, *names: str, first: int = 0) -> list[Interval]:
        """The spans of these names from step `first` on."""
        return sorted((start, end) for name in names for start, end, step in self.spans.get(name, ()) if step >= first)


def read(run_dir: Path, rank: int) -> Rank:
    """What a rank of a run recorded."""
    spans: dict[str, list[tuple[float, float, int]]] = {}
    steps: dict[int, dict[str, Any]] = {}
    for text in (run_dir / "events" / f"rank_{rank}.jsonl").read_text().splitlines():
        row = json.loads(text)
        if "span" in row and "step" in row:
            spans.setdefault(row["span"], []).append((row["start"], row["start"] + row["seconds"], row["step"]))
        elif row.get("event") == "pool_step":
            steps[row["step"]] = row
    return Rank(spans, steps)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """What of `intervals` lies outside `taken`."""
    found = []
    away = union(taken)
    for start, end in union(intervals):
        at = start
        for left, right in away:
            if right > at and left < end:
                if left > at:
                    found.append((at, left))
                at = max(at, right)
        if at < end:
            found.append((at, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in all."""
    return sum(end - start for start, end in union(intervals))


def exposed(compute: Rank, update: Rank, first: int = SETTLING + 1) -> list[Interval]:
    """When the compute rank had nothing but the exchange to do, and the update rank did not compute either."""
    return without(compute.of("pool_send", "pool_wait_weights", first=first), update.of("optimizer"))


def begins(compute: Rank) -> dict[int, float]:
    """step -> when the compute rank began with its data."""
    return {step: start for start, _, step in compute.spans["data"]}


def per_step(compute: Rank, update: Rank) -> dict[str, float]:
    """Medians over the steps after the first: seconds of the step, of computing, exposed, and of the optimizer.

    From the beginning of a step to that of the next: in `stream` the exchange of one step reaches into the next one.
    """
    starts = begins(compute)
    work = without(compute.of("forward", "backward"), compute.of("pool_send", "pool_wait_weights"))
    kinds = {"compute": work, "exposed": exposed(compute, update, 0), "optimizer": update.of("optimizer"),
             "waiting": compute.of("pool_wait_weights"), "sending": compute.of("pool_send")}
    rows: dict[str, list[float]] = {name: [] for name in ("step", *kinds)}
    for step in sorted(starts)[SETTLING:-1]:
        window = (starts[step], starts[step + 1])
        rows["step"].append(window[1] - window[0])
        for name, intervals in kinds.items():
            rows[name].append(length(clip(intervals, window)))
    return {name: median(values) for name, values in rows.items()}


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of them lies in `window`."""
    return [(max(start, window[0]), min(end, window[1])) for start, end in intervals
            if end > window[0] and start < window[1]]


def lanes(compute: Rank, update: Rank, link: Sequence[tuple[float, float, float]],
          window: Interval) -> list[tuple[str, list[tuple[str, list[Interval]]]]]:
    """(lane, [(colour's name, intervals)]) in `window`. `link`: (from, to, bytes up, bytes down) shares, 0 to 1."""
    up = [(a, b) for a, b, share, _ in link if share > 0.3]  # type: ignore[misc]
    down = [(a, b) for a, b, _, share in link if share > 0.3]  # type: ignore[misc]
    send, wait = compute.of("pool_send"), compute.of("pool_wait_weights")
    work = [("forward", without(compute.of("forward"), wait)), ("backward", without(compute.of("backward"), send))]
    shown = [
        ("compute", [*work, ("exchange", union([*send, *wait]))]),
        ("link up", [("gradients", union(up))]),
        ("link down", [("weights", union(down))]),
        ("update", [("optimizer", update.of("optimizer")), ("sending", update.of("pool_send"))]),
    ]
    return [(name, [(kind, clip(intervals, window)) for kind, intervals in parts]) for name, parts in shown]


def as_text(drawn: list[tuple[str, list[tuple[str, list[Interval]]]]], window: Interval, width: int = 88) -> str:
    """The lanes as lines of characters: F forward, B backward, # exchange, g gradients, w weights, O optimizer."""
    letters = {"forward": "F", "backward": "B", "optimizer": "O", "exchange": "#", "sending": "s", "gradients": "g",
               "weights": "w"}
    begin, end = window
    lines = []
    for name, parts in drawn:
        row = []
        for column in range(width):
            cell = (begin + (end - begin) * column / width, begin + (end - begin) * (column + 1) / width)
            best = max(((length(clip(i, cell)), letters[k]) for k, i in parts), default=(0.0, "."))
            row.append(best[1] if best[0] > 0.3 * (cell[1] - cell[0]) else ".")
        lines.append(f"{name:>10} {''.join(row)}")
    return "\n".join(lines)


def as_svg(panels: list[tuple[str, list[tuple[str, list[tuple[str, list[Interval]]]]], Interval]]) -> str:
    """Panels (title, lanes, window) below each other on one scale, with a legend."""
    left, row, gap, wide = 84, 20, 46, 780
    longest = max(end - begin for _, _, (begin, end) in panels)
    scale = (wide - left - 10) / longest
    shapes: list[str] = []
    y = 10.0
    for title, drawn, (begin, _) in panels:
        shapes.append(f'<text x="{left}" y="{y + 12:g}" font-weight="bold">{escape(title)}</text>')
        y += 20
        for name, parts in drawn:
            shapes.append(f'<text x="{left - 8}" y="{y + 13:g}" text-anchor="end">{escape(name)}</text>')
            for kind, intervals in parts:
                shapes += [f'<rect x="{left + (a - begin) * scale:.1f}" y="{y + 2:g}" '
                           f'width="{max((b - a) * scale, 0.4):.1f}" height="{row - 4}" fill="{COLOURS[kind]}"/>'
                           for a, b in intervals]
            y += row
        y += gap - row
    y -= gap - row
    shapes += [f'<text x="{left + s * scale:.1f}" y="{y + 12:g}" fill="#666">{s} s</text>'
               for s in range(int(longest) + 1)]
    y += 26
    words = {"forward": "forward", "backward": "backward", "exchange": "exchange: sending or waiting",
             "gradients": "gradients on the wire", "weights": "weights on the wire", "optimizer": "optimizer",
             "sending": "handing weights over"}
    x = left
    for kind, text in words.items():
        if x + 24 + 6.2 * len(text) > wide:
            x, y = left, y + 18
        shapes.append(f'<rect x="{x}" y="{y:g}" width="12" height="12" fill="{COLOURS[kind]}"/>'
                      f'<text x="{x + 16}" y="{y + 10:g}">{text}</text>')
        x += 30 + int(6.2 * len(text))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {y + 22:g}" font-family="sans-serif" '
            f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(shapes)}</svg>\n')
