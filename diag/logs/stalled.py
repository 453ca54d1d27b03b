"""Waits that name who is absent: Horovod's stall inspector and torch's monitored barrier.

Horovod has printed three forms: the ranks that are ready (0.13), the ranks that are missing after each operation
(0.14 to 0.18), and from 0.19 a list of operations after each missing rank. Rank 0 prints them; it is nobody's fault.
"""

from __future__ import annotations

import re
from collections import Counter

from diag.logs.known import pick_evidence, subject_of
from diag.logs.view import Item, View
from diag.schema import Finding, Where

_LISTED = re.compile(r"(?<![\w./:-])(?P<op>[\w./:-]{0,1000}+) ?\[(?P<what>missing|ready) ranks: ?"
                     r"(?P<ranks>\d{1,6}(?:, ?\d{1,6})*)\]")
_OF_RANK = re.compile(r"(?P<rank>\d{1,6}): \[(?P<op>[\w./:-]+)")
#: Ranks counted by hand from a list of ready ones: larger numbers are damage.
MAX_WORLD = 65_536


def horovod_finding(view: View) -> Finding | None:
    """The ranks that did not submit what the others wait for; ranks that wait for each other run different code."""
    items = view.of("horovod-stalled", "horovod-missing")
    if not items:
        return None
    missing, ready = _absent(items)
    seen = {rank for _, ranks in [*missing, *ready] for rank in ranks}
    world = view.world or min(max(seen, default=0) + 1, MAX_WORLD)
    absent = [set(ranks) for _, ranks in missing] + [set(range(world)) - set(ranks) for _, ranks in ready]
    guilty, disagree = _guilty([ranks for ranks in absent if ranks])
    ops = sorted({op for op, _ in [*missing, *ready] if op})
    words = f"{subject_of(sorted(guilty), [])} did not submit" if guilty else "Some ranks did not submit"
    if disagree:
        words = f"{subject_of(sorted(guilty), []) or 'The ranks'} submitted other operations than the rest: " \
                "different ranks miss different"
    return Finding(
        cause="collective_mismatch" if disagree else "collective_missing_rank", severity="error",
        confidence=0.8 if guilty else 0.5, where=Where(ranks=sorted(guilty)),
        summary=f"{words} tensors that the others wait for" +
                (f" ({len(ops)} named, among them {ops[0]})" if ops else ""),
        evidence=pick_evidence(items), numbers={"tensors": len(ops)})


def _absent(items: list[Item]) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
    """(operation, ranks) of what is said to be missing, and of what is said to be ready."""
    missing: list[tuple[str, list[int]]] = []
    ready: list[tuple[str, list[int]]] = []
    for item in items:
        listed = list(_LISTED.finditer(item.event.text))
        for found in listed:
            ranks = [int(n) for n in re.findall(r"\d+", found["ranks"])]
            (missing if found["what"] == "missing" else ready).append((found["op"], ranks))
        if not listed and (of := _OF_RANK.search(item.event.text)):
            missing.append((of["op"], [int(of["rank"])]))
    return missing, ready


def _guilty(absent: list[set[int]]) -> tuple[set[int], bool]:
    """The ranks absent from most operations; and whether the operations disagree about who is absent.

    When every rank is absent from something the ranks run different code: guilty is the smaller side.
    """
    if not absent:
        return set(), False
    if all(ranks == absent[0] for ranks in absent):
        return absent[0], False
    common = set.intersection(*absent)
    if common:
        return common, False
    counts = Counter(rank for ranks in absent for rank in ranks)
    most = max(counts.values())
    guilty = {rank for rank, count in counts.items() if count == most}
    return (guilty if len(guilty) <= len(counts) // 2 else set()), True


def barrier_finding(view: View) -> Finding | None:
    """A monitored barrier names the rank that did not answer; the rank that prints it is the one that waited."""
    items = view.of("monitored-barrier-peer")
    ranks = sorted({int(i.groups["peer"]) for i in items})
    if not items or len(ranks) > 1:
        return None
    return Finding(cause="collective_missing_rank", severity="error", confidence=0.7, where=Where(ranks=ranks),
                   summary=f"{subject_of(ranks, [])} did not come to the barrier that the others had reached",
                   evidence=pick_evidence(items))
