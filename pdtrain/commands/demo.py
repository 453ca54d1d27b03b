"""`pdtrain demo`: train the preset `tiny` on two processes here, then diagnose what it left behind."""

from __future__ import annotations

import time
from pathlib import Path

import click

PROCESSES = 2


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to record; default: a new folder under runs/.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps; default: the preset's.")
def demo(run_dir: Path | None, steps: int | None) -> int:
    """Train a small mixture-of-experts model on two processes of this machine, then diagnose the run.

    The model reads the source code of Python's standard library, byte by byte. Attention is split over both processes
    (TP 2), the experts are divided between them (EP 2), the router is replicated.
    """
    from pdtrain.demo import run_demo

    return run_demo(run_dir or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}", steps, PROCESSES)
