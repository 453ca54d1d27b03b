"""Probes of the links of a job (`pdtrain diag comm`, live or saved).

Sees: ranks that died or hung while it measured, wrong results, bandwidth below a published floor, and what localisation
said of single links. Cannot see: whether a bandwidth is good where no floor is known; that is listed as not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.comm_probe import CommProbe
from diag.detectors import NotChecked, detector
from diag.probes.comm.judge import judge
from diag.schema import Finding


@detector("comm", needs=CommProbe, subject="probes of links")
def comm_probe(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Every probe by itself."""
    for item in artefacts.of(CommProbe):
        yield from judge(item.probe, item.path)
