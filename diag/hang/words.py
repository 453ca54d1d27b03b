"""Words for a verdict: who, where, what is different. Summaries are one sentence that a tired person understands."""

from __future__ import annotations

from collections.abc import Iterable

from diag.artefacts.fr_dump import Entry, Frame
from diag.hang import ops
from diag.hang.analyse import Outcome, Verdict
from diag.hang.frontier import Item

#: Longer rank lists are shortened in a sentence; `where.ranks` and `numbers` have them in full.
SHOWN_RANGES = 8


def ranks_text(ranks: Iterable[int], *, capital: bool = False) -> str:
    """"rank 3", "ranks 0-3 and 7": ranges, so that a thousand ranks stay readable.

    >>> ranks_text([0, 1, 2, 3, 7])
    'ranks 0-3 and 7'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    parts = [part for a, b in runs for part in ([f"{a}-{b}"] if b > a + 1 else map(str, sorted({a, b})))]
    if len(parts) > SHOWN_RANGES:
        text = ", ".join(parts[: SHOWN_RANGES - 1]) + f" and more ({len(ordered)} in all)"
    else:
        text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""
    word = "rank" if len(ordered) == 1 else "ranks"
    return f"{word.capitalize() if capital else word} {text}"


def others_text(count: int) -> str:
    """"the other rank", "the 7 others"."""
    return "the other rank" if count == 1 else f"the {count} others"


def place(item: Item, seq: int | None = None) -> str:
    """"all_reduce #12 of default_pg"; of a send or receive, which one."""
    entry = item.sample()
    if item.what != "collective":
        ends = ops.peer(entry.op)
        source, target = (item.group.number(ends[0]), item.group.number(ends[1])) if ends else (None, None)
        return f"the {item.what} from rank {source} to rank {target} on {item.group.label}"
    number = item.seq if seq is None else seq
    return f"{operation(item, number)} #{number} of {item.group.label}"


def operation(item: Item, seq: int) -> str:
    """The name of what (most of) the group calls with number `seq`."""
    names = [ops_name(calls) for member in item.group.by_rank.values() if (calls := member.calls(seq))]
    return max(set(names), key=lambda name: (names.count(name), name)) if names else "call"


def ops_name(calls: list[Entry]) -> str:
    """"all_reduce", or "4 coalesced _all_gather_base" for a batch."""
    name = calls[0].op.name
    return name if len(calls) == 1 else f"{len(calls)} coalesced {name}"


def frame_of(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame of the user's own code: outside of installed packages if there is any such."""
    own = [f for f in stack if "site-packages" not in f.filename and "dist-packages" not in f.filename]
    return next(iter(own or stack), None)


def summary(verdict: Verdict, outcome: Outcome) -> str:
    """One sentence for `verdict`."""
    return _SUMMARIES[verdict.cause](verdict, outcome)


def _missing(verdict: Verdict, outcome: Outcome) -> str:
    item, who = verdict.item, ranks_text(verdict.ranks, capital=True)
    plural = len(verdict.ranks) > 1
    if verdict.variant == "behind":
        have = "have" if len(item.passed) > 1 else "has"
        return (f"{who} {'are' if plural else 'is'} still in {place(item)}, which {others_text(len(item.passed))} "
                f"{have} completed: {'their' if plural else 'its'} GPU, link or process is stuck")
    if verdict.variant == "device":
        return (f"{who} issued {place(item)}, but {'their GPUs have' if plural else 'its GPU has'} not begun it as the "
                f"others' have: an earlier kernel holds {'them' if plural else 'it'} up")
    waiting = _waiting_for(verdict)
    text = f"{who} never came to {place(item)}, where {ranks_text(waiting)} {wait(waiting)}"
    if verdict.variant == "p2p":
        text += "; it may be held up in a send or receive, which Gloo does not record"
    return text


def _absent(verdict: Verdict, outcome: Outcome) -> str:
    waiting = _waiting_for(verdict)
    return (f"{ranks_text(verdict.ranks, capital=True)} left no dump, and {ranks_text(waiting)} {wait(waiting)} for "
            f"{'them' if len(verdict.ranks) > 1 else 'it'} in {place(verdict.item)}")


def _mismatch(verdict: Verdict, outcome: Outcome) -> str:
    item, seq = verdict.item, verdict.item.seq if verdict.seq is None else verdict.seq
    who, s = ranks_text(verdict.ranks, capital=True), "" if len(verdict.ranks) > 1 else "s"
    if verdict.variant == "extra":
        return (f"{who} issued {place(item)}, which {others_text(len(item.missing))} never call: they ended at "
                f"#{item.group.by_rank[item.missing[0]].issued}")
    if item.what != "collective":
        return f"{who} disagree{s} about {place(item)}: {verdict.why}"
    mine = {rank: member.calls(seq) for rank, member in item.group.by_rank.items() if member.calls(seq)}
    odd = mine[verdict.ranks[0]]
    rest = [calls for rank, calls in mine.items() if rank not in verdict.ranks]
    usual = max(rest, key=lambda calls: sum(_same(calls, other) for other in rest))
    others, one = others_text(len(rest)), len(rest) == 1
    have = f"{others} {'has' if one else 'have'}"
    if verdict.variant == "operation":
        calls = f"{others} call{'s' if one else ''}"
        return f"{who} call{s} {ops_name(odd)} as #{seq} of {item.group.label}, where {calls} {ops_name(usual)}"
    if verdict.variant == "dtype":
        return f"{who} call{s} {place(item, seq)} with {_types(odd)}, where {have} {_types(usual)}"
    if verdict.why:
        return f"{who} call{s} {place(item, seq)} with sizes that do not fit: {verdict.why}"
    return f"{who} call{s} {place(item, seq)} with {_size(odd, usual)}, where {have} {_size(usual, odd)}"


