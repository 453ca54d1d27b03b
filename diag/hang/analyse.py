"""The wait-for graph over all groups, and what its ends say.

Ranks point at the items that they wait in, items at the ranks that have not come. Following the arrows ends either at
a rank that waits for nobody (it is the one), at an item to which everybody came and that nothing earlier holds up (its
members disagree, or network, GPU or library), or in a circle (groups entered in different orders, or a send and a
receive that do not match).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

from diag.hang import frontier, graph, order, pairing
from diag.hang.frontier import Item
from diag.hang.groups import Job
from diag.hang.ops import SYNCHRONISING, kind


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer. `ranks` are the guilty ones, global; `item` is where it shows; `why` completes the summary."""

    cause: str
    ranks: tuple[int, ...]
    item: Item
    confidence: float
    why: str = ""
    variant: str = ""
    seq: int | None = None
    items: tuple[Item, ...] = ()


@dataclass(slots=True)
class Outcome:
    """`verdicts`: the root first, [] when nobody waits. `items`: everything waited in."""

    job: Job
    items: list[Item]
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def waiting(self) -> set[int]:
        return {rank for item in self.items for rank in item.waiting}


def analyse(job: Job) -> Outcome:
    """Who holds the job up."""
    items = frontier.items(job) + pairing.items(job)
    outcome = Outcome(job, items)
    if items:
        outcome.verdicts = _Analysis(job, items).verdicts()
    return outcome


