"""Do the members of a group agree on what they are doing? Operation first, then dtype, then sizes as each kind wants.

Uneven sizes are legal in some collectives, so those are checked by sums: an all_gather whose inputs add up to the
output, a reduce_scatter whose outputs add up to the input, an all_to_all (see `a2a`) in which what is sent is received.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

from diag.artefacts.fr_dump import Entry
from diag.hang import a2a, ops
from diag.hang.vote import Split, split

What = Literal["operation", "dtype", "size"]
Calls = Mapping[int, list[Entry]]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """In what the members differ; `odd` are those outside the majority, () when there is none."""

    what: What
    odd: tuple[int, ...]
    votes: int
    note: str = ""


def operations(calls: Calls, *, exact: bool = True) -> dict[int, Hashable]:
    """rank -> what it calls, without sizes. `exact=False` for dumps of different torch versions, which may name one
    call differently."""
    return {rank: tuple(ops.name(e.op) if exact else ops.kind(e.op) for e in entries)
            for rank, entries in calls.items()}


def disagreement(
    calls: Calls,
    members: int,
    *,
    exact: bool = True,
    sisters: Calls | None = None,
    usual: Mapping[Hashable, int] | None = None,
) -> Disagreement | None:
    """How the members (rank -> its entries with one sequence number) disagree, None when they do not.

    `members` is how many the group has. `sisters` are calls with the same number in groups of the same description,
    `usual` counts the sizes seen before for this operation; both only break ties, as does the line that calls.
    """
    if len(calls) < 2:
        return None
    found = _first(calls, members, exact, sisters or {}, usual or {})
    return found if found is None or found.odd else _by_call_site(calls, sisters or {}, found)


def _first(calls: Calls, members: int, exact: bool, sisters: Calls, usual: Mapping[Hashable, int]
           ) -> Disagreement | None:
    named = operations(calls, exact=exact)
    wrong = split(named, others=_counted(operations(sisters, exact=exact)))
    if wrong is not None:
        return Disagreement("operation", wrong.odd, wrong.votes)
    positions = {len(entries) for entries in calls.values()}
    if len(positions) > 1:
        return None
    for place in range(positions.pop()):
        here = {rank: entries[place] for rank, entries in calls.items()}
        there = {rank: entries[place] for rank, entries in sisters.items() if len(entries) > place}
        found = _dtypes(here, there) or _sizes(here, there, members, usual)
        if found is not None:
            return found
    return None


def _dtypes(here: Mapping[int, Entry], there: Mapping[int, Entry]) -> Disagreement | None:
    def types(entries: Mapping[int, Entry]) -> dict[int, Hashable]:
        return {r: tuple(sorted(set(e.op.input_dtypes or e.op.output_dtypes))) for r, e in entries.items()
                if e.op.input_dtypes or e.op.output_dtypes}

    wrong = split(types(here), others=_counted(types(there)))
    return None if wrong is None else Disagreement("dtype", wrong.odd, wrong.votes)


def size_key(entry: Entry) -> tuple[int, ...]:
    """What must be equal on all members in the plain case, in elements; () where nothing must."""
    into, out = ops.elements(entry.op.input_sizes), ops.elements(entry.op.output_sizes)
    match ops.kind(entry.op):
        case "all_reduce" | "broadcast" | "reduce":
            return (into or out, len(entry.op.input_sizes) or len(entry.op.output_sizes))
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (into, out)
        case "gather":
            return (into,)
        case "scatter":
            return (out,)
        case _:
            return ()


def _sizes(here: Mapping[int, Entry], there: Mapping[int, Entry], members: int,
           usual: Mapping[Hashable, int]) -> Disagreement | None:
    keys = {rank: size_key(entry) for rank, entry in here.items()}
    kind = ops.kind(next(iter(here.values())).op)
    whole = len(here) == members
    if kind == "all_to_all":
        fault = a2a.fault(here, whole=whole)
        return None if fault is None else Disagreement("size", fault.odd, fault.votes, fault.note)
    others = _counted({rank: size_key(entry) for rank, entry in there.items()})
    wrong = split(keys, others=others) or None
    if wrong is None or (len(keys[next(iter(keys))]) == 2 and _adds_up(kind, keys, whole)):
        return None
    if not wrong.decided:
        wrong = _by_habit(keys, usual) or wrong
    return Disagreement("size", wrong.odd, wrong.votes)


def _by_call_site(calls: Calls, sisters: Calls, found: Disagreement) -> Disagreement:
    """Who calls from another line of the program than most; only asked when there is a disagreement already."""
    def sites(of: Calls) -> dict[int, Hashable]:
        return {rank: entries[0].site for rank, entries in of.items() if entries[0].site}

    here = sites(calls)
    odd = split(here, others=_counted(sites(sisters))) if len(here) == len(calls) else None
    if odd is None or not odd.decided:
        return found
    note = f"{found.note}; " if found.note else ""
    return Disagreement(found.what, odd.odd, odd.votes, f"{note}the call comes from another line than the others'")


def _adds_up(kind: str, keys: Mapping[int, tuple[int, ...]], whole: bool) -> bool:
    """Legal unevenness: every rank its own share of one whole."""
    shares, totals = (0, 1) if kind == "all_gather" else (1, 0)
    if kind not in ("all_gather", "reduce_scatter"):
        return False
    total = {key[totals] for key in keys.values()}
    if len(total) != 1:
        return False
    parts, target = sum(key[shares] for key in keys.values()), total.pop()
    return parts == target if whole else False


def _by_habit(keys: Mapping[int, tuple[int, ...]], usual: Mapping[Hashable, int]) -> Split | None:
    """A tie is settled by what this group has always done, if that was always the same."""
    if len(usual) != 1:
        return None
    habit, times = next(iter(usual.items()))
    if times < 3 or habit not in keys.values():
        return None
    return Split(habit, tuple(sorted(rank for rank, key in keys.items() if key != habit)), times)


def _counted(values: Mapping[int, Hashable]) -> dict[Hashable, int]:
    counts: dict[Hashable, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    return counts
