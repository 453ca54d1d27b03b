"""A watch on a stopped clock, and files that a test writes step by step."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

from diag.watch.alarms import Change
from diag.watch.live import Watch

#: The files of a test are written now, so its clock has to start now.
START = float(int(time.time()))


class Watched:
    """`tick()` moves the clock by a second (or as told) and returns what was raised or cleared, as texts."""

    def __init__(self, *paths: Path | str, **options: Any) -> None:
        self.watch = Watch([str(path) for path in paths], stopwatch=lambda: 0.0, **options)
        self.now = START
        self.changes: list[Change] = []

    def tick(self, seconds: float = 1.0) -> list[str]:
        self.now += seconds
        changes = self.watch.tick(self.now)
        self.changes += changes
        return [f"{change.event} {change.alarm.finding.cause}" for change in changes]

    def ticks(self, count: int, seconds: float = 1.0) -> list[str]:
        return [said for _ in range(count) for said in self.tick(seconds)]

    @property
    def active(self) -> list[str]:
        return [alarm.finding.cause for alarm in self.watch.alarms.active]


def metrics(steps: range, *, begin: float = START, seconds: float = 1.0, **values: Any) -> str:
    """Lines of metrics.jsonl of a healthy run, with `values` put in (a value, or {step: value})."""
    lines = []
    for step in steps:
        draw = random.Random(step)
        row: dict[str, Any] = {"step": step, "time": begin + step * seconds,
                               "loss": (2 + 4 / (1 + step / 20)) * math.exp(draw.gauss(0, 0.01)),
                               "grad_norm": 0.5 * math.exp(draw.gauss(0, 0.1)), "lr": 1e-3}
        for key, value in values.items():
            if isinstance(value, dict):
                row |= {key: value[step]} if step in value else {}
            else:
                row[key] = value
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(text)


def megatron(steps: range, total: int = 1000, loss: float | None = None) -> str:
    """Iteration lines of a Megatron-LM console log."""
    return "".join(
        f" [2026-01-01 10:{step // 60 % 60:02}:{step % 60:02}] iteration {step:8}/{total:8} | "
        f"consumed samples: {step * 8:12} | "
        f"elapsed time per iteration (ms): 1000.0 | learning rate: 1.0E-04 | global batch size:     8 | "
        f"lm loss: {loss if loss is not None else 2 + 4 / (1 + step / 20) + 0.01 * (step % 3):.6E} | loss scale: 1.0 | "
        f"grad norm: {0.5 + 0.01 * (step % 5):.3f} | number of skipped iterations:   0 | "
        f"number of nan iterations:   0 |\n" for step in steps)


def events(rank: int, steps: range, *, attention: float = 0.1, start: bool = False) -> str:
    """Lines of events/rank_R.jsonl: spans and module times of each step."""
    lines = [json.dumps({"event": "start", "time": START, "rank": rank, "world_size": 4, "host": f"node{rank}",
                         "pid": 100 + rank})] if start else []
    for step in steps:
        own = attention * math.exp(random.Random(step * 7 + rank).gauss(0, 0.01))
        for name, value in (("data", 0.01), ("forward", 0.1), ("backward", 0.2), ("optimizer", 0.02)):
            lines.append(json.dumps({"span": name, "step": step, "start": START + step, "seconds": value}))
        lines.append(json.dumps({"times": {"attention": own, "experts": 0.1, "dispatch": 0.05}, "step": step}))
    return "".join(line.replace(": ", ":").replace(", ", ",") + "\n" for line in lines)
