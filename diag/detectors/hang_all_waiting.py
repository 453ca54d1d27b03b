"""Detector for the cause `hang_all_waiting`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def hang_all_waiting(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Every member issued the same call and none completes: network, GPU or communication library.

    The first such call that nothing earlier holds up is named, and no rank.
    """
    yield from hang.findings(artefacts, "hang_all_waiting")
