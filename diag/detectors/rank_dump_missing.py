"""Detector for the cause `rank_dump_missing`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def rank_dump_missing(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Ranks without a dump that all others wait for, when no rank with a dump explains the wait.

    Not seen: whether the process died, hung without the GIL, or its file was just not collected. More than half of a
    group missing is `hang_undetermined`.
    """
    yield from hang.findings(artefacts, "rank_dump_missing")