def _p2p(verdict: Verdict, outcome: Outcome) -> str:
    item = verdict.item
    half, other = ("receive", "send") if item.what == "send" else ("send", "receive")
    peer = item.waiting[0]
    if len(verdict.ranks) > 1 and len(item.missing) == 1:
        return (f"{ranks_text(verdict.ranks, capital=True)} did not post their halves of sends and receives, the "
                f"first of them the {half} for rank {peer}'s {other} on {item.group.label}")
    return (f"{ranks_text(verdict.ranks, capital=True)} did not post the {half} for the {other} that rank {peer} waits "
            f"in on {item.group.label}")


def _order(verdict: Verdict, outcome: Outcome) -> str:
    if verdict.ranks:
        who, first, second = ranks_text(verdict.ranks, capital=True), place(verdict.items[0]), place(verdict.items[1])
        if verdict.variant == "skipped":
            return f"{who} went on to {second} without {first}, which comes before it {verdict.why}; so all wait"
        return f"{who} issued {second} before {first}; it is the other way round {verdict.why}; so all wait"
    labels = list(dict.fromkeys(item.group.label for item in verdict.items))
    groups = " and ".join(labels[:3]) if len(labels) > 1 else f"two groups called {labels[0]}"
    camps = "; ".join(f"{ranks_text(item.waiting)} in {place(item)}" for item in verdict.items[:3])
    return f"Ranks entered {groups} in different orders and wait on each other ({camps}); no order has a majority"


def _everybody(verdict: Verdict, outcome: Outcome) -> str:
    item = verdict.item
    if item.what != "collective":
        return f"Both halves of {place(item)} are posted and it does not complete: network, GPU or library"
    size = len(item.group.ranks)
    who = "Both ranks" if size == 2 else f"All {size} ranks"
    return f"{who} came to {place(item)} with the same call, and it does not complete: network, GPU or library"


def _unknown(verdict: Verdict, outcome: Outcome) -> str:
    item, job = verdict.item, outcome.job
    head = (f"{ranks_text(item.waiting, capital=True)} {wait(item.waiting)} in {place(item)}, and the dumps do not "
            "say for whom")
    match verdict.variant:
        case "operation" | "size" | "dtype":
            why = verdict.why or _camps(item, item.seq if verdict.seq is None else verdict.seq, verdict.variant)
            return f"The members disagree about #{verdict.seq} of {item.group.label}: {why}; no telling who is wrong"
        case "absent":
            return f"{head}: {len(job.absent)} of {job.world} ranks left no dump; collect the missing ones"
        case "retired":
            return (f"{ranks_text(job.absent, capital=True)} left no dump, and Gloo does not tell whether the others "
                    f"completed their last call, {place(item)}, or failed in it")
        case "inferred":
            return f"{head}: Gloo does not record the group's members"
        case "unreadable":
            return f"{head}: the dump of {ranks_text(job.unreadable)} cannot be read"
        case _:
            return f"{head}: what came before was overwritten in the ring buffer"


def _camps(item: Item, seq: int, what: str) -> str:
    """"ranks 0-3 call all_reduce, ranks 4-7 broadcast": who holds with whom."""
    camps: dict[str, list[int]] = {}
    for rank, member in item.group.by_rank.items():
        calls = member.calls(seq)
        if calls:
            shapes = calls[0].op.input_sizes or calls[0].op.output_sizes
            sizes = f"{ops_name(calls)} of {ops.elements(shapes):,} elements"
            mine = {"operation": ops_name(calls), "dtype": _types(calls)}.get(what, sizes)
            camps.setdefault(mine, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} call{'s' if len(ranks) == 1 else ''} {mine}"
                     for mine, ranks in list(camps.items())[:3])


def wait(ranks: Iterable[int]) -> str:
    """The verb for `ranks`."""
    return "wait" if len(set(ranks)) != 1 else "waits"


def _waiting_for(verdict: Verdict) -> list[int]:
    """Everybody who waits in the item named, without the guilty."""
    return [rank for rank in verdict.item.waiting if rank not in verdict.ranks]


def _types(calls: list[Entry]) -> str:
    op = calls[0].op
    return ", ".join(dict.fromkeys(op.input_dtypes or op.output_dtypes)) or "no dtype"


def _size(calls: list[Entry], other: list[Entry]) -> str:
    """The size in which two calls differ: input, else output; shapes when the number of elements is the same."""
    for mine, theirs in zip(calls, other, strict=False):
        for word, a, b in (("input", mine.op.input_sizes, theirs.op.input_sizes),
                           ("output", mine.op.output_sizes, theirs.op.output_sizes)):
            if ops.elements(a) != ops.elements(b):
                return f"{ops.elements(a):,} {word} element{'' if ops.elements(a) == 1 else 's'}"
            if len(a) != len(b):
                return f"{len(a)} {word} tensors"
    return "other sizes"


def _same(one: list[Entry], two: list[Entry]) -> bool:
    return [e.op for e in one] == [e.op for e in two]


_SUMMARIES = {
    "collective_missing_rank": _missing, "rank_dump_missing": _absent, "collective_mismatch": _mismatch,
    "p2p_unmatched": _p2p, "group_order_deadlock": _order, "hang_all_waiting": _everybody,
    "hang_undetermined": _unknown,
}
