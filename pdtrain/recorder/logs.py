"""logs/rank_R.log: what the rank's loggers say, with UTC times."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path


class _RankLog(logging.FileHandler):
    """logs/rank_R.log. A disk that refuses is reported to the recorder, never raised into the caller's log call."""

    def __init__(self, path: Path, failed: Callable[[BaseException], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace", delay=True)
        self._report = failed

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._report(error)


def attach_rank_log(path: Path, rank: int, failed: Callable[[BaseException], None]) -> logging.Handler:
    """Add a handler for INFO and above to the root logger; the file appears with its first line."""
    handler = _RankLog(path, failed)
    handler.setLevel(logging.INFO)
    handler.setFormatter(_Utc(f"%(asctime)s [rank{rank}] %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    ours = logging.getLogger("pdtrain")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)  # the root's default would keep the trainer's own notes out of the file
    return handler


class _Utc(logging.Formatter):
    """Times as 2025-01-31T12:00:00.123Z, so that the logs of hosts in different zones join."""

    converter = time.gmtime  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
