"""What the localiser measures, and what it says is slow."""

from __future__ import annotations

from typing import Literal

import msgspec

Direction = Literal["send", "receive", "both"]
Kind = Literal["host", "pair", "split", "all"]


class Flow(msgspec.Struct, frozen=True):
    """One direction of one pair in one round. `rate` in bytes/s; None with a `problem` in words.

    `rate` is that of the best message, `messages` are the rates of all, where they are known.
    """

    source: int
    target: int
    rate: float | None
    round: int = 0
    problem: str = ""
    messages: tuple[float, ...] = ()


class Fault(msgspec.Struct, kw_only=True):
    """What is slow. `ends` are end points: one for "host", (source, target) for "pair", the smaller group for "split".

    `ratio` is relative to `against`; 0 when no data passes. `slow` of `flows` measurements were slow. `passing`: within
    them, one message or two of several.
    """

    kind: Kind
    ends: list[int]
    direction: Direction
    ratio: float
    slow: int
    flows: int
    partners: int = 0
    intermittent: bool = False
    passing: bool = False
    against: Literal["peers", "baseline"] = "peers"
    groups: list[list[int]] = []
