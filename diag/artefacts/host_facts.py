"""Facts of one host, saved by `pdtrain diag env --save FILE`: JSON of schema pdtrain.host/1."""

from __future__ import annotations

from dataclasses import dataclass

from diag.artefacts import Artefact, Source, Unreadable
from diag.probes.host_facts import SCHEMA, HostFacts, decode

NAME = "host-facts"
#: A host with 16 GPUs and a full kernel log needs a few hundred KiB.
MAX_BYTES = 64 << 20


@dataclass(kw_only=True)
class HostFactsFile(Artefact):
    """What one host said of itself; `live` when it was asked just now."""

    facts: HostFacts
    live: bool = False


ARTEFACT = HostFactsFile


def sniff(head: bytes, name: str) -> float:
    """A JSON object with the schema's name in it."""
    return 1.0 if head.lstrip().startswith(b"{") and f'"{SCHEMA.split("/")[0]}/'.encode() in head[:512] else 0.0


def read(source: Source) -> HostFactsFile | Unreadable:
    """Parse the document whole."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        facts = decode(data)
    except (ValueError, RecursionError) as error:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=f"is not a host's facts: {error}")
    return HostFactsFile(path=source.path, format=NAME, bytes=source.bytes, facts=facts, ranks=list(facts.ranks))
