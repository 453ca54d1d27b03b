"""What is waited in: per group the first call that somebody has not completed, who came to it and who did not."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from diag.artefacts.fr_dump import Entry
from diag.hang import ops, sizes
from diag.hang.groups import MEANINGLESS, Group, Job, Member

#: Gloo retires a failed call like a completed one. So many calls beyond the slowest member's last are taken for
#: failed; more than that is a running job whose ranks were dumped one after the other.
FAILED_AT_ONCE = 8


@dataclass(eq=False)
class Item:
    """One thing waited in. All fields hold global ranks.

    `waiting`: came and are not done. `passed`: done with it. `missing`: their dumps show that they did not come.
    `behind`: still in an earlier call of the group. `absent`: left no dump. `unknown`: no telling (dump unreadable,
    or overwritten). `what` is "collective", "send" or "recv"; of those, `missing` is the peer. `assumed`: nothing says
    that anybody waits, only that a rank left no dump and that a failed call would look no different.
    """

    group: Group
    seq: int
    what: str = "collective"
    calls: dict[int, list[Entry]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    disagreement: sizes.Disagreement | None = None
    assumed: bool = False

    @property
    def awaited(self) -> list[int]:
        """Ranks that `waiting` waits for, as far as it can be told."""
        return [*self.missing, *self.behind, *self.absent, *self.unknown]

    @cached_property
    def time_ns(self) -> int:
        """When the first of `waiting` came, 0 for unknown."""
        times = [entry.time_ns for rank in self.waiting for entry in self.calls.get(rank, []) if entry.time_ns > 0]
        return min(times, default=0)

    def record(self, rank: int) -> int | None:
        """Where in the rank's own order of calls this one stands."""
        return min((entry.record for entry in self.calls.get(rank, [])), default=None)

    def sample(self) -> Entry:
        """One waiting call, to describe the item by."""
        return next(self.calls[rank][0] for rank in self.waiting if self.calls.get(rank))


def items(job: Job) -> list[Item]:
    """Every collective that somebody waits in, one per group and sequence number."""
    found = []
    for group in job.groups:
        assumed = _refuse_impossible(job, group)
        firsts = {m.first_pending for m in group.by_rank.values() if m.first_pending is not None}
        for seq in sorted(firsts):
            found.append(_item(job, group, seq, assumed=assumed))
    for item in found:
        item.disagreement = _disagreement(job, item)
    return found


def _refuse_impossible(job: Job, group: Group) -> bool:
    """Gloo marks a call that failed like one that is done. Nobody completes an all_reduce that a member never called,
    or that members call with different sizes: such calls are put back among the pending ones. So is, and then the
    answer is True, the last call of all where a member left no dump: it may have failed as well as not."""
    members = [m for m in group.by_rank.values() if m.issued is not None]
    counts = [m.issued for m in members if m.issued is not None]
    if not group.retires or not counts:
        return False
    least, most = min(counts), max(counts)
    if 0 < most - least <= FAILED_AT_ONCE:
        for member in members:
            _put_back(member, least + 1)
    elif most == least:
        last = {m.rank: calls for m in members if (calls := m.calls(most))}
        wrong = sizes.disagreement(last, len(group.ranks)) if len(last) > 1 else None
        if wrong is not None:
            for member in members:
                _put_back(member, most)
        elif job.absent & set(group.ranks) and not any(m.pending for m in members):
            for member in members:
                _put_back(member, most)
            return True
    return False


def _put_back(member: Member, first: int) -> None:
    for seq in [seq for seq, calls in member.done.items()
                if seq >= first and ops.kind(calls[0].op) in ops.SYNCHRONISING]:
        member.pending[seq] = member.done.pop(seq)


def _item(job: Job, group: Group, seq: int, *, assumed: bool) -> Item:
    item = Item(group, seq, assumed=assumed)
    proven = False  # somebody completed what nobody completes alone: all members have come so far
    for rank in group.ranks:
        member = group.by_rank.get(rank)
        if member is None:
            (item.absent if rank in job.absent else item.unknown).append(rank)
            continue
        calls = member.calls(seq)
        if calls:
            item.calls[rank] = calls
        first = member.first_pending
        if first == seq:
            item.waiting.append(rank)
        elif member.issued is None:
            item.unknown.append(rank)
        elif member.issued < seq:
            item.missing.append(rank)
        elif first is not None and first < seq:
            item.behind.append(rank)
        else:
            item.passed.append(rank)
            proven = proven or (not group.retires and bool(calls) and ops.kind(calls[0].op) in ops.SYNCHRONISING)
    if proven:
        item.passed += item.absent + item.unknown
        item.absent, item.unknown = [], []
    return item


def _disagreement(job: Job, item: Item) -> sizes.Disagreement | None:
    group = item.group
    versions = {job.dumps[rank].dump.version for rank in item.calls}
    return sizes.disagreement(item.calls, len(group.ranks), exact=len(versions) == 1,
                              sisters=dict(_sisters(job, group, item.seq)), usual=_usual(group, item))


def _sisters(job: Job, group: Group, seq: int) -> Iterator[tuple[int, list[Entry]]]:
    """The calls with the same number in groups of the same description and size: what the others do there."""
    if group.desc in MEANINGLESS:
        return
    for other in job.groups:
        if other is not group and other.desc == group.desc and len(other.ranks) == len(group.ranks):
            for rank, member in other.by_rank.items():
                if calls := member.calls(seq):
                    yield rank, calls


def _usual(group: Group, item: Item) -> dict[Hashable, int]:
    """Sizes with which this group completed the same operation before, and how often."""
    operation = {ops.name(calls[0].op) for calls in item.calls.values()}
    counts: dict[Hashable, int] = {}
    for member in group.by_rank.values():
        for calls in member.done.values():
            if len(calls) == 1 and ops.name(calls[0].op) in operation:
                key = sizes.size_key(calls[0])
                counts[key] = counts.get(key, 0) + 1
    return counts


def diverged_earlier(item: Item) -> tuple[int, sizes.Disagreement] | None:
    """The first completed call of the group in which the members already called different operations.

    Sizes are not looked at: they may differ legally, and these calls did complete.
    """
    group = item.group
    seqs = sorted({seq for m in group.by_rank.values() for seq in m.done if seq < item.seq})
    for seq in seqs:
        named = {m.rank: calls for m in group.by_rank.values() if (calls := m.calls(seq))}
        if len(named) * 2 <= len(group.ranks) or any(e.op.name == "" for calls in named.values() for e in calls):
            continue
        wrong = sizes.split(sizes.operations(named, exact=False))
        if wrong is not None and wrong.decided:
            return seq, sizes.Disagreement("operation", wrong.odd, wrong.votes)
    return None
