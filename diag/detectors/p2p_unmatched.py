"""Detector for the cause `p2p_unmatched`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def p2p_unmatched(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """A send whose receive was never posted, or the reverse; the rank that did not post its half is named.

    Not seen on Gloo, which records no sends and receives.
    """
    yield from hang.findings(artefacts, "p2p_unmatched")
