"""Two groups entered in different orders: which order is the usual one, and who left it.

Every rank that is in both groups, or in a group of the same description as each, shows an order: the call that it
issued first, or the only one of the two that it issued. The majority of all ranks decides. When they are split evenly
the earlier rounds do: how many calls on the one group used to precede each call on the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from diag.hang.frontier import Item
from diag.hang.groups import MEANINGLESS, Group, Job, Member

#: An order that more ranks than this share of the voters follow is no departure but another habit.
LARGEST_MINORITY = 0.4


@dataclass(frozen=True, slots=True)
class Departure:
    """`ranks` did `second` before `first`, against the usual order; `skipped`: they never came to `first` at all."""

    ranks: tuple[int, ...]
    first: Item
    second: Item
    skipped: bool
    why: str


def departure(job: Job, items: list[Item], suspects: set[int]) -> Departure | None:
    """Who of `suspects`, who wait on each other through `items`, left the usual order; None when nothing tells."""
    guilty: set[int] = set()
    shown: tuple[Item, Item, set[int], str] | None = None
    for one, two in combinations(items, 2):
        if one.group is two.group or (one.what != "collective" and two.what != "collective"):
            continue
        for orders in _by_role(job, one, two):
            told = _usual(job, one, two, orders, suspects)
            if told is None:
                continue
            usual, why = told
            odd = {rank for rank in suspects if orders.get(rank) not in (None, usual)}
            guilty |= odd
            if odd and shown is None:
                shown = (usual, two if usual is one else one, odd, why)
    if shown is None:
        return None
    first, second, odd, why = shown
    return Departure(tuple(sorted(guilty)), first, second, all(_place(job, first, r) == _NEVER for r in odd), why)


def _by_role(job: Job, one: Item, two: Item) -> list[dict[int, Item]]:
    """Senders and receivers keep different orders: each votes among its own. Members of a collective are alike."""
    orders = _orders(job, one, two)
    half = one if one.what != "collective" else two
    if half.what == "collective":
        return [orders]
    stages = {rank: _stage(job, half, rank) for rank in orders}
    return [{rank: order for rank, order in orders.items() if stages[rank] == stage}
            for stage in sorted({_stage(job, half, rank) or 0 for rank in half.calls})]


def _usual(job: Job, one: Item, two: Item, orders: dict[int, Item], suspects: set[int]) -> tuple[Item, str] | None:
    """The order of the members of both groups, then of all ranks with such groups, then of the rounds before."""
    if len(set(orders.values())) < 2 or not any(rank in orders for rank in suspects):
        return None
    both = {rank: order for rank, order in orders.items() if rank in one.group.ranks and rank in two.group.ranks}
    for voters in (both, orders):
        camps = Counter(voters.values()).most_common(2)
        if len(camps) == 2 and camps[1][1] <= LARGEST_MINORITY * len(voters):
            return camps[0][0], f"for {camps[0][1]} of {len(voters)} ranks"
    habit = _habit(job, one, two)
    return None if habit is None else (habit, "in the rounds before")


def _orders(job: Job, one: Item, two: Item) -> dict[int, Item]:
    """rank -> which of the two it issued first."""
    found: dict[int, Item] = {}
    for rank in job.dumps:
        first, second = _place(job, one, rank), _place(job, two, rank)
        if first is None or second is None:
            continue
        if first == second == _NEVER:
            continue
        if first != second:
            found[rank] = one if first < second else two
    return found


_NEVER = float("inf")
_LONG_AGO = -1.0


def _place(job: Job, item: Item, rank: int) -> float | None:
    """Where in its own order `rank` issued the item's call, or the same one in a sister group; None: no telling."""
    if item.what != "collective":
        return _place_of_half(job, item, rank)
    member = _member(job, item.group, rank)
    if member is None or member.issued is None:
        return None
    if member.issued < item.seq:
        return _NEVER
    calls = member.calls(item.seq)
    return min((entry.record for entry in calls), default=_LONG_AGO)


def _place_of_half(job: Job, item: Item, rank: int) -> float | None:
    if rank in item.calls:
        return item.record(rank)
    member = _member(job, item.group, rank)
    if member is None or member.log is None or rank in item.group.ranks:
        return None
    halves = {(call.op.name, call.seq) for calls in item.calls.values() for call in calls}
    return next((float(e.record) for e in member.log.entries if e.p2p and (e.op.name, e.seq) in halves), None)


def _stage(job: Job, half: Item, rank: int) -> int | None:
    """The rank's place in its own group of the half's kind."""
    if rank in half.group.ranks:
        return half.group.ranks.index(rank)
    return next((other.ranks.index(rank) for other in job.groups
                 if other.desc == half.group.desc and rank in other.ranks), None)


def _member(job: Job, group: Group, rank: int) -> Member | None:
    if rank in group.by_rank:
        return group.by_rank[rank]
    if group.desc in MEANINGLESS:
        return None
    return next((other.by_rank[rank] for other in job.groups if other.desc == group.desc and rank in other.by_rank),
                None)


def _habit(job: Job, one: Item, two: Item) -> Item | None:
    """Which of the two calls comes first if the next round is like the last: None when the rounds do not tell."""
    told: Counter[int] = Counter()
    for rank in sorted(set(one.group.ranks) & set(two.group.ranks) & set(job.dumps)):
        a, b = one.group.by_rank[rank], two.group.by_rank[rank]
        expected = _expected_before(a, b, two.seq)
        if expected is not None:
            told[0 if expected >= one.seq else 1] += 1
    if not told or len(told) > 1:
        return None
    return one if 0 in told else two


def _expected_before(a: Member, b: Member, seq: int) -> int | None:
    """How many calls of `a`'s group should precede call `seq` of `b`'s, going by the two calls before it."""
    records = sorted((calls[0].record, s) for s, calls in a.done.items())
    if not records:
        return None

    def before(number: int) -> int | None:
        calls = b.done.get(number)
        if not calls:
            return None
        earlier = [s for record, s in records if record < calls[0].record]
        return max(earlier) if earlier else records[0][1] - 1

    last, previous = before(seq - 1), before(seq - 2)
    if last is None or previous is None or last <= previous:
        return None
    return last + (last - previous)
