"""A sweep from start to end: what is in the book is not measured again, what is missing is."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diag.errors import UsageError
from pdtrain.plan.hardware import Hardware
from pdtrain.sweep.book import TRIAL, Book
from pdtrain.sweep.execute import execute, prepare
from pdtrain.sweep.machine import machine, same_machine
from pdtrain.sweep.outcome import compare_losses, outcome
from pdtrain.sweep.trials import Trial

#: Progress of a sweep: trials done, all of them, the label at work, seconds it has taken.
Progress = Callable[[int, int, str, float], None]


def machine_row(book: Book, ranks: int, threads: int) -> dict[str, Any]:
    """This machine as the book knows it; measured when it does not.

    Raises:
        UsageError: the book holds results of another machine.
    """
    known = [row for row in book.machines if row.get("ranks") == ranks]
    if known:
        import platform

        if known[-1].get("host") != platform.node() or known[-1].get("cores") != len(os.sched_getaffinity(0)):
            raise UsageError(f"{book.folder} holds trials of another machine ({known[-1].get('host')}, "
                             f"{known[-1].get('cores')} cores); give another --out")  # fmt: skip
        return known[-1]
    found = machine(ranks, threads)
    for row in book.machines:
        if not same_machine(row, found):
            raise UsageError(f"{book.folder} holds trials of another machine ({row.get('host')}); give another --out")
    book.add(found)
    return found


def measure(
    book: Book, trials: list[Trial], hardware: Hardware, *, timeout: float, again: bool, keep: bool,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of `trials`, in their order; `again`: those that failed are tried once more; `keep` the run directories.

    Raises:
        KeyboardInterrupt: after the trial at work was ended; it has no row.
    """
    for index, trial in enumerate(trials):
        known = book.rows.get(trial.key)
        if known is not None and not (again and known["status"] not in ("ok", "refused")):
            continue
        row: dict[str, Any] = {"schema": TRIAL, "trial": trial.key, "label": trial.label, "changes": trial.changes}
        if trial.run is None:
            book.add(row | {"status": "refused", "reason": trial.refused})
            continue
        folder = book.folder / "trials" / trial.key

        def tick(seconds: float, index: int = index, trial: Trial = trial) -> None:
            if progress is not None:
                progress(index, len(trials), trial.label, seconds)

        try:
            command = prepare(trial.run, folder, trial.run.parallel.ranks + trial.run.pools.update_ranks)
            ended = execute(command, folder, timeout=timeout, tick=tick)
        except OSError as error:
            raise UsageError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        found = outcome(trial, ended, folder / "run", hardware)
        book.add(row | found | {"ranks": trial.run.parallel.ranks, "ended": round(time.time(), 1),
                                "load": round(os.getloadavg()[0], 2)})  # fmt: skip
        _tidy(folder, everything=found["status"] == "ok" and not keep)
    rows = [book.rows[trial.key] for trial in trials]
    compare_losses(rows, {trial.key: _comparable(trial) for trial in trials})
    return rows


def _comparable(trial: Trial) -> str:
    """What must be equal for two trials to start at the same loss."""
    if trial.run is None:
        return trial.key
    run, train = trial.run, trial.run.train
    return f"{run.model} {train.seed} {train.sequence_length} {train.train_batch} {run.precision} {run.data}"


def _tidy(folder: Path, *, everything: bool) -> None:
    """Weights are not what a sweep is for; of a failure the evidence stays."""
    shutil.rmtree(folder if everything else folder / "run" / "checkpoints", ignore_errors=True)
