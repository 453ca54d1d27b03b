"""Process groups as they are, not as each rank names them: one `Group` per member set and description.

Names may be hashes, or small integers that mean another group on another rank. So a group's identity is its sorted
global ranks and its description; where two groups share both (a TP group made twice), the name or, failing that, the
order in which they were made tells them apart. Gloo records no members: there a group is whoever used its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diag.artefacts import fr_dump
from diag.artefacts.flight_recorder import FlightRecorderDump
from diag.artefacts.fr_dump import Entry, GroupLog
from diag.hang import ops

#: Descriptions that say nothing; two groups that share one of these are not sisters.
MEANINGLESS = frozenset({"", "undefined", "default_pg"})
#: Without member lists, a rank number so many times the number of dumps is no rank's but part of the file's name.
PLAUSIBLE_WORLD = 32
#: A world larger than this is a misread number in a file name.
MAX_WORLD = 1 << 20


@dataclass(slots=True)
class Member:
    """One rank in one group. `issued`: its highest collective number, None when it cannot be told.

    `pending` and `done` hold calls by sequence number (several for a coalesced batch), `p2p` pending sends and
    receives. `log` is None where the rank recorded nothing about the group.
    """

    rank: int
    log: GroupLog | None
    issued: int | None
    pending: dict[int, list[Entry]] = field(default_factory=dict)
    done: dict[int, list[Entry]] = field(default_factory=dict)
    p2p: list[Entry] = field(default_factory=list)
    wrapped: bool = False

    @property
    def first_pending(self) -> int | None:
        return min(self.pending, default=None)

    def calls(self, seq: int) -> list[Entry]:
        """The calls with number `seq`; without the closing entry of a batch when its members are there."""
        found = self.pending.get(seq) or self.done.get(seq) or []
        inner = [entry for entry in found if not ops.closes_batch(entry)]
        return inner or found


@dataclass(slots=True)
class Group:
    """`ranks`: all members in order, as far as known. `inferred`: from use, because the dumps list no members.

    `by_rank` has the members whose dumps were read; `desc` is "" for none.
    """

    ranks: tuple[int, ...]
    desc: str
    name: str
    by_rank: dict[int, Member] = field(default_factory=dict)
    inferred: bool = False

    @property
    def label(self) -> str:
        """What to call it: its description, or its name where there is none."""
        if self.desc not in MEANINGLESS or self.desc == "default_pg":
            return self.desc
        return f"group {self.name}" if self.name else "a group"

    @property
    def retires(self) -> bool:
        """True on Gloo, which marks a call that failed (a peer is gone) exactly like one that is done."""
        return any(calls[0].op.backend == "gloo" for member in self.by_rank.values()
                   for calls in (*member.done.values(), *member.pending.values()))

    def number(self, member: int) -> int | None:
        """The global rank of the group's own rank `member`."""
        return self.ranks[member] if 0 <= member < len(self.ranks) else None


@dataclass(slots=True)
class Job:
    """All that is known: dumps by rank, ranks without a dump, ranks whose dump cannot be read, groups of two or more.

    `extra` are dumps left aside, with the reason.
    """

    dumps: dict[int, FlightRecorderDump]
    absent: set[int]
    unreadable: set[int]
    groups: list[Group]
    extra: list[str] = field(default_factory=list)

    @property
    def world(self) -> int:
        return len(self.dumps) + len(self.absent) + len(self.unreadable)

    def is_idle(self, rank: int) -> bool:
        """True when the rank's dump was read and shows nothing that it waits in."""
        dump = self.dumps.get(rank)
        return dump is not None and not any(
            m.pending or m.p2p for g in self.groups if (m := g.by_rank.get(rank)) is not None)


def build(dumps: Iterable[FlightRecorderDump], unreadable: Iterable[int] = ()) -> Job:
    """The `Job` of all `dumps`; `unreadable` are ranks whose dump exists and cannot be read."""
    by_rank, extra = _one_each(dumps)
    damaged = {rank for rank in unreadable if rank not in by_rank}
    known = {rank for dump in by_rank.values() for log in dump.dump.groups for rank in fr_dump.members(log.ranks)}
    ranks = {rank for rank in known | damaged | set(by_rank) if 0 <= rank < MAX_WORLD}
    most = max(ranks, default=-1)
    if not known and most < PLAUSIBLE_WORLD * (len(ranks) + 1):
        ranks |= set(range(most + 1))  # Gloo: ranks count from 0, so a gap in the numbers is a dump that is not there
    job = Job(by_rank, ranks - set(by_rank) - damaged, damaged, [], extra)
    job.groups = [group for group in [*_listed(by_rank), *_unlisted(by_rank, ranks)] if len(group.ranks) > 1]
    for group in job.groups:
        _fill(group, by_rank)
    return job


