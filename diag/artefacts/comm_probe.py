"""What `pdtrain diag comm --save FILE` wrote: JSON of schema pdtrain.probe/1."""

from __future__ import annotations

from dataclasses import dataclass

from diag.artefacts import Artefact, Source, Unreadable
from diag.probes.comm.records import SCHEMA, Probe, decode

NAME = "comm-probe"
#: The full matrix of 1,024 ranks takes about 150 MB; nobody measures that.
MAX_BYTES = 64 << 20


@dataclass(kw_only=True)
class CommProbe(Artefact):
    """One probe of the links of a job."""

    probe: Probe


ARTEFACT = CommProbe


def sniff(head: bytes, name: str) -> float:
    """A JSON object that names the schema near its beginning."""
    return 1.0 if head.lstrip().startswith(b"{") and f'"{SCHEMA.split("/")[0]}/'.encode() in head[:256] else 0.0


def read(source: Source) -> CommProbe | Unreadable:
    """Parse the document whole."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        probe = decode(data)
    except (ValueError, RecursionError) as error:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=f"is not a probe: {error}")
    return CommProbe(path=source.path, format=NAME, bytes=source.bytes, probe=probe, ranks=list(range(probe.world)))
