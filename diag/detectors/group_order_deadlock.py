"""Detector for the cause `group_order_deadlock`; see docs/hang.md."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.detectors import NotChecked, detector
from diag.hang import findings as hang
from diag.schema import Finding


@detector("hang", needs=FlightRecorderDump, wants=Unreadable, subject="flight-recorder dumps")
def group_order_deadlock(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Ranks that entered two groups in different orders and wait on each other in a circle.

    Named: those whose order differs from the majority of all ranks with the same groups, or from earlier rounds.
    Without a majority the circle is shown and nobody is named.
    """
    yield from hang.findings(artefacts, "group_order_deadlock")
