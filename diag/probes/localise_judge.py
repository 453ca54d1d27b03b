"""From measured flows to faults: bad sender, receiver, host or pair, slow uplink between groups, intermittent ones.

A flow i -> j runs at about min(what i can send, what j can receive, what the link between them carries). So

    send(i)     upper quartile over i's partners of the median flow to each; one slow partner, or one hiccup of a busy
                machine, does not lower it
    receive(j)  the same of the flows into j
    pair        slow when all its flows are below min(send(i), receive(j)): the end points do not explain it

Both over the partners that can testify: who is clearly slower than i itself, at its best, says nothing about i. All is
relative to the median of the sound end points. An end point is slow below 1 - max(HOST_MARGIN, 4 sigma), sigma the
robust spread (1.4826 MAD) of its sound peers. The thresholds are ours; benchmarks/link_simulation.py and link_trials.py
show what they yield (docs/comm-localise.md). dlrover compares with 2 x the median in two rounds,
which cannot see a link at 0.6.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median, median_high

import msgspec

from diag.probes.localise_faults import Direction, Fault, Flow
from diag.probes.localise_intermittent import slow_at_times

#: An end point is slow below this share of its peers, at least: 0.8 is to be found, 0.9 is what busy machines show.
HOST_MARGIN = 0.12
#: Share of an end point's flows that are slow when it is.
SLOW_SHARE = 0.75
#: A pair is slow below this share of what its end points do elsewhere.
PAIR_MARGIN = 0.15
#: Below this share of the baseline an end point, or the whole network, has become slower.
BASELINE_MARGIN = 0.15
SIGMAS = 4.0
SIGMA_FLOOR = 0.01


class Judgement(msgspec.Struct, kw_only=True):
    """Rates of all end points relative to the sound ones (`reference`, bytes/s), faults, and what to look at again."""

    reference: float | None = None
    send: dict[int, float] = {}
    receive: dict[int, float] = {}
    sigma: float = SIGMA_FLOOR
    faults: list[Fault] = []
    suspects: list[int] = []
    suspect_pairs: list[tuple[int, int]] = []


def upper_quartile(values: Iterable[float]) -> float:
    """The k-th largest with k = ceil(n / 4): the largest of up to four."""
    ordered = sorted(values, reverse=True)
    return ordered[math.ceil(len(ordered) / 4) - 1]


def spread(values: list[float]) -> float:
    """1.4826 times the median absolute deviation: the standard deviation of what is normal, blind to outliers."""
    if len(values) < 3:
        return 0.0
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def judge(n: int, flows: list[Flow], *, lost: Iterable[int] = (),
          baseline: Mapping[tuple[int, int], float] | None = None) -> Judgement:
    """The faults that `flows` between `n` end points show; `baseline` holds earlier rates (bytes/s) of (i, j)."""
    gone = set(lost)
    used = [flow for flow in flows if flow.source not in gone and flow.target not in gone]
    if not any(flow.rate for flow in used):
        return Judgement()
    raw = [flow.rate or 0.0 for flow in used]
    ends = _Ends(used, raw)
    # more than half of the hosts may be slow (one of two switches): the upper quartile is still sound then
    top = upper_quartile(ends.ratio.values())
    reference = median([rate for rate in ends.ratio.values() if rate > (1 - HOST_MARGIN) * top] or [max(raw)])
    rates = [rate / reference for rate in raw]
    send, receive = ends.side("send", reference), ends.side("receive", reference)
    sound = [ratio for side in (send, receive) for ratio in side.values() if ratio > 1 - HOST_MARGIN]
    sigma = max(spread(sound), SIGMA_FLOOR)
    limit = 1 - max(HOST_MARGIN, SIGMAS * sigma)
    verdict = Judgement(reference=reference, send=send, receive=receive, sigma=sigma)
    slow_ends = _host_faults(verdict, used, rates, ends.partners, limit)
    expected = [min(send[f.source], receive[f.target]) for f in used]
    left = _pair_faults(verdict, n, used, rates, expected)
    at_times, suspects = slow_at_times(n, left, slow_ends)
    verdict.faults += at_times
    verdict.suspects += [end for end in suspects if end not in verdict.suspects]
    if baseline:
        _against_baseline(verdict, used, raw, baseline)
    return verdict


class _Ends:
    """What each end point sends and receives at. `partners` are those who can testify: who is clearly slower itself,
    at its best, than this end point is at its best says nothing about it."""

    def __init__(self, flows: list[Flow], rates: list[float]) -> None:
        met: dict[tuple[int, int], list[float]] = defaultdict(list)
        for flow, rate in zip(flows, rates):
            met[flow.source, flow.target].append(rate)
        typical = {pair: median_high(values) for pair, values in met.items()}
        best: dict[tuple[str, int], float] = defaultdict(float)
        for (source, target), rate in typical.items():
            best["send", source] = max(best["send", source], rate)
            best["receive", target] = max(best["receive", target], rate)
        told: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for (source, target), rate in typical.items():
            out, into = best["send", source], best["receive", target]
            if into >= (1 - HOST_MARGIN) * out:
                told["send", source][target] = rate
            if out >= (1 - HOST_MARGIN) * into:
                told["receive", target][source] = rate
        self.partners = {key: set(rates_) for key, rates_ in told.items()}
        self.ratio = {key: upper_quartile(rates_.values()) for key, rates_ in told.items()}

    def side(self, side: str, scale: float) -> dict[int, float]:
        """End point -> rate / scale."""
        return {end: rate / scale for (name, end), rate in self.ratio.items() if name == side}


def _host_faults(verdict: Judgement, flows: list[Flow], rates: list[float],
                 partners: Mapping[tuple[str, int], set[int]], limit: float) -> set[tuple[str, int]]:
    """End points that are slow with every partner. Returns (side, end point) of all that look slow, told or not."""
    count: dict[tuple[str, int], int] = defaultdict(int)
    slow: dict[tuple[str, int], int] = defaultdict(int)
    for flow, rate in zip(flows, rates):
        for key, other in ((("send", flow.source), flow.target), (("receive", flow.target), flow.source)):
            if other in partners.get(key, ()):
                count[key] += 1
                slow[key] += rate < limit
    looks = {(side, end) for side, ratios in (("send", verdict.send), ("receive", verdict.receive))
             for end, ratio in ratios.items() if ratio < limit}
    told = {key for key in looks if len(partners[key]) > 1 and slow[key] >= SLOW_SHARE * count[key]}
    ends = sorted({end for _, end in told})
    for end in ends:
        sides = [side for side in ("send", "receive") if (side, end) in told]
        ratio = min(verdict.send[end] if side == "send" else verdict.receive[end] for side in sides)
        verdict.faults.append(Fault(
            kind="host", ends=[end], direction=_side("send" in sides, "receive" in sides), ratio=ratio,
            slow=sum(slow[side, end] for side in sides), flows=sum(count[side, end] for side in sides),
            partners=min(len(partners[side, end]) for side in sides)))
    near = 1 - 0.75 * (1 - limit)  # a little above the limit: worth another look, not a fault
    verdict.suspects = sorted(
        {end for ratios in (verdict.send, verdict.receive) for end, ratio in ratios.items() if ratio < near},
        key=lambda end: min(verdict.send.get(end, 1.0), verdict.receive.get(end, 1.0)))
    for side, end in looks - told:  # one sound partner at most, or fast at times: pairs are all that can be named
        ratios = verdict.send if side == "send" else verdict.receive
        ratios[end] = 1.0
    return told


def _side(sends: bool, receives: bool) -> Direction:
    return "both" if sends and receives else "send" if sends else "receive"


def _pair_faults(verdict: Judgement, n: int, flows: list[Flow], rates: list[float],
                 expected: list[float]) -> list[tuple[Flow, float]]:
    """Pairs that their end points do not explain. Returns the flows that no fault explains, with rate / expected."""
    shares: dict[tuple[int, int], list[float]] = defaultdict(list)
    left: list[tuple[Flow, float]] = []
    for flow, rate, most in zip(flows, rates, expected):
        # an end point through which nothing passes explains everything
        left.append((flow, rate / most if most > 0 else 1.0))
        shares[flow.source, flow.target].append(left[-1][1])
    noise = spread([share for _, share in left if share > 1 - PAIR_MARGIN])
    limit = 1 - max(PAIR_MARGIN, SIGMAS * noise)
    needed = 2 if n <= 4 else 3
    slow = {pair: values for pair, values in shares.items() if max(values) < limit}
    split = _split(n, shares, slow)
    if split:
        groups, ratios = split
        sides = {(pair[0] in groups[0]) for pair in slow}
        verdict.faults.append(Fault(
            kind="split", ends=groups[0], groups=groups, ratio=median(ratios), slow=len(ratios), flows=len(ratios),
            direction=_side(True in sides, False in sides)))
        return [(flow, share) for flow, share in left if (flow.source, flow.target) not in slow]
    verdict.suspect_pairs = sorted((pair for pair in slow if max(slow[pair]) > 0 or len(slow[pair]) < needed),
                                   key=lambda pair: max(slow[pair]))
    told = {pair for pair, values in slow.items() if len(values) >= needed}
    for a, b in sorted(told):
        if (b, a) in told and b < a:
            continue
        both = (b, a) in told
        values = shares[a, b] + (shares[b, a] if both else [])
        verdict.faults.append(Fault(kind="pair", ends=[a, b], direction="both" if both else "send", ratio=max(values),
                                    slow=len(values), flows=len(values), partners=1))
    return [(flow, share) for flow, share in left if (flow.source, flow.target) not in told]


def _split(n: int, shares: Mapping[tuple[int, int], list[float]],
           slow: Mapping[tuple[int, int], list[float]]) -> tuple[list[list[int]], list[float]] | None:
    """Two or more groups that are fast within and slow between: (groups, smallest first; rates of the slow flows)."""
    if len(slow) < max(4, n // 2):
        return None
    parent = list(range(n))

    def root(end: int) -> int:
        while parent[end] != end:
            parent[end] = parent[parent[end]]
            end = parent[end]
        return end

    for a, b in shares:
        if (a, b) not in slow and (b, a) not in slow:
            parent[root(a)] = root(b)
    groups: dict[int, list[int]] = defaultdict(list)
    for end in sorted({end for pair in shares for end in pair}):
        groups[root(end)].append(end)
    if len(groups) != 2 or min(map(len, groups.values())) < 2:
        return None
    if any(root(a) == root(b) for a, b in slow):
        return None
    return sorted(groups.values(), key=len), [value for values in slow.values() for value in values]


def _against_baseline(verdict: Judgement, flows: list[Flow], raw: list[float],
                      baseline: Mapping[tuple[int, int], float]) -> None:
    """End points, or all of them, that were faster when the baseline was taken."""
    earlier = [Flow(a, b, rate) for (a, b), rate in baseline.items() if rate > 0]
    if not earlier:
        return
    now, then = _Ends(flows, raw).ratio, _Ends(earlier, [flow.rate or 0.0 for flow in earlier]).ratio
    ratios = {key: rate / then[key] for key, rate in now.items() if then.get(key)}
    every = list(ratios.values())
    if not every:
        return
    common = upper_quartile(every)
    if common < 1 - BASELINE_MARGIN:
        verdict.faults.append(Fault(kind="all", ends=[], direction="both", ratio=common, slow=len(every),
                                    flows=len(every), against="baseline"))
    limit = min(1.0, common) * (1 - max(BASELINE_MARGIN, SIGMAS * spread(every)))
    known = {(fault.ends[0], fault.direction) for fault in verdict.faults if fault.kind == "host"}
    for (side, end), ratio in ratios.items():
        if ratio < limit and not {(end, side), (end, "both")} & known:
            verdict.faults.append(Fault(kind="host", ends=[end], direction=_side(side == "send", side == "receive"),
                                        ratio=ratio, slow=1, flows=1, against="baseline"))
