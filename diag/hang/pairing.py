"""Sends and receives: which have no other half.

NCCL names a p2p call by the group's own ranks ("send 0->1"), numbers it per rank only, and completes both halves at
about the same time. So for a pending half the question is whether the peer has one too: pending halves on both sides
belong together; where the rings reach back to the start, the totals of both sides are compared as well. Gloo records
no p2p at all.
"""

from __future__ import annotations

from diag.artefacts.fr_dump import Entry
from diag.hang import ops, sizes
from diag.hang.frontier import Item
from diag.hang.groups import MEANINGLESS, Group, Job, Member


def items(job: Job) -> list[Item]:
    """One item per pending send or receive and peer (the first of several to the same peer)."""
    found = []
    for group in job.groups:
        halves: dict[tuple[int, int], dict[int, list[Entry]]] = {}
        for rank, member in group.by_rank.items():
            for entry in member.p2p:
                ends = _ends(group, rank, entry)
                if ends is not None:
                    halves.setdefault(ends, {}).setdefault(rank, []).append(entry)
        for (source, target), sides in sorted(halves.items()):
            found += _pair(job, group, source, target, sides)
    return found


def _ends(group: Group, rank: int, entry: Entry) -> tuple[int, int] | None:
    ends = ops.peer(entry.op)
    if ends is None:
        return None
    source, target = group.number(ends[0]), group.number(ends[1])
    if source is None or target is None or source == target or rank not in (source, target):
        return None
    return source, target


def _pair(job: Job, group: Group, source: int, target: int, sides: dict[int, list[Entry]]) -> list[Item]:
    missing = _missing_half(group, source, target, sides)
    found = []
    for rank, entries in sides.items():
        other = target if rank == source else source
        item = Item(group, entries[0].seq, "send" if rank == source else "recv", {rank: entries[:1]}, [rank])
        if other in job.absent:
            item.absent = [other]
        elif other not in job.dumps:
            item.unknown = [other]
        elif other == missing:
            item.missing = [other]
        found.append(item)
    if len(sides) == 2 and not any(item.awaited for item in found):
        both = Item(group, found[0].seq, "send", {rank: entries[:1] for rank, entries in sides.items()},
                    [source, target])
        both.disagreement = _unequal(group, source, target, sides)
        return [both]
    return found


def _missing_half(group: Group, source: int, target: int, sides: dict[int, list[Entry]]) -> int | None:
    """The rank that did not post its half, None when both did."""
    sent, received = _total(group, source, target, source), _total(group, source, target, target)
    if sent is not None and received is not None and sent != received:
        return target if sent > received else source
    if source not in sides:
        return source if sent is None or received is None or sent < received else None
    if target not in sides:
        return target if sent is None or received is None or received < sent else None
    return None


def _total(group: Group, source: int, target: int, side: int) -> int | None:
    """How many halves of the pair `side` ever called; None when its ring does not reach back to the start."""
    member: Member | None = group.by_rank.get(side)
    if member is None or member.wrapped:
        return None
    if member.log is None:
        return 0
    here, there = group.ranks.index(source), group.ranks.index(target)
    name = f"send {here}->{there}" if side == source else f"recv {there}<-{here}"
    return member.log.p2p_counts.get(name, 0)


def _unequal(group: Group, source: int, target: int, sides: dict[int, list[Entry]]) -> sizes.Disagreement | None:
    """Both halves are there; do they speak of the same number of elements? Between two there is no majority."""
    sent = sides[source][0].op
    received = sides[target][0].op
    out = ops.elements(sent.input_sizes or sent.output_sizes)
    into = ops.elements(received.output_sizes or received.input_sizes)
    if out == into:
        return None
    habits = {size for member in group.by_rank.values() if member.log is not None for entry in member.log.entries
              if entry.p2p and entry.done and (size := ops.elements(entry.op.input_sizes or entry.op.output_sizes))}
    odd: tuple[int, ...] = ()
    if len(habits) == 1:
        usual = habits.pop()
        odd = tuple(rank for rank, size in ((source, out), (target, into)) if size != usual)
        odd = odd if len(odd) == 1 else ()
    return sizes.Disagreement("size", odd, 1, f"rank {source} sends {out:,} elements, rank {target} expects {into:,}")


def who_went_on(job: Job, halves: list[Item], circle: list[Item]) -> tuple[int, ...]:
    """Of a circle with unmatched halves: the ranks that did not post theirs and went on to something else.

    A rank that could not post yet, because it is held up further up the pipeline, is no culprit. The culprit waits,
    in its turn, for the very rank that it left waiting. Where that holds for both (two neighbours wait on each other),
    the one whose p2p count is behind that of the same place in sister groups left one out.
    """
    pairs = [(item.waiting[0], rank) for item in halves for rank in item.missing]
    awaited = {rank: {other for item in circle if rank in item.waiting for other in item.awaited}
               for _, rank in pairs}
    guilty = {rank for left, rank in pairs if left in awaited[rank]} or {rank for _, rank in pairs}
    if len(guilty) > 1:
        guilty = {rank for rank in guilty if _is_short(job, rank)} or guilty
    return tuple(sorted(guilty))


def _is_short(job: Job, rank: int) -> bool:
    """True when `rank` waits in a p2p call whose number is below that of the same call in most sister groups."""
    for group in job.groups:
        member = group.by_rank.get(rank)
        if member is None or not member.p2p or group.desc in MEANINGLESS:
            continue
        entry = member.p2p[0]
        numbers = [other.seq for sister in job.groups if sister is not group and sister.desc == group.desc
                   for them in sister.by_rank.values() for other in them.p2p[:1] if other.op.name == entry.op.name]
        if sum(number > entry.seq for number in numbers) * 2 > len(numbers):
            return True
    return False
