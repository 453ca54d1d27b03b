"""Majorities. A strict one names the others; anything less names nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Split:
    """Members that do not agree: the value of the majority (None for a tie) and who holds another one."""

    majority: Any
    odd: tuple[int, ...]
    votes: int

    @property
    def decided(self) -> bool:
        return bool(self.odd)


def split(values: Mapping[int, Hashable], *, others: Mapping[Hashable, int] | None = None) -> Split | None:
    """None when all `values` (rank -> what it did) are equal, else who differs from more than half.

    `others` are votes of ranks that are not judged themselves: the same place in sister groups. They decide only
    what the members leave open, so that a fault of one member is never outvoted by strangers. A pair that disagrees
    is a tie.
    """
    counts = Counter(values.values())
    if len(counts) <= 1:
        return None
    top, votes = counts.most_common(1)[0]
    if 2 * votes > len(values) and votes > 1:
        return Split(top, _odd(values, top), votes)
    if others:
        joined = counts + Counter({value: n for value, n in others.items() if value in counts})
        top, votes = joined.most_common(1)[0]
        if 2 * votes > joined.total() and votes > counts[top]:
            return Split(top, _odd(values, top), votes)
    return Split(None, (), counts.most_common(1)[0][1])


def _odd(values: Mapping[int, Hashable], usual: Hashable) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, value in values.items() if value != usual))
