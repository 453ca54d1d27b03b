"""Which host, direction or link is slow: what to measure next, given what was measured so far. No I/O, no clock.

A round is a set of disjoint pairs of end points (hosts, or ranks) that exchange messages in both directions at once;
each direction gives one `Flow`. The partners come from a round-robin tournament (circle method), so no pair meets twice
before all have met.

    screening      max(ceil(log2 n), 3) rounds of the tournament, at most all of it
    confirmation   what looks slow meets partners that look sound; up to 2 * ceil(log2 n) rounds in all. When nothing
                   looks slow the tournament goes on instead, so that more pairs meet, up to two rounds less
    thorough       the whole tournament (n - 1 rounds, n for odd n), as often as asked, then up to 2 * ceil(log2 n)
                   rounds of confirmation

In ceil(log2 n) rounds every end point sends to, and receives from, that many different partners: an end point that is
slow with all of them is the cause, a slow flow between two that are fast elsewhere is the link's. From n = 8 on the
quick mode cannot meet every pair: links between two particular hosts that it did not use are reported as not checked.
`diag.probes.localise_judge` turns flows into faults.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Literal

from diag.probes.localise_faults import Flow
from diag.probes.localise_judge import Judgement, judge

Mode = Literal["quick", "thorough"]

#: Measurements of one direction of an end point, or of one pair, before it is called slow.
HOST_SAMPLES = 6
PAIR_SAMPLES = 4
#: Rounds kept for a second and third look at what the last rounds of a clean tournament bring up.
RESERVE = 2
#: How many idle partners a suspect chooses from.
CANDIDATES = 16
#: Rounds that screening takes at least, where there are as many: two partners cannot tell a host from two links.
SCREENING = 3


def log2_ceil(n: int) -> int:
    """ceil(log2 n) for n >= 1."""
    return (n - 1).bit_length()


def tournament(n: int) -> list[list[tuple[int, int]]]:
    """The rounds of a round-robin tournament (circle method): n - 1, or n with one resting each when n is odd."""
    return [pairs_of(n, turn) for turn in turns(n)]


def turns(n: int) -> list[int]:
    """The order of the rounds: bit-reversed, so that the first ones meet partners at all distances.

    Neighbours are often behind one switch.
    """
    return _spread(n + n % 2 - 1) if n > 1 else []


def pairs_of(n: int, turn: int) -> list[tuple[int, int]]:
    """The disjoint pairs of one round."""
    even = n + n % 2
    ring = even - 1
    pairs = [(turn, even - 1)] if even - 1 < n else []
    pairs += [((turn + k) % ring, (turn - k) % ring) for k in range(1, even // 2)]
    return [(min(pair), max(pair)) for pair in pairs]


def _spread(n: int) -> list[int]:
    """0..n-1 in bit-reversed order."""
    bits = log2_ceil(n)
    order = (int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits))
    return [i for i in order if i < n]


class Search:
    """What to measure next. Call `next()` for the pairs of a round and `add()` with its flows until it is empty."""

    def __init__(self, n: int, mode: Mode = "quick", baseline: dict[tuple[int, int], float] | None = None,
                 passes: int = 1) -> None:
        self.n, self.mode, self.baseline = n, mode, baseline
        self.flows: list[Flow] = []
        self.lost: set[int] = set()
        self.round = self._turn = 0
        self._order = turns(n)
        budget = 2 * log2_ceil(n) if n > 1 else 0
        self._turns = whole = len(self._order) * (passes if mode == "thorough" else 1)
        self.screening = whole if mode == "thorough" else min(whole, max(log2_ceil(n), SCREENING), budget)
        self.budget = self.screening + budget if mode == "thorough" else budget

    def first(self) -> list[tuple[int, int]]:
        """The pairs of the first round, for a warm-up that is not judged."""
        return pairs_of(self.n, self._order[0]) if self._order else []

    def next(self) -> list[tuple[int, int]]:
        """Disjoint unordered pairs to measure in both directions at once; empty when the answer is settled."""
        if self.round >= self.budget:
            return []
        pairs = self._confirm() if self.round >= self.screening else []
        reserve = 0 if self.round < self.screening else RESERVE
        while not pairs and self._turn < self._turns and self.round < self.budget - reserve:
            pairs = self._living(pairs_of(self.n, self._order[self._turn % len(self._order)]))
            self._turn += 1
        self.round += bool(pairs)
        return pairs

    def add(self, flows: Iterable[Flow], lost: Iterable[int] = ()) -> None:
        """What the last round measured, and which end points answer no more."""
        self.lost |= set(lost)
        self.flows += flows

    def verdict(self) -> Judgement:
        """What the flows so far say."""
        return judge(self.n, self.flows, lost=self.lost, baseline=self.baseline)

    def unmet(self) -> int:
        """Pairs of living end points that never exchanged anything."""
        living = self.n - len(self.lost)
        met = {frozenset((f.source, f.target)) for f in self.flows
               if f.source not in self.lost and f.target not in self.lost}
        return living * (living - 1) // 2 - len(met)

    def _living(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """`pairs` without the lost; those whose partners they were meet each other, the strangest first."""
        if not self.lost:
            return pairs
        whole = [pair for pair in pairs if not self.lost.intersection(pair)]
        idle = sorted({end for pair in pairs for end in pair if self.lost.intersection(pair)} - self.lost)
        met = Counter(frozenset((flow.source, flow.target)) for flow in self.flows)
        while len(idle) > 1:
            a = idle.pop(0)
            b = min(idle, key=lambda end: met[frozenset((a, end))])  # noqa: B023 - called at once
            idle.remove(b)
            whole.append((a, b))
        return whole

    def _confirm(self) -> list[tuple[int, int]]:
        """Suspects against partners that look sound; everybody else is busy too, so that the conditions are equal."""
        verdict = self.verdict()
        sent, received = Counter(f.source for f in self.flows), Counter(f.target for f in self.flows)
        met = Counter((f.source, f.target) for f in self.flows)
        hosts = [end for end in verdict.suspects if min(sent[end], received[end]) < HOST_SAMPLES]
        pairs = [pair for pair in verdict.suspect_pairs if met[pair] < PAIR_SAMPLES]
        if not hosts and not pairs:
            return []
        free = [end for end in range(self.n) if end not in self.lost]
        suspects = set(verdict.suspects)
        sound = [end for end in free if end not in suspects]
        chosen: list[tuple[int, int]] = []
        busy: set[int] = set()

        def take(a: int, b: int) -> None:
            chosen.append((min(a, b), max(a, b)))
            busy.update((a, b))

        def partner(end: int, among: list[int]) -> int | None:
            """Of the next few that are idle the one met least."""
            start = bisect(among, end)
            turned = (among[(start + k) % len(among)] for k in range(len(among)))
            near = islice((p for p in turned if p not in busy and p != end), CANDIDATES)
            return min(near, key=lambda p: met[end, p], default=None)

        for end in hosts:
            other = partner(end, sound)
            if end not in busy and other is not None:
                take(end, other)
        for a, b in pairs:
            if a not in busy and b not in busy:
                take(a, b)
        for a, b in pairs_of(self.n, self._order[self._turn % len(self._order)]):  # its pairs that are still whole
            if not (busy.intersection((a, b)) or self.lost.intersection((a, b))):
                take(a, b)
        for end in free:
            other = partner(end, free)
            if end not in busy and other is not None:
                take(end, other)
        return chosen
