"""Detector for the cause `hang_undetermined`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def hang_undetermined(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """A hang is there and the dumps single nobody out; the finding says what would be needed to tell.

    Also reports what could not be looked at: ranks without a dump, dumps without calls, dumps of other attempts.
    """
    yield from hang.findings(artefacts, "hang_undetermined")
    yield from hang.notes(artefacts)
