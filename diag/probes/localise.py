"""A whole localisation over any measurer: warm-up, node level, rank level inside the suspects, what cannot be told.

The measurer is handed disjoint pairs of ranks and a size and answers with rates: torch.distributed in
`diag.probes.comm_pairs`, a model in the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from diag.probes.localise_faults import Fault, Flow
from diag.probes.localise_judge import HOST_MARGIN, upper_quartile
from diag.probes.localise_search import Mode, Search

#: Bytes of the first round, which opens the connections and finds out how large the messages have to be.
WARM_UP_BYTES = 128 << 10
#: A message should take this long at the typical rate: well above scheduling noise and a shaper's burst.
MESSAGE_SECONDS = 0.08
LARGEST, SMALLEST = 256 << 20, 64 << 10
#: Hosts in a fault of several are said to be alike when their ratios are within this of each other.
ALIKE = 0.15


class Place(msgspec.Struct, frozen=True):
    """A rank and where it runs."""

    rank: int
    host: str
    local_rank: int = 0


class Measured(msgspec.Struct, kw_only=True):
    """The answer to one round: bytes/s of each (source, target) rank, or why there is none; ranks that fell silent.

    `rates` are those of the best message, `messages` of all, where they are known.
    """

    rates: dict[tuple[int, int], float] = {}
    messages: dict[tuple[int, int], tuple[float, ...]] = {}
    problems: dict[tuple[int, int], str] = {}
    lost: dict[int, str] = {}


Measure = Callable[[list[tuple[int, int]], int], Measured]


class Outcome(msgspec.Struct, kw_only=True):
    """The answer of a localisation.

    `ends` are the end points that `faults` and `ratios` count: (host, its ranks), the first rank spoke for it. `links`
    is the public list: ranks, hosts, bytes per second. `silent` answered no more; the rest was measured without them.
    `rounds` counts measuring rounds, `warm_up` those that only sized the messages. `notes` say what cannot be told.
    """

    ends: list[tuple[str, list[int]]]
    mode: Mode = "quick"
    links: list[dict[str, Any]] = []
    faults: list[Fault] = []
    #: By the position of a fault: which ranks of its host are slow themselves; absent when that was not measured.
    slow_ranks: dict[int, list[int]] = {}
    silent: list[Place] = []
    silent_why: dict[int, str] = {}
    notes: list[str] = []
    rounds: int = 0
    warm_up: int = 0
    message_bytes: int = 0
    reference: float | None = None
    send: dict[int, float] = {}
    receive: dict[int, float] = {}
    by_rank: bool = False


def end_points(places: Sequence[Place]) -> tuple[list[tuple[str, list[int]]], bool]:
    """((host, ranks) of each end point, whether end points are single ranks): hosts, or the ranks of the only host."""
    hosts: dict[str, list[int]] = {}
    for place in sorted(places, key=lambda item: (item.local_rank, item.rank)):
        hosts.setdefault(place.host, []).append(place.rank)
    if len(hosts) > 1:
        return sorted(hosts.items(), key=lambda item: item[1][0]), False
    return [(place.host, [place.rank]) for place in sorted(places, key=lambda item: item.rank)], True


def localise(measure: Measure, places: Sequence[Place], *, mode: Mode = "quick", passes: int = 1,
             baseline: Mapping[tuple[str, str], float] | None = None,
             progress: Callable[[str], None] | None = None) -> Outcome:
    """Which host, direction or link of `places` is slow; `baseline` as `read_baseline` gives it.

    `passes`: how often the thorough mode repeats its tournament.
    """
    ends, by_rank = end_points(places)
    outcome = Outcome(ends=ends, mode=mode, by_rank=by_rank)
    search = Search(len(ends), mode, _translate(baseline or {}, ends, by_rank), passes)
    run = _Run(measure, places, outcome, search, progress)
    if len(ends) > 1 and run.size():
        while pairs := search.next():
            run.measure(pairs, f"round {search.round} of at most {search.budget}")
    verdict = search.verdict()
    outcome.faults, outcome.reference = verdict.faults, verdict.reference
    outcome.send, outcome.receive = verdict.send, verdict.receive
    if not by_rank:
        run.rank_level()
    outcome.silent.sort(key=lambda place: place.rank)
    outcome.rounds = search.round
    outcome.links = run.links()
    outcome.notes = _notes(outcome, search)
    return outcome


class _Run:
    """The measuring of one localisation: end points on one side, ranks on the other."""

    def __init__(self, measure: Measure, places: Sequence[Place], outcome: Outcome, search: Search,
                 progress: Callable[[str], None] | None) -> None:
        self._measure, self._outcome, self._search, self._progress = measure, outcome, search, progress
        self._places = {place.rank: place for place in places}
        self._rates: dict[tuple[int, int], list[float]] = {}
        self._bytes = WARM_UP_BYTES

    def size(self) -> bool:
        """The warm-up: sizes the messages. False when nobody answers anybody."""
        pairs = [(a, b) for a, b in self._search.first() if self._speaks(a) and self._speaks(b)]
        measured = self._ask(pairs, "warm-up")
        self._outcome.warm_up = 1
        self._search.add([], self._lost_ends())
        if not measured.rates:
            return len(self._search.lost) < len(self._outcome.ends) - 1
        wanted = int(median(measured.rates.values()) * MESSAGE_SECONDS)
        self._bytes = min(max(wanted, SMALLEST), LARGEST)
        self._outcome.message_bytes = self._bytes
        return True

    def measure(self, pairs: list[tuple[int, int]], words: str) -> None:
        """One round between end points."""
        measured = self._ask(pairs, words)
        self._search.add(self._flows(pairs, measured, self._search.round), self._lost_ends())

    def _ask(self, pairs: list[tuple[int, int]], words: str) -> Measured:
        if self._progress is not None:
            self._progress(words)
        measured = self._measure([(self._rank(a), self._rank(b)) for a, b in pairs], self._bytes)
        self._keep(measured)
        return measured

    def _keep(self, measured: Measured) -> None:
        if self._outcome.message_bytes:
            for key, rate in measured.rates.items():
                self._rates.setdefault(key, []).append(rate)
        for rank, why in measured.lost.items():
            if rank not in self._outcome.silent_why:
                self._outcome.silent.append(self._places[rank])
                self._outcome.silent_why[rank] = why

    def _flows(self, pairs: list[tuple[int, int]], measured: Measured, number: int) -> list[Flow]:
        flows = []
        for pair in pairs:
            for a, b in (pair, pair[::-1]):
                key = self._rank(a), self._rank(b)
                if not set(key) & set(self._outcome.silent_why):
                    flows.append(Flow(a, b, measured.rates.get(key), number, measured.problems.get(key, ""),
                                      measured.messages.get(key, ())))
        return flows

    def _rank(self, end: int) -> int:
        """The rank that speaks for an end point: its first that has not fallen silent."""
        ranks = self._outcome.ends[end][1]
        return next((rank for rank in ranks if rank not in self._outcome.silent_why), ranks[0])

    def _speaks(self, end: int) -> bool:
        return self._rank(end) not in self._outcome.silent_why

    def _lost_ends(self) -> list[int]:
        """End points of which a rank fell silent: a host of which one process died is not judged by the others."""
        return [end for end, (_, ranks) in enumerate(self._outcome.ends) if set(ranks) & set(self._outcome.silent_why)]

    def rank_level(self) -> None:
        """Every rank of each slow host against a rank of a sound one, one rank of the host at a time."""
        ends, silent = self._outcome.ends, set(self._outcome.silent_why)
        bad = {fault.ends[0]: index for index, fault in enumerate(self._outcome.faults)
               if fault.kind == "host" and len(ends[fault.ends[0]][1]) > 1}
        named = {end for fault in self._outcome.faults for end in fault.ends}
        sound = [end for end in range(len(ends)) if end not in named and self._speaks(end)]
        if not bad or len(sound) < 2 or self._outcome.reference is None:
            return
        rates: dict[int, dict[int, list[float]]] = {end: {} for end in bad}
        normal: list[float] = []
        waves = [sorted(bad)[i : i + len(sound) // 2] for i in range(0, len(bad), max(len(sound) // 2, 1))]
        for wave in waves:
            for turn in range(max(len(ends[end][1]) for end in wave)):
                members = {end: ends[end][1][turn] for end in wave if turn < len(ends[end][1])}
                free = list(sound)
                pairs = [(rank, self._rank(free.pop())) for rank in members.values() if rank not in silent]
                pairs += [(self._rank(free[i]), self._rank(free[i + 1])) for i in range(0, len(free) - 1, 2)]
                if self._progress is not None:
                    self._progress(f"rank level: local rank {turn}")
                measured = self._measure(pairs, self._bytes)
                self._search.round += 1
                self._keep(measured)
                for (a, b), rate in measured.rates.items():
                    for end, rank in members.items():
                        if rank in (a, b):
                            side = self._outcome.faults[bad[end]].direction
                            if side == "both" or (side == "send") == (a == rank):
                                rates[end].setdefault(rank, []).append(rate)
                    if not {a, b} & set(members.values()):
                        normal.append(rate)
        usual = upper_quartile(normal) if normal else self._outcome.reference
        for end, index in bad.items():
            # half-way between the fault's ratio and its peers: noise moves neither of them that far
            limit = (1 + min(self._outcome.faults[index].ratio, 1 - HOST_MARGIN)) / 2 * usual
            self._outcome.slow_ranks[index] = sorted(r for r, values in rates[end].items() if min(values) < limit)

    def links(self) -> list[dict[str, Any]]:
        """The public list: the best rate of each pair of ranks that was measured."""
        host = {rank: place.host for rank, place in self._places.items()}
        return [{"src": a, "dst": b, "bytes_per_second": round(upper_quartile(rates)), "src_host": host[a],
                 "dst_host": host[b]} for (a, b), rates in sorted(self._rates.items())]


def _translate(baseline: Mapping[tuple[str, str], float], ends: Sequence[tuple[str, list[int]]],
               by_rank: bool) -> dict[tuple[int, int], float]:
    """Names of hosts (or "host#rank" on a single host) to end points; hosts that are not there now are left out."""
    index = {f"{host}#{ranks[0]}" if by_rank else host: end for end, (host, ranks) in enumerate(ends)}
    return {(index[a], index[b]): rate for (a, b), rate in baseline.items() if a in index and b in index}


def read_baseline(probe: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The host-to-host rates (bytes/s) of a saved probe; between ranks of one host the names are "host#rank".

    Raises:
        ValueError, TypeError, KeyError: `probe` has no usable "links".
    """
    links = probe["links"]
    one_host = len({link[key] for link in links for key in ("src_host", "dst_host")}) == 1
    found: dict[tuple[str, str], float] = {}
    for link in links:
        rate = float(link["bytes_per_second"])
        if not 0 < rate < float("inf"):
            raise ValueError(f"link {link['src']} -> {link['dst']} has no rate")
        a, b = str(link["src_host"]), str(link["dst_host"])
        key = (f"{a}#{int(link['src'])}", f"{b}#{int(link['dst'])}") if one_host else (a, b)
        if key[0] != key[1]:
            found[key] = max(found.get(key, 0.0), rate)
    return found


def _notes(outcome: Outcome, search: Search) -> list[str]:
    """What cannot be told from these measurements."""
    notes = []
    n = len(outcome.ends)
    what = "ranks" if outcome.by_rank else "hosts"
    if n < 2:
        return [f"links: one {what[:-1]} has nobody to be measured against"]
    if outcome.reference is None:
        return [f"links: no two {what} exchanged anything"]
    if n - len(search.lost) == 2:
        notes.append(f"links: with two {what} a slow sender cannot be told from a slow receiver, and no link is slow "
                     "when both directions are (a third one, or --baseline, tells)")
    unmet = search.unmet()
    if unmet:
        living = n - len(search.lost)
        notes.append(f"links: {unmet} of {living * (living - 1) // 2} pairs of {what} did not meet; each of the {what} "
                     "was measured in both directions, a fault of one single pair needs --thorough")
    if not outcome.by_rank and any(len(ranks) > 1 for _, ranks in outcome.ends):
        notes.append("links: one rank spoke for each host; adapters that only its other ranks use were measured on "
                     "slow hosts alone")
    if outcome.silent:
        notes.append("links: nothing is known about those of " + ", ".join(sorted({p.host for p in outcome.silent})))
    return notes
