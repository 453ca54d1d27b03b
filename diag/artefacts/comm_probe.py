"""What `pdtrain diag comm --save FILE` wrote: JSON of schema pdtrain.probe/1."""

from __future__ import annotations

from dataclasses import dataclass

from diag.artefacts import Artefact, Source, Unreadable
from diag.artefacts.own_document import names_schema, whole
from diag.probes.comm.records import SCHEMA, Probe, decode

NAME = "comm-probe"


@dataclass(kw_only=True)
class CommProbe(Artefact):
    """One probe of the links of a job."""

    probe: Probe


ARTEFACT = CommProbe


def sniff(head: bytes, name: str) -> float:
    """The schema's name."""
    return names_schema(head, SCHEMA)


def read(source: Source) -> CommProbe | Unreadable:
    """Parse the document whole."""
    probe = whole(source, decode, format_=NAME, noun="a probe")
    if isinstance(probe, Unreadable):
        return probe
    return CommProbe(path=source.path, format=NAME, bytes=source.bytes, probe=probe, ranks=list(range(probe.world)))
