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

MAX_EVIDENCE = 8


@detector("env", needs=HostFactsFile, subject="facts of hosts")
def env_hosts(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """What each host shows, and how they differ."""
    files = artefacts.of(HostFactsFile)
    places = [Place(item.facts, None if item.live else item.path, hosts=len(files)) for item in files]
    yield from merged([(place.facts.host, item) for place in places for item in judge(place)])
    yield from compare(places)


def merged(said: list[tuple[str, Finding | NotChecked]]) -> Iterator[Finding | NotChecked]:
    """`said` by (host, item), what several hosts say in the same words as one: a wrong image is not 64 faults."""
    groups: dict[tuple[str, ...], Finding] = {}
    counts: dict[int, int] = {}
    order: list[Finding | NotChecked] = []
    for host, item in said:
        if isinstance(item, NotChecked):
            if item not in order:
                order.append(item)
            continue
        words = item.summary.replace(host, "HOST") if host else item.summary
        first = groups.setdefault((item.cause, item.severity, words), item)
        counts[id(first)] = counts.get(id(first), 0) + 1
        if first is item:
            order.append(item)
            continue
        first.where.hosts = sorted({*first.where.hosts, *item.where.hosts})
        first.where.gpus = sorted({*first.where.gpus, *item.where.gpus})
        first.evidence += item.evidence[: max(MAX_EVIDENCE - len(first.evidence), 0)]
    for item in order:
        if isinstance(item, Finding) and counts[id(item)] > 1:
            item.summary = f"{counts[id(item)]} hosts alike: {item.summary}"
            item.numbers["alike"] = counts[id(item)]
    yield from order
