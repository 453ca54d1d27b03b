"""The report of `pdtrain diag pools`: the detectors of the topic, and a plain word where there are no pools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diag.artefacts import Artefacts, Progress
from diag.artefacts.run_config import RunConfig
from diag.detectors import detectors
from diag.diagnose import diagnose, read
from diag.discover import discover
from diag.pools.gather import separated
from diag.schema import Report
from diag.starts import last_starts


def pools_report(paths: Sequence[str], *, signatures: Path | None = None, progress: Progress | None = None) -> Report:
    """As `diagnose`. A run that is not separated is well, and its headline says that there is nothing to judge."""
    read: list[Artefacts] = []
    report = diagnose(paths, only="pools", signatures=signatures, progress=progress, inspect=read.append)
    if report.verdict in ("healthy", "unknown") and not separated(read[0]) and not report.nothing_read():
        off = any(config.get("pools.mode") == "off" for config in read[0].of(RunConfig))
        if off or report.verdict == "healthy":
            report.verdict = "healthy"
            report.headline = "No pools here: " + ("pools.mode = \"off\", one pool does both phases." if off else
                                                   "no rank recorded one.")
    return report


def read_runs(paths: Sequence[str | Path]) -> Artefacts:
    """What the detectors of this topic would be given of run directories. Raises `UsageError` for a missing path."""
    items, _ = read(discover([str(path) for path in paths]), detectors("pools"))
    return Artefacts(last_starts(items)[0])
