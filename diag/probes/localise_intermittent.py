"""Hosts that are slow at times: their slow rounds gather beyond chance, though they are fast in the others.

Compared with the rounds of everybody else in which the host has no part: a slow direction of a host slows the other one
too, because acknowledgements travel in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median

from diag.probes.localise_faults import Direction, Fault, Flow

#: A single flow counts as slow below this share of what its end points do.
FLOW_MARGIN = 0.25
#: A message counts as slow below this share of what its end points do: single ones scatter more than the best of three.
MESSAGE_MARGIN = 0.4
#: Rounds of an end point before single messages are looked at: one slow one in six rounds says nothing.
MESSAGE_ROUNDS = 12
#: Chance, over all end points, that slow flows of a healthy job gather like this.
CHANCE = 1e-3
#: Slow flows that any healthy job has: a hiccup of the host, a collision in the fabric.
BACKGROUND = 0.02
#: Both directions are slow when the other one is within this factor of the one that lost most.
ALIKE = 1.25
#: The two directions of an end point.
SIDES = ("send", "receive")

#: A flow, and its rate over what its end points do elsewhere.
Shares = list[tuple[Flow, float]]
Key = tuple[str, int]


def slow_at_times(n: int, left: Shares, slow_ends: set[Key]) -> tuple[list[Fault], list[int]]:
    """(faults, end points that are worth another look) among `n`; `slow_ends` are slow always and not judged again.

    A fault that is shorter than a round slows some of its messages. Where whole rounds show nothing, the worst message
    of each is looked at; rounds are what is counted, since the messages of one are not independent of each other.
    """
    faults, suspects = _gather(n, left, slow_ends, FLOW_MARGIN)
    if not faults:
        worst = [(flow, share * min(flow.messages) / flow.rate if flow.messages and flow.rate else share)
                 for flow, share in left]
        faults, _ = _gather(n, worst, slow_ends, MESSAGE_MARGIN, MESSAGE_ROUNDS)
    return faults, suspects


def _gather(n: int, left: Shares, slow_ends: set[Key], margin: float, least: int = 0) -> tuple[list[Fault], list[int]]:
    """Of end points with `least` rounds or more: one fault after the other, until chance explains the rest."""
    flows, faults, suspects = list(left), list[Fault](), dict[int, None]()
    while True:
        by_key, by_end = _by_end(flows)
        slow_total = _slow(flows, margin)
        found: tuple[float, Key] | None = None
        for key, own in by_key.items():
            side, end = key
            bad = [(flow, share) for flow, share in own if share < 1 - margin]
            partners = {flow.target if side == "send" else flow.source for flow, _ in bad}
            if key in slow_ends or len(own) < least or len(partners) < 2:  # with one partner alone it is the link's
                continue
            suspects[end] = None
            touching = by_end[end]
            elsewhere = (slow_total - _slow(touching, margin) + 1) / (len(flows) - len(touching) + 20)
            chance = 2 * n * binomial_tail(len(own), len(bad), max(elsewhere, BACKGROUND))
            lost = sum(1 - share for _, share in bad)
            if len(bad) > 2 and chance < CHANCE and (found is None or lost > found[0]):
                found = lost, key
        if found is None:
            return faults, list(suspects)
        key = found[1]
        other = SIDES[1 - SIDES.index(key[0])], key[1]
        faults.append(_fault(key, by_key[key], by_key[other], margin, least > 0))
        flows = [(flow, share) for flow, share in flows if key[1] not in (flow.source, flow.target)]


def _fault(key: Key, own: Shares, back: Shares, margin: float, passing: bool) -> Fault:
    """Of the direction `key` with its flows; `back` are those of the other direction."""
    side, end = key
    bad = {flow.round: share for flow, share in own if share < 1 - margin}
    returning = [share for flow, share in back if flow.round in bad]
    direction: Direction = "send" if side == "send" else "receive"
    if returning and median(returning) <= ALIKE * median(bad.values()):
        direction = "both"
    return Fault(kind="host", ends=[end], direction=direction, ratio=median(bad.values()), slow=len(bad),
                 flows=len(own), intermittent=True, passing=passing,
                 partners=len({flow.target if side == "send" else flow.source for flow, _ in own}))


def _by_end(flows: Shares) -> tuple[dict[Key, Shares], dict[int, Shares]]:
    """The flows of each direction of each end point, and of each end point."""
    by_key, by_end = defaultdict[Key, Shares](list), defaultdict[int, Shares](list)
    for flow, share in flows:
        for key in (("send", flow.source), ("receive", flow.target)):
            by_key[key].append((flow, share))
            by_end[key[1]].append((flow, share))
    return by_key, by_end


def _slow(flows: Shares, margin: float) -> int:
    return sum(share < 1 - margin for _, share in flows)


def binomial_tail(n: int, k: int, p: float) -> float:
    """P(X >= k) of a binomial(n, p)."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
