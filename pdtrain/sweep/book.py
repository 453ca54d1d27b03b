"""The results of a sweep: one JSONL in its folder, one line per trial, whole or absent.

    {"schema": "pdtrain.machine/1", "ranks": 2, "host": "node7", "device": "cpu", "flops": {...}, ...}
    {"schema": "pdtrain.trial/1", "trial": "6c0f...", "status": "ok", "step_seconds": 0.31, ...}

A line is appended by one write and synchronised; what `kill -9` may cut is the last line, which is removed when the
file is opened again. A lock keeps a second sweep out of the same folder.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from diag.errors import UsageError
from pdtrain.recorder.files import LineFile, line

TRIAL, MACHINE = "pdtrain.trial/1", "pdtrain.machine/1"
NAME = "trials.jsonl"


class Book:
    """The rows of `folder`, and the right to add to them."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError: the folder cannot be written, or another sweep works in it."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            self._file = LineFile(folder / NAME)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another `pdtrain sweep` works in {folder}; wait for it, or give another --out"
                                 ) from None  # fmt: skip
            self._file.open()
        except OSError as error:
            raise UsageError(f"cannot write to --out {folder}: {error.strerror}") from None
        self.rows: dict[str, dict[str, Any]] = {}
        self.machines: list[dict[str, Any]] = []
        for number, text in enumerate((folder / NAME).read_bytes().splitlines(), 1):
            self._take(number, text)

    def _take(self, number: int, text: bytes) -> None:
        try:
            row = msgspec.json.decode(text)
        except msgspec.DecodeError:
            row = None
        if isinstance(row, dict) and row.get("schema") == TRIAL and isinstance(row.get("trial"), str):
            self.rows[row["trial"]] = row
        elif isinstance(row, dict) and row.get("schema") == MACHINE:
            self.machines.append(row)
        else:
            print(f"pdtrain: warning: {self.folder / NAME}:{number} is no row of a sweep; passed over", file=sys.stderr)

    def add(self, row: dict[str, Any]) -> None:
        """Append one row. Raises UsageError when the disk refuses it."""
        try:
            self._file.write(line(row))
            if self._file._fd is not None:
                os.fsync(self._file._fd)
        except OSError as error:
            raise UsageError(f"{self.folder / NAME}: cannot be written: {error.strerror}") from None
        if row["schema"] == TRIAL:
            self.rows[row["trial"]] = row
        else:
            self.machines.append(row)

    def close(self) -> None:
        self._file.close()
        os.close(self._lock)
