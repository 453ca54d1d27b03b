"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases. Conveniences: none may stop the black box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Sink(Protocol):
    """Takes rows of metrics as plain values. What it raises switches it off."""

    name: str

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Take the rows of one logging interval, in order."""

    def close(self) -> None:
        """Write what is left."""


def open_sinks(run_dir: Path, tensorboard: bool, wandb: bool, complain: Callable[[str], None]) -> list[Sink]:
    """The sinks that are wanted and installed; a missing library or failed login is one note."""
    found: list[Sink] = []
    for wanted, kind, remedy in ((tensorboard, TensorBoard, "pip install tensorboard"),
                                 (wandb, WeightsAndBiases, "pip install wandb")):
        if not wanted:
            continue
        try:
            found.append(kind(run_dir))
        except ImportError:
            complain(f"no {kind.name} files are written: it is not installed ({remedy})")
        except Exception as error:
            complain(f"no {kind.name} files are written: {error!r}")
    return found


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row, NaN and infinities as such; texts and lists are left out."""
    for key, value in row.items():
        if key in ("step", "time"):
            continue
        if isinstance(value, str):
            value = _SPECIAL.get(value)
        if isinstance(value, (int, float)):
            yield key, float(value)


class TensorBoard:
    """tensorboard/: one event per step that holds all its scalars (add_scalar's event per scalar costs ten times)."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._event, self._summary = Event, Summary
        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard"), flush_secs=30)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Queue the rows; the library's own thread writes them."""
        writer = self._writer._get_file_writer()  # the public add_scalar makes one event per scalar
        for row in rows:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in scalars(row)]
            writer.add_event(
                self._event(summary=self._summary(value=values)), step=int(row["step"]), walltime=row["time"]
            )

    def close(self) -> None:
        """Write what waits and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per process start, in the run directory. Project and mode come from W&B's own settings."""

    name = "W&B"

    def __init__(self, run_dir: Path) -> None:
        import wandb

        self._run = wandb.init(dir=str(run_dir), name=run_dir.name, resume="allow")

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows' scalars under their own steps."""
        for row in rows:
            self._run.log(dict(scalars(row)), step=int(row["step"]))

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()