def _one_each(dumps: Iterable[FlightRecorderDump]) -> tuple[dict[int, FlightRecorderDump], list[str]]:
    """One dump per rank: of several, all of the folder with the newest entries, then the newest of each rank."""
    named = [dump for dump in dumps if dump.rank is not None]
    extra: list[str] = []
    ranks = [dump.rank for dump in named]
    folders = {dump.directory for dump in named}
    if len(set(ranks)) < len(ranks) and len(folders) > 1:
        newest = max(named, key=lambda d: d.dump.newest_ns).directory
        seen = {dump.rank for dump in named if dump.directory == newest}
        twice = {dump.directory for dump in named if dump.directory != newest and dump.rank in seen}
        named = [dump for dump in named if dump.directory not in twice]
        extra += [f"dumps of another run or attempt in {folder}" for folder in sorted(twice)]
    chosen: dict[int, FlightRecorderDump] = {}
    for dump in sorted(named, key=lambda d: (d.dump.newest_ns, d.dump.newest_record, d.dump.entries)):
        assert dump.rank is not None
        if dump.rank in chosen:
            extra.append(f"another dump of rank {dump.rank}, {chosen[dump.rank].path}")
        chosen[dump.rank] = dump
    return dict(sorted(chosen.items())), extra


def _listed(dumps: dict[int, FlightRecorderDump]) -> list[Group]:
    """Groups whose members the dumps list."""
    found: dict[tuple[tuple[int, ...], str], dict[int, list[GroupLog]]] = {}
    for rank, dump in dumps.items():
        for log in dump.dump.groups:
            ranks = fr_dump.members(log.ranks)
            if rank in ranks:
                found.setdefault((ranks, log.desc), {}).setdefault(rank, []).append(log)
    for ranks, desc in [key for key in found if not key[1]]:  # 1.4 has no descriptions: join the only candidate
        others = [key for key in found if key[0] == ranks and key[1]]
        if len(others) == 1 and not set(found[ranks, desc]) & set(found[others[0]]):
            found[others[0]].update(found.pop((ranks, desc)))
    groups = []
    for (ranks, desc), logs in found.items():
        for name, members in _apart(logs):
            groups.append(Group(ranks, desc, name, {rank: _member(rank, log, dumps) for rank, log in members.items()}))
    return groups


def _apart(logs: dict[int, list[GroupLog]]) -> list[tuple[str, dict[int, GroupLog]]]:
    """Groups with equal members and description: by name where all ranks use the same names, else by order."""
    most = max(map(len, logs.values()))
    if most == 1:
        names = {log.name for rows in logs.values() for log in rows}
        return [(min(names, key=lambda n: (len(n), n)), {rank: rows[0] for rank, rows in logs.items()})]
    name_sets = {frozenset(log.name for log in rows) for rows in logs.values()}
    if len(name_sets) == 1:
        return [(name, {rank: next(log for log in rows if log.name == name) for rank, rows in logs.items()})
                for name in sorted(next(iter(name_sets)))]
    ordered = {rank: sorted(rows, key=lambda g: (len(g.name), g.name)) for rank, rows in logs.items()}
    return [(next(rows[i].name for rows in ordered.values() if len(rows) > i),
             {rank: rows[i] for rank, rows in ordered.items() if len(rows) > i}) for i in range(most)]


def _unlisted(dumps: dict[int, FlightRecorderDump], ranks: set[int]) -> list[Group]:
    """Groups without a member list (Gloo): the default group is everybody, any other whoever used its name."""
    found: dict[tuple[str, str], dict[int, GroupLog]] = {}
    for rank, dump in dumps.items():
        for log in dump.dump.groups:
            if not fr_dump.members(log.ranks):
                found.setdefault((log.name, log.desc), {})[rank] = log
    groups = []
    for (name, desc), logs in found.items():
        everybody = desc == "default_pg" or (name == "0" and desc in MEANINGLESS)
        members = {rank: _member(rank, log, dumps) for rank, log in logs.items()}
        groups.append(Group(tuple(sorted(ranks if everybody else logs)), desc, name, members, inferred=not everybody))
    return groups


def _member(rank: int, log: GroupLog, dumps: dict[int, FlightRecorderDump]) -> Member:
    member = Member(rank, log, log.issued or None, wrapped=dumps[rank].dump.wrapped)
    for entry in log.entries:
        if entry.p2p:
            if not entry.done:
                member.p2p.append(entry)
        else:
            (member.done if entry.done else member.pending).setdefault(entry.seq, []).append(entry)
    for seq in set(member.pending) & set(member.done):  # a batch is complete when all of it is
        member.pending[seq] += member.done.pop(seq)
    return member


def _fill(group: Group, dumps: dict[int, FlightRecorderDump]) -> None:
    """Members that recorded nothing about the group, and how far those came that have no entry in the ring."""
    mixed = any(member.log is not None and member.log.has_p2p for member in group.by_rank.values())
    for rank in group.ranks:
        if rank not in dumps:
            continue
        member = group.by_rank.get(rank)
        if member is None:
            member = group.by_rank[rank] = Member(rank, None, None, wrapped=dumps[rank].dump.wrapped)
        if member.issued is None:
            listed = member.log is not None and member.log.ranks and not mixed  # Gloo's numbers count p2p too
            status = member.log.status_issued if member.log is not None and listed else -1
            if status >= 0:
                member.issued = status
            elif not member.wrapped:
                member.issued = 0
    group.by_rank = dict(sorted(group.by_rank.items()))
