"""all_to_all: rows are what a rank sends, columns what it receives. Uneven is normal; unequal sums are the fault.

With one tensor per peer the dump holds the whole matrix, and every pair can be checked. With one tensor per rank
(`all_to_all_single`, every MoE dispatch) it holds the row and column sums only: their totals must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from diag.artefacts.fr_dump import Entry
from diag.hang import ops
from diag.hang.vote import split


@dataclass(frozen=True, slots=True)
class Fault:
    """Who is out of line (() when that cannot be told), against how many others, and what does not add up."""

    odd: tuple[int, ...]
    votes: int
    note: str


def fault(entries: Mapping[int, Entry], *, whole: bool) -> Fault | None:
    """The fault in an all_to_all called by the ranks in `entries`; `whole` when these are all members."""
    sent = {rank: ops.elements(entry.op.input_sizes) for rank, entry in entries.items()}
    received = {rank: ops.elements(entry.op.output_sizes) for rank, entry in entries.items()}
    matrix = _matrix(entries) if whole else None
    if matrix is not None:
        return _by_pair(matrix, sent)
    if not whole:
        return None
    if sum(sent.values()) == sum(received.values()):
        # Even splits all over, and one rank with a larger tensor: the sums hide it, since it is odd on both sides.
        lone = split(sent) if sent == received else None
        return None if lone is None else Fault(lone.odd, lone.votes, "the members pass tensors of unequal size")
    excess = sum(sent.values()) - sum(received.values())
    note = f"{sum(sent.values()):,} elements are sent and {sum(received.values()):,} received"
    for row, sign in ((sent, 1), (received, -1)):
        found = split(row)
        # The odd one must also account for the whole difference: taking the usual size makes the sums equal.
        if found is not None and found.decided:
            surplus = sum(row[rank] - found.majority for rank in found.odd)
            if surplus * sign == excess:
                return Fault(found.odd, found.votes, note)
    uneven = split({rank: (sent[rank], received[rank]) for rank in entries})
    if uneven is not None and uneven.decided:
        return Fault(uneven.odd, uneven.votes, note)
    return Fault((), 0, note)


def _matrix(entries: Mapping[int, Entry]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]] | None:
    """(sent, received) by (source, destination), None unless every rank lists one tensor per member."""
    ranks = sorted(entries)
    if any(len(e.op.input_sizes) != len(ranks) or len(e.op.output_sizes) != len(ranks) for e in entries.values()):
        return None
    if len(ranks) < 2:
        return None
    sent, received = {}, {}
    for rank, entry in entries.items():
        for place, other in enumerate(ranks):
            sent[rank, other] = prod(entry.op.input_sizes[place])
            received[other, rank] = prod(entry.op.output_sizes[place])
    return sent, received


def _by_pair(matrix: tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]], rows: dict[int, int]
             ) -> Fault | None:
    """The rank that all pairs out of line have in common; of a single pair, the sender if its row is odd."""
    sent, received = matrix
    wrong = [pair for pair, size in sent.items() if received[pair] != size]
    if not wrong:
        return None
    source, target = wrong[0]
    note = (f"rank {source} sends {sent[source, target]:,} elements to rank {target}, which expects "
            f"{received[source, target]:,}")
    touched = Counter(rank for pair in wrong for rank in set(pair))
    common = tuple(sorted(rank for rank, n in touched.items() if n == len(wrong)))
    if len(common) == 1:
        return Fault(common, len(rows) - 1, note)
    odd = split(rows)
    senders, receivers = {pair[0] for pair in wrong}, {pair[1] for pair in wrong}
    if odd is not None and odd.decided and set(odd.odd) <= senders:
        return Fault(odd.odd, odd.votes, note)
    if odd is None and len(receivers) == 1 and len(rows) > 2:  # every row has the usual sum: the receiver miscounts
        return Fault(tuple(receivers), len(rows) - 1, note)
    return Fault((), 0, note)
