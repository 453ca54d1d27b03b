"""Hosts by their own facts (`pdtrain diag env`, live or saved): each judged alone, then all compared.

Sees: what `diag/probes/host_*.py` gathered; thresholds stand there. Cannot see: whether a link carries what it should
(that takes traffic), or what a run will do. A state of a machine never leads over what a run's own artefacts say.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.host_facts import HostFactsFile
from diag.detectors import NotChecked, detector
from diag.probes.host_compare import compare
from diag.probes.host_judge import judge
from diag.probes.host_words import Place
from diag.schema import Finding


@detector("env", needs=HostFactsFile, subject="facts of hosts")
def env_hosts(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """What each host shows, and how they differ."""
    files = artefacts.of(HostFactsFile)
    places = [Place(item.facts, None if item.live else item.path, hosts=len(files)) for item in files]
    for place in places:
        yield from judge(place)
    yield from compare(places)
