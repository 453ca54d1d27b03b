"""Facts of one host, saved by `pdtrain diag env --save FILE`: JSON of schema pdtrain.host/1."""

from __future__ import annotations

from dataclasses import dataclass

from diag.artefacts import Artefact, Source, Unreadable
from diag.artefacts.own_document import names_schema, whole
from diag.probes.host_facts import SCHEMA, HostFacts, decode

NAME = "host-facts"


@dataclass(kw_only=True)
class HostFactsFile(Artefact):
    """What one host said of itself; `live` when it was asked just now."""

    facts: HostFacts
    live: bool = False


ARTEFACT = HostFactsFile


def sniff(head: bytes, name: str) -> float:
    """The schema's name."""
    return names_schema(head, SCHEMA)


def read(source: Source) -> HostFactsFile | Unreadable:
    """Parse the document whole."""
    facts = whole(source, decode, format_=NAME, noun="a host's facts")
    if isinstance(facts, Unreadable):
        return facts
    return HostFactsFile(path=source.path, format=NAME, bytes=source.bytes, facts=facts, ranks=list(facts.ranks))
