"""Timing of two step functions that take turns in one process, so that both see the same machine."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

Step = Callable[[], float]  #: does one step, returns its loss


class NoSpans:
    """Stands where a recorder would: times nothing."""

    def span(self, name: str) -> nullcontext[None]:
        return nullcontext()


@dataclass(slots=True)
class Timing:
    """Seconds per step of each round, on the wall and of this process on all its CPUs."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median round."""
        return statistics.median(self.wall)


def alternate(one: Step, other: Step, *, rounds: int, warm_up: int, budget: float) -> tuple[Timing, Timing]:
    """Run `one` and `other` in turn, the leader changing each round; stop after `rounds` or `budget` seconds.

    At least one round is measured. Turns cancel drift of the clock rate; the changing leader cancels what one leaves
    in the caches for the other.
    """
    steps, timings = (one, other), (Timing(), Timing())
    for _ in range(warm_up):
        for step in steps:
            step()
    began = time.perf_counter()
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            cpu, wall = time.process_time(), time.perf_counter()
            loss = steps[which]()
            timings[which].wall.append(time.perf_counter() - wall)
            timings[which].cpu.append(time.process_time() - cpu)
            timings[which].losses.append(loss)
        if time.perf_counter() - began > budget:
            break
    return timings


def paired_ratio(one: list[float], other: list[float]) -> float:
    """Median over rounds of other / one: above 1 means that `one` is faster."""
    return statistics.median(b / a for a, b in zip(one, other, strict=True))


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    import torch

    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    load = Path("/proc/loadavg").read_text().split()[0] if Path("/proc/loadavg").exists() else None
    return {
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "native_bf16_gemm": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": load,
    }


def commit() -> str | None:
    """The short commit of this checkout, "+" appended where tracked files differ from it; None outside a checkout."""
    root = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip()
