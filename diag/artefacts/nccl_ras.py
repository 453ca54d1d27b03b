"""NCCL RAS reports: communicators, their ranks, who is missing. As JSON (`SET FORMAT json`, NCCL 2.28.7 and newer), or
as the text that `ncclras` prints by itself (2.24 and newer; seen: 2.26.2, 2.27.3).

NCCL 2.28.9 leaves out a comma before the `status` of a missing rank: the very reports that matter are no JSON. It is
put back before the second try. The text lists outliers only; what is not listed is in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from diag.artefacts import Artefact, Source, Unreadable

NAME = "nccl-ras"
MAX_BYTES = 256 << 20
_TEXT_VERSION = re.compile(rb"^NCCL version \d+\.\d+", re.M)
_TEXT_HEAD = re.compile(rb"^(?:Job summary\r?\n=+|Communicators\.\.\.)", re.M)
_VERSION = re.compile(r"^NCCL version (\d[\w.+-]{0,40})")
_GROUP = re.compile(r"^ +\d{1,6}(?: +\d{1,9}){5} +[A-Z]+ +[A-Z,]+$")
_SECTION = re.compile(r"^#(\d{1,9}-\d{1,9}) \((\w{1,32})\)")
_DIFFERENT = re.compile(r"^ +Communicator ranks have different (\w{1,30}) operation counts")
_LAUNCHED = re.compile(r"^ +(\d{1,9}) ranks? ha(?:s|ve) launched up to operation (\d{1,18})")
_RANK = re.compile(r"^ +Rank (\d{1,9}) -- GPU (\d{1,4}) managed by process (\d{1,10}) on node (\S{1,255})")
_PROCESS = re.compile(r"^ +Process (\d{1,10}) on node (\S{1,255}) managing GPUs? (\d{1,4})?")
_MISSING = re.compile(r"^ +Missing communicator data from")
_DEAD = re.compile(r"^ +\d{1,9} (?:job process|rank)\w* (?:is|are) considered dead")
_RANKS = re.compile(r"^ +The missing ranks?: ([\d, -]{1,2000})")
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


class Behind(msgspec.Struct, kw_only=True):
    """What the text says of ranks that launched different numbers of an operation: (ranks, up to which), and those
    ranks that it names, with that number."""

    group: str
    operation: str
    counts: list[tuple[int, int]] = []
    named: list[tuple[Member, int]] = []
    line: int = 0


@dataclass(kw_only=True)
class NcclRas(Artefact):
    """One report. `size` is that of the largest communicator where the text says it without naming its ranks."""

    version: str = ""
    communicators: list[Communicator] = field(default_factory=list)
    behind: list[Behind] = field(default_factory=list)
    #: line and words of processes from which nothing came
    silent: list[tuple[int, str, Member]] = field(default_factory=list)
    groups: int = 0
    size: int = 0


ARTEFACT = NcclRas


def sniff(head: bytes, name: str) -> float:
    """A JSON object with communicators and NCCL's version, or the headings of the text."""
    if _TEXT_HEAD.search(head) and _TEXT_VERSION.search(head):
        return 0.95
    return 0.95 if head.lstrip().startswith(b"{") and b'"communicators' in head and b'"nccl_version"' in head else 0.0


def read(source: Source) -> NcclRas | Unreadable:
    """Parse the document whole."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES)
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return _text(NcclRas(path=source.path, format=NAME, bytes=source.bytes), data.decode("utf-8", "replace"))
    try:
        try:
            document = msgspec.json.decode(data, type=_Document)
        except msgspec.DecodeError:
            document = msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2", data), type=_Document)
    except (ValueError, RecursionError) as error:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=f"is no RAS report: {error}")
    return NcclRas(path=source.path, format=NAME, bytes=source.bytes, version=str(document.nccl_version),
                   communicators=document.communicators)


def _text(ras: NcclRas, text: str) -> NcclRas | Unreadable:
    """Take the text apart line by line; a section begins with `#0-0 (hash) WHAT`, its ranks follow what is said."""
    section, missing, dead, number = "", False, False, 0
    now: Behind | None = None
    found: dict[str, Communicator] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _VERSION.match(line):
            ras.version = match[1]
        elif _GROUP.match(line):
            words = line.split()
            ras.groups += 1
            ras.size = max(ras.size, int(words[4]))
        elif match := _SECTION.match(line):
            section, now, missing, dead = match[2], None, False, False
        elif not line.startswith(" "):  # the end of a section, or a heading
            section, now, missing, dead = "", None, False, False
        elif match := _DIFFERENT.match(line):
            now, missing = Behind(group=section, operation=match[1], line=number), False
            ras.behind.append(now)
        elif (match := _LAUNCHED.match(line)) and now is not None:
            now.counts.append((int(match[1]), int(match[2])))
        elif (found_dead := _DEAD.match(line)) or _MISSING.match(line):
            now, missing, dead = None, True, bool(found_dead)
        elif match := _RANKS.match(line):
            ranks = [int(rank) for rank in re.findall(r"\d{1,9}", match[1])]
            where = found.setdefault(section, Communicator(hash=section, size=ras.size))
            where.missing_ranks += [Member(rank=rank) for rank in ranks[:1000]]
        elif match := _RANK.match(line):
            member = Member(rank=int(match[1]), cuda_dev=int(match[2]), pid=int(match[3]), host=match[4])
            if now is not None and now.counts:
                now.named.append((member, _count_of(now)))
            elif missing:
                found.setdefault(section, Communicator(hash=section, size=ras.size)).missing_ranks.append(member)
        elif (match := _PROCESS.match(line)) and missing:
            gpu = int(match[3]) if match[3] else None
            ras.silent.append((number, line.strip()[:200], Member(
                pid=int(match[1]), host=match[2], cuda_dev=gpu, status=Status(considered_dead=dead))))
    ras.lines, ras.communicators = number, list(found.values())
    if not ras.groups and not ras.behind and not ras.silent and not found:
        return Unreadable(path=ras.path, format=NAME, bytes=ras.bytes, problem="holds no table of communicators")
    return ras


def _count_of(now: Behind) -> int:
    """Up to which operation the next named rank came: the text names the members of the groups that are not the
    largest, smallest group first."""
    left = len(now.named)
    usual = max(now.counts)
    for ranks, count in (row for row in now.counts if row != usual):
        if left < ranks:
            return count
        left -= ranks
    return usual[1]
