"""Detector for the cause `collective_missing_rank`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def collective_missing_rank(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Ranks that others wait for in a collective and that wait for nobody themselves.

    Also: the few that are still in a collective which the rest completed, or whose device has not begun it. Not seen:
    why they did not come; that is in their log or stack.
    """
    yield from hang.findings(artefacts, "collective_missing_rank")