class _Analysis:
    def __init__(self, job: Job, items: list[Item]) -> None:
        self.job = job
        self.items = items
        self.edges: dict[Hashable, list[Hashable]] = {}
        for item in items:
            self.edges[item] = list(item.awaited)
            for rank in item.waiting:
                self.edges.setdefault(rank, []).append(item)
        for rank in sorted({rank for item in items for rank in item.waiting}):
            self._hold_up(rank)

    def _hold_up(self, rank: int) -> None:
        """A call that all have issued, yet does not complete, is held up by the call that a member issued before."""
        placed = [(record, item.seq, item) for item in self.items if rank in item.waiting
                  if (record := item.record(rank)) is not None]
        placed.sort(key=lambda row: row[:2])
        for (_, _, before), (_, _, after) in pairwise(placed):
            if not after.awaited and before is not after:
                self.edges[after].append(before)

    def verdicts(self) -> list[Verdict]:
        """All that can be said, the most certain kind first."""
        ends = graph.terminal(self.edges)
        found = self._mismatches()
        blamed = {rank for verdict in found for rank in verdict.ranks}
        cycles = [part for part in ends if len(part) > 1]
        found += [verdict for part in cycles if (verdict := self._cycle(part)) is not None]
        single = [part[0] for part in ends if len(part) == 1]
        complete = [node for node in single if isinstance(node, Item)]
        ranks = {node for node in single if isinstance(node, int)}
        certain = bool(found)
        found += [v for v in self._idle(ranks) if not set(v.ranks) <= blamed]
        if not found:
            found += self._stuck(complete)
        if not found:
            found += self._absent(ranks)
        if not certain and not any(v.ranks for v in found):
            found += self._everybody(complete, found)
        if not found:
            found.append(self._undetermined(ranks))
        return self._sorted(found)

    def _sorted(self, found: list[Verdict]) -> list[Verdict]:
        """Verdicts that name somebody before those that do not; otherwise as found."""
        return sorted(found, key=lambda v: (v.cause == "hang_undetermined", not v.ranks))

    # -- members disagree ------------------------------------------------------------------------------------------

    def _mismatches(self) -> list[Verdict]:
        found: list[Verdict] = []
        for item in sorted(self.items, key=_age):
            wrong, seq = item.disagreement, item.seq
            if item.what == "collective" and (wrong is None or wrong.what != "operation"):
                earlier = frontier.diverged_earlier(item)
                if earlier is not None:
                    seq, wrong = earlier
            if wrong is None or (item.missing and wrong.what != "operation"):
                continue
            if wrong.odd:
                if any(set(wrong.odd) == set(v.ranks) for v in found):
                    continue
                confidence = 0.95 if wrong.votes > 2 else 0.8
                found.append(Verdict("collective_mismatch", wrong.odd, item, confidence, wrong.note, wrong.what, seq))
            elif not any(v.ranks for v in found):
                found.append(Verdict("hang_undetermined", (), item, 0.5, wrong.note, wrong.what, seq))
        decided = [v for v in found if v.ranks]
        return decided or found[:1]

    # -- circles ---------------------------------------------------------------------------------------------------

    def _cycle(self, part: list[Hashable]) -> Verdict | None:
        items = sorted((node for node in part if isinstance(node, Item)), key=_age)
        ranks = {node for node in part if isinstance(node, int)} | {rank for item in items for rank in item.waiting}
        halves = [item for item in items if item.what != "collective" and item.missing]
        if halves:
            guilty = pairing.who_went_on(self.job, halves, items)
            return Verdict("p2p_unmatched", guilty, halves[0], 0.85 if len(guilty) == 1 else 0.6, items=tuple(items))
        told = order.departure(self.job, items, ranks)
        if told is None:
            return Verdict("group_order_deadlock", (), items[0], 0.6, items=tuple(items))
        ordered = dict.fromkeys([told.first, told.second, *items])
        return Verdict("group_order_deadlock", told.ranks, items[0], 0.9, told.why,
                       "skipped" if told.skipped else "swapped", items=tuple(ordered))

    # -- ranks that wait for nobody --------------------------------------------------------------------------------

    def _idle(self, ends: set[int]) -> list[Verdict]:
        """Ranks whose dumps are here, that wait in nothing, and that others wait for."""
        idle = {rank for rank in ends if rank in self.job.dumps}
        known = {rank for rank in idle if any(rank in item.missing and not self._may_have_failed(item)
                                              for item in self.items)}
        sure = {rank for rank in known if not self._may_wait_in_p2p(rank)} or known
        halves = [i for i in self.items if i.what != "collective" and set(i.missing) & sure]
        groups = [i for i in self.items if i.what == "collective" and set(i.missing) & sure]
        alone = {id(item) for item in groups if self._lonely(item, known)}
        extra = [item for item in groups if id(item) in alone]
        groups = [item for item in groups if id(item) not in alone]
        found = []
        if groups:
            guilty = tuple(sorted({rank for item in groups for rank in item.missing if rank in sure}))
            seen = min(groups, key=_age)
            vague = any(self._may_wait_in_p2p(rank) for rank in guilty)
            witnesses = len({rank for item in groups for rank in item.waiting})
            confidence = 0.6 if vague else 0.95 if witnesses > 2 else 0.85
            found.append(Verdict("collective_missing_rank", guilty, seen, confidence,
                                 variant="p2p" if vague else "", items=tuple(groups)))
            halves = [item for item in halves if not set(item.missing) & sure <= set(guilty)]
        if halves:
            guilty = tuple(sorted({rank for item in halves for rank in item.missing if rank in sure}))
            found.append(Verdict("p2p_unmatched", guilty, min(halves, key=_age), 0.9, items=tuple(halves)))
        if extra and not found:
            item = min(extra, key=_age)
            found.append(Verdict("collective_mismatch", tuple(item.waiting), item, 0.6, variant="extra"))
        return found

    @staticmethod
    def _may_have_failed(item: Item) -> bool:
        """On Gloo the death of one rank fails the calls of others one by one; who did not come further may have
        failed in the call before. So next to a rank that left no dump nobody else is blamed."""
        return bool(item.absent) and item.group.retires

    def _lonely(self, item: Item, idle: set[int]) -> bool:
        """True when a few issued a call that most members, all of them at one and the same place, never did."""
        came = len(item.waiting) + len(item.passed) + len(item.behind)
        counts = {item.group.by_rank[rank].issued for rank in item.missing}
        return came < len(item.missing) and set(item.missing) <= idle and len(counts) == 1 and not item.absent

    def _may_wait_in_p2p(self, rank: int) -> bool:
        """Gloo counts sends and receives without recording them: one came after the rank's last collective."""
        return any(m.log is not None and m.log.unlisted > 0
                   for g in self.job.groups if (m := g.by_rank.get(rank)) is not None)

    def _stuck(self, complete: list[Item]) -> list[Verdict]:
        """Everybody came and most have finished, or started: the few that have not are held up on their own side."""
        for item in sorted(complete, key=_age):
            if item.what != "collective" or item.group.inferred:
                continue
            sample = item.sample()
            if item.passed and len(item.waiting) < len(item.passed) and kind(sample.op) in SYNCHRONISING:
                return [Verdict("collective_missing_rank", tuple(item.waiting), item, 0.85, variant="behind")]
            timed = [rank for rank in item.waiting if self._is_timed(item, rank)]
            begun = {rank for rank in timed if any(e.started for e in item.calls.get(rank, []))}
            idle = set(timed) - begun
            if idle and len(timed) == len(item.waiting) and len(idle) < len(begun) + len(item.passed):
                return [Verdict("collective_missing_rank", tuple(sorted(idle)), item, 0.75, variant="device")]
        return []

    def _is_timed(self, item: Item, rank: int) -> bool:
        log = item.group.by_rank[rank].log
        return log is not None and any(entry.started for entry in log.entries)

    def _absent(self, ends: set[int]) -> list[Verdict]:
        gone = {rank for rank in ends if rank in self.job.absent}
        items = [item for item in self.items if set(item.absent) & gone]
        if not items:
            return []
        seen = min(items, key=_age)
        if all(item.assumed for item in items):
            return [Verdict("hang_undetermined", (), seen, 0.4, variant="retired", items=tuple(items))]
        if any(2 * len(item.absent) > len(item.group.ranks) for item in items) or ends & self.job.unreadable:
            return [Verdict("hang_undetermined", (), seen, 0.5, variant="absent", items=tuple(items))]
        guilty = tuple(sorted({rank for item in items for rank in item.absent}))
        confidence = 0.8 if len(seen.waiting) > 2 else 0.7
        return [Verdict("rank_dump_missing", guilty, seen, confidence, items=tuple(items))]

    # -- nobody to blame -------------------------------------------------------------------------------------------

    def _everybody(self, complete: list[Item], found: list[Verdict]) -> list[Verdict]:
        if found or not complete:
            return []
        item = min(complete, key=_age)
        if item.group.inferred and any(self.job.is_idle(rank) for rank in self.job.dumps):
            return [Verdict("hang_undetermined", (), item, 0.4, variant="inferred")]
        confidence = 0.85 if len(item.waiting) > 2 and not item.group.inferred else 0.7
        return [Verdict("hang_all_waiting", (), item, confidence)]

    def _undetermined(self, ends: set[int]) -> Verdict:
        item = min(self.items, key=_age)
        variant = "unreadable" if ends & self.job.unreadable else "overwritten"
        return Verdict("hang_undetermined", (), item, 0.5, variant=variant)


def _age(item: Item) -> tuple[int, int]:
    """Sorts the item that was waited in first to the front; items without a time come last."""
    return (item.time_ns or 1 << 63, item.seq)
