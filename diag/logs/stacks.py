"""What the ranks were doing, from the tracebacks that even the victims print when a wait breaks.

A Gloo or NCCL error is raised inside the collective that waited. When most ranks were in one operation and a few in
another, the few are where the paths diverged; a rank that finished while the others waited left them early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from diag.artefacts.log_facts import Frame, Traceback
from diag.artefacts.traceback import user_frame
from diag.logs.known import pick_evidence, subject_of
from diag.logs.view import Item, Raised, View
from diag.schema import Finding, Where

_COLLECTIVES = {"all_reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor", "all_gather_object",
                "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all", "send", "recv",
                "all_to_all_single", "isend", "irecv", "batch_isend_irecv", "broadcast_object_list",
                "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced", "gather_object",
                "scatter_object_list"}
#: Fewer ranks than this make no majority.
LEAST = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """One rank inside a collective: the operation and the user's line that called it."""

    rank: int
    operation: str
    place: str
    raised: Raised


def waits(view: View) -> list[Wait]:
    """The collective each rank was in when its wait broke; the first traceback of each rank counts."""
    found: dict[int, Wait] = {}
    for raised in view.raised:
        if raised.rank is None or raised.rank in found:
            continue
        tb = raised.traceback.origin
        frame = next((f for f in tb.frames if f.function in _COLLECTIVES and "distributed" in f.file), None)
        if frame is not None:
            user = _caller(tb, frame)
            found[raised.rank] = Wait(raised.rank, frame.function, f"{user.file}:{user.line}" if user else "", raised)
    return list(found.values())


def _caller(tb: Traceback, collective: Frame) -> Frame | None:
    before = tb.frames[: tb.frames.index(collective)]
    return user_frame(Traceback(type=tb.type, message="", line=0, end_line=0, offset=0, text="", speaker=tb.speaker,
                                frames=before)) if before else None


def diverged(view: View) -> Finding | None:
    """A minority of the ranks was in another collective, or called it from another line, than the majority."""
    seen = waits(view)
    if len(seen) < LEAST:
        return None
    for key, words in ((lambda w: w.operation, "in {}"), (lambda w: w.place, "at {}")):
        counts = Counter(key(w) for w in seen)
        (most, number), *others = counts.most_common()
        if not others or number <= len(seen) / 2:
            continue
        odd = [w for w in seen if key(w) != most]
        ranks = sorted(w.rank for w in odd)
        where = f"{subject_of(ranks, [])} {'was' if len(ranks) == 1 else 'were'} {words.format(key(odd[0]))} while " \
                f"{number} others were {words.format(most)}"
        user = odd[0].place.rpartition(":")
        proof = [odd[0].raised.evidence(), next(w for w in seen if key(w) == most).raised.evidence()]
        return Finding(cause="collective_mismatch", severity="fatal", confidence=0.85 if key(odd[0]) != odd[0].place
                       else 0.7, summary=where, evidence=proof,
                       where=Where(ranks=ranks, file=user[0] or None, line=int(user[2]) if user[2].isdigit() else None),
                       numbers={"operations": dict(counts)})
    return None


def fingerprints(view: View, finding: Finding) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL prints what two ranks are in, on every rank: the minority is guilty."""
    said: dict[int, str] = {}
    for item in view.of("collective-mismatch-detected"):
        for rank, print_ in (("a", "one"), ("b", "other")):
            if rank in item.groups and print_ in item.groups:
                said[int(item.groups[rank])] = item.groups[print_]
    counts = Counter(said.values())
    if len(said) < LEAST or not counts:
        return
    most, number = counts.most_common(1)[0]
    odd = sorted(rank for rank, what in said.items() if what != most)
    if odd and number > len(said) / 2 and len(odd) < number:
        finding.where.ranks, finding.confidence = odd, 0.93
        finding.summary = f"{subject_of(odd, [])} called {said[odd[0]]} while {number} others called {most}"


def left_early(view: View) -> Finding | None:
    """Ranks that said they had finished while the others waited for them."""
    complaints = [i for i in view.of("gloo-peer-gone", "gloo-timeout", "watchdog-timeout", "nccl-remote-gone",
                                     "store-broken") if i.rank is not None]
    done: dict[int, Item] = {}
    for item in view.of("done-training"):
        if item.rank is not None:
            done.setdefault(item.rank, item)
    suffering = {i.rank for i in complaints}
    early = sorted(set(done) - suffering)
    if not early or not suffering or len(early) > len(suffering) or suffering & set(done):
        return None
    return Finding(cause="uneven_batches", severity="fatal", confidence=0.75, where=Where(ranks=early),
                   summary=f"{subject_of(early, [])} finished and left while the others still waited in a collective",
                   evidence=pick_evidence([*(done[r] for r in early), *complaints[:3]]))
