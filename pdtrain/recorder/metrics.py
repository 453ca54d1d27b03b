"""metrics.jsonl: one object per logged step, and one line where a later process continues."""

from __future__ import annotations

import time
from pathlib import Path

from pdtrain.recorder.files import LineFile, line


class MetricsLog:
    """The metrics of the whole run, written by rank 0. Errors of the disk are raised (OSError)."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._continues: bool | None = None  # an earlier process wrote here, and this one has not said so yet
        self._written = False

    def resume(self, step: int) -> None:
        """Append the line that makes earlier lines of steps after `step` superseded; nothing in an empty file."""
        self._open()
        if self._file.last_line is not None or self._written:  # an earlier process's lines, or a run that went back
            self._file.write(line({"event": "resume", "time": time.time(), "step": step}))
        self._continues = False

    def write(self, lines: bytes, *, first_step: int) -> None:
        """Append whole `lines`, the first of which is that of `first_step`."""
        self._open()
        if self._continues:
            self.resume(first_step - 1)
        self._file.write(lines)
        self._written = True

    def _open(self) -> None:
        self._file.open()
        if self._continues is None:
            self._continues = self._file.last_line is not None

    def close(self) -> None:
        """Close the file."""
        self._file.close()
