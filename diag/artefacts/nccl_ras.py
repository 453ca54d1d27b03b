"""NCCL RAS reports as JSON (`SET FORMAT json`, NCCL 2.28.7 and newer): communicators, their ranks, who is missing.

NCCL 2.28.9 leaves out a comma before the `status` of a missing rank: the very reports that matter are no JSON. It is
put back before the second try.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from diag.artefacts import Artefact, Source, Unreadable

NAME = "nccl-ras"
MAX_BYTES = 256 << 20
_NO_COMMA = re.compile(rb'("nvml_dev"\s*:\s*-?\d{1,9})(\s*"status"\s*:)')


class Status(msgspec.Struct, kw_only=True):
    """State of one member."""

    init_state: str | int | None = None
    async_error: str | int | None = None
    abort_flag: bool | int = False
    unresponsive: bool | int = False
    considered_dead: bool | int = False


class Member(msgspec.Struct, kw_only=True):
    """One rank of a communicator; the rank is its number in that communicator."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    cuda_dev: int | None = None
    status: Status = msgspec.field(default_factory=Status)
    collective_counts: dict[str, int] = {}


class Communicator(msgspec.Struct, kw_only=True):
    """One communicator."""

    hash: str | int = ""
    size: int = 0
    ranks: list[Member] = []
    missing_ranks: list[Member] = []


class _Document(msgspec.Struct, kw_only=True):
    nccl_version: str | int = ""
    timestamp: str | float = ""
    communicators: list[Communicator] = []


@dataclass(kw_only=True)
class NcclRas(Artefact):
    """One report."""

    version: str = ""
    communicators: list[Communicator] = field(default_factory=list)


ARTEFACT = NcclRas


def sniff(head: bytes, name: str) -> float:
    """A JSON object with communicators and NCCL's version."""
    return 0.95 if head.lstrip().startswith(b"{") and b'"communicators' in head and b'"nccl_version"' in head else 0.0


def read(source: Source) -> NcclRas | Unreadable:
    """Parse the document whole."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES)
    try:
        try:
            document = msgspec.json.decode(data, type=_Document)
        except msgspec.DecodeError:
            document = msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2", data), type=_Document)
    except (ValueError, RecursionError) as error:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=f"is no RAS report: {error}")
    return NcclRas(path=source.path, format=NAME, bytes=source.bytes, version=str(document.nccl_version),
                   communicators=document.communicators)
