"""Detector for the cause `collective_mismatch`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def collective_mismatch(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Members of one group that call different operations, dtypes or sizes under one sequence number.

    The strict majority is right, whoever rank 0 is with. Ties are settled by sister groups (same description) or by
    what the group did before; else they are `hang_undetermined`. Uneven sizes that add up are legal.
    """
    yield from hang.findings(artefacts, "collective_mismatch")
