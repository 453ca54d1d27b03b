"""Verdicts as findings of the report: one per verdict, one per kind of group for those who only wait."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.flight_recorder import NAME, FlightRecorderDump
from diag.artefacts.fr_dump import Entry, Op
from diag.detectors import NotChecked
from diag.hang import groups, ops, words
from diag.hang.analyse import Outcome, Verdict, analyse
from diag.hang.frontier import Item
from diag.schema import Evidence, Finding, Severity, Where

#: Rank lists and tables in `numbers` are no longer than this.
MAX_LISTED = 64
#: Different calls of one number that are listed.
MAX_CAMPS = 8
#: Guilty ranks whose last call is shown, and waiting ranks whose call is shown.
SHOWN_GUILTY, SHOWN_WAITING = 4, 2
_SANE_NS = (1_420_000_000 * 10**9, 4_100_000_000 * 10**9)

_FIX = {
    "collective_missing_rank": [
        "Look at the named rank alone: its log, its host's kernel log (out of memory, Xid), `py-spy dump` if it lives.",
        "If it took another branch (end of data, a condition on its own rank), make all ranks decide together.",
        "If it was only slow (tokenising, saving, compiling), raise the timeout for that phase or move the work.",
    ],
    "behind": [
        "Look at that rank's GPU and links: kernel log of its host (Xid), NIC counters (link_downed), its temperature.",
        "Get a native stack if it lives (`py-spy dump --native`): a kernel that does not end looks the same.",
        "If it happens again on the same host, take the host out.",
    ],
    "device": [
        "Find the kernel that runs before it on that GPU: native stack (`py-spy dump --native`), compute-sanitizer.",
        "Look at the kernel log of its host (Xid) and at the GPU's clocks and temperature.",
        "If it happens again on the same host, take the host out.",
    ],
    "rank_dump_missing": [
        "Look for the process: log and exit code of that rank, kernel log of its host (out of memory, Xid).",
        "If it lives, it cannot run Python (GIL held, stuck in the driver): `py-spy dump --native` on it.",
        "If only the file is missing, collect it and run this again.",
    ],
    "collective_mismatch": [
        "Compare the stack of the named rank with another's: the code took another branch, or built other shapes.",
        "Make the condition equal on all ranks (broadcast the decision), or pad the sizes.",
        "Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL to be told at the first differing call.",
    ],
    "p2p_unmatched": [
        "Look at the pipeline schedule of the named rank: which send or receive it skips, or what it does before it.",
        "If two neighbours send first, let one receive first, or use batch_isend_irecv.",
    ],
    "group_order_deadlock": [
        "Issue the collectives of the groups in one order on all ranks.",
        "Create all groups in one place, in one order; use one stream per family of groups.",
    ],
    "hang_all_waiting": [
        "Look at network and GPUs: NIC counters (link_downed), kernel log (Xid), `ncclras`, `pdtrain diag comm`.",
        "Find the slow or dead link with a pairwise test of the ranks in the group.",
        "If every rank's GPU is busy, get native stacks: a kernel of the model may be the one that does not end.",
    ],
    "hang_undetermined": [
        "Collect the dumps of all ranks, taken at the same time, with a larger TORCH_FR_BUFFER_SIZE.",
        "Read the logs too: `pdtrain diag postmortem DIR` on the whole run folder.",
    ],
}


def findings(artefacts: Artefacts, cause: str) -> Iterator[Finding | NotChecked]:
    """All findings about `cause` in the dumps among `artefacts`; the first cause also brings its victims."""
    outcome = _outcome(artefacts)
    for number, verdict in enumerate(outcome.verdicts):
        if verdict.cause == cause:
            yield _finding(verdict, outcome, leads=number == 0)
    if outcome.verdicts and outcome.verdicts[0].cause == cause != "hang_undetermined":
        yield from _victims(outcome, outcome.verdicts[0])


def notes(artefacts: Artefacts) -> Iterator[NotChecked]:
    """What the dumps could not tell."""
    outcome = _outcome(artefacts)
    job = outcome.job
    if job.dumps and not any(dump.dump.entries for dump in job.dumps.values()) and not outcome.items:
        yield NotChecked("the dumps hold no calls: the recorder was off (TORCH_FR_BUFFER_SIZE=0) or nothing was issued")
    if job.absent and not any(v.cause in ("rank_dump_missing", "hang_undetermined") for v in outcome.verdicts):
        yield NotChecked(f"{words.ranks_text(job.absent)}: no dump among the inputs")
    for text in job.extra[:5]:
        yield NotChecked(f"left aside: {text}")


@lru_cache(maxsize=1)
def _outcome(artefacts: Artefacts) -> Outcome:
    """The analysis; remembered because each cause is a detector of its own."""
    damaged = [rank for item in artefacts.of(Unreadable) if item.format == NAME for rank in item.ranks]
    return analyse(groups.build(artefacts.of(FlightRecorderDump), damaged))


def _finding(verdict: Verdict, outcome: Outcome, *, leads: bool) -> Finding:
    item = verdict.item
    certain = verdict.cause != "hang_undetermined"
    severity: Severity = "fatal" if certain and leads else "error" if certain else "warning"
    evidence = [*_guilty_evidence(verdict, outcome), *_waiting_evidence(verdict, outcome)]
    where = Where(ranks=list(verdict.ranks), group=item.group.label, time=_time(item.time_ns))
    frame = next((frame for _, _, frame in _last_calls(verdict, outcome) if frame is not None), None)
    if frame is not None:
        where.file, where.line = frame.filename, frame.line
    return Finding(
        cause=verdict.cause, summary=words.summary(verdict, outcome), severity=severity,
        role="root" if leads and certain else "symptom",
        confidence=verdict.confidence if leads else 0.4,
        where=where, evidence=evidence, fix=list(_FIX.get(verdict.variant) or _FIX[verdict.cause]),
        numbers=_numbers(verdict, outcome),
    )


def _last_calls(verdict: Verdict, outcome: Outcome) -> Iterator[tuple[int, Entry | None, Any]]:
    """(guilty rank, the call that convicts it or its last one, the user's frame in it)."""
    item, seq = verdict.item, verdict.item.seq if verdict.seq is None else verdict.seq
    mismatch = verdict.cause == "collective_mismatch" and item.what == "collective"
    for rank in verdict.ranks[:SHOWN_GUILTY]:
        dump = outcome.job.dumps.get(rank)
        if dump is None:
            yield rank, None, None
            continue
        member = item.group.by_rank.get(rank)
        calls = member.calls(seq) if member is not None and mismatch else []
        entry = calls[0] if calls else dump.dump.last[1] if dump.dump.last is not None else None
        stack = entry.stack if entry is not None else ()
        if not stack and dump.dump.last is not None and entry is not None and dump.dump.last[1].record == entry.record:
            stack = dump.dump.last[1].stack
        yield rank, entry, words.frame_of(stack)


def _guilty_evidence(verdict: Verdict, outcome: Outcome) -> Iterator[Evidence]:
    convicting = verdict.cause in ("collective_mismatch", "group_order_deadlock")
    for rank, entry, frame in _last_calls(verdict, outcome):
        dump = outcome.job.dumps.get(rank)
        if dump is None:
            continue
        if entry is None:
            yield Evidence(path=dump.path, rank=rank, text=f"no call recorded{_status(verdict.item, rank)}")
            continue
        label = _label(outcome, rank, entry)
        state = "completed" if entry.done else "timed out" if entry.timed_out else "not completed"
        word = "call" if convicting and verdict.cause == "collective_mismatch" else "last call"
        yield Evidence(path=dump.path, rank=rank, time=_time(entry.time_ns),
                       text=f"{word} {ops.in_words(entry)} on {label}, {state}{_at(frame)}")


def _waiting_evidence(verdict: Verdict, outcome: Outcome) -> Iterator[Evidence]:
    shown = [(item, rank) for item in dict.fromkeys([verdict.item, *verdict.items])
             for rank in item.waiting if rank not in verdict.ranks][:SHOWN_WAITING]
    if verdict.cause == "group_order_deadlock":  # one of each camp
        shown = [(item, rank) for item in verdict.items
                 for rank in [r for r in item.waiting if r not in verdict.ranks][:1]][:4]
    for item, rank in shown:
        entry = item.calls[rank][0]
        yield Evidence(path=outcome.job.dumps[rank].path, rank=rank, time=_time(entry.time_ns),
                       text=f"waits in {ops.in_words(entry)} on {item.group.label}"
                            f"{', timed out' if entry.timed_out else ''}{_at(words.frame_of(entry.stack))}")


def _status(item: Item, rank: int) -> str:
    member = item.group.by_rank.get(rank)
    if member is None or member.issued is None:
        return ""
    return f"; {item.group.label} stands at #{member.issued}"


def _label(outcome: Outcome, rank: int, entry: Entry) -> str:
    """The group in which `rank` made the call `entry`."""
    for group in outcome.job.groups:
        member = group.by_rank.get(rank)
        if member is not None and member.log is not None and any(e.record == entry.record for e in member.log.entries):
            return group.label
    return "a group of its own"


def _at(frame: Any) -> str:
    return f"; at {frame.filename}:{frame.line} in {frame.name}" if frame is not None else ""


def _numbers(verdict: Verdict, outcome: Outcome) -> dict[str, Any]:
    item, job = verdict.item, outcome.job
    entry = item.sample()
    seq = item.seq if verdict.seq is None else verdict.seq
    group = item.group
    numbers: dict[str, Any] = {
        "op": entry.op.name, "seq": seq, "group_name": group.name, "group_size": len(group.ranks),
        "group_ranks": list(group.ranks[:MAX_LISTED]), "input_sizes": [list(s) for s in entry.op.input_sizes[:16]],
        "output_sizes": [list(s) for s in entry.op.output_sizes[:16]], "dtypes": list(entry.op.input_dtypes[:4]),
        "waiting": len(outcome.waiting - set(verdict.ranks)),
        "waiting_ranks": sorted(outcome.waiting - set(verdict.ranks))[:MAX_LISTED],
        "world_size": job.world, "dumps_read": len(job.dumps),
        "incomplete_rings": sum(dump.dump.wrapped for dump in job.dumps.values()),
    }
    if job.absent:
        numbers["ranks_without_dump"] = sorted(job.absent)[:MAX_LISTED]
    if entry.timeout_ms:
        numbers["timeout_seconds"] = entry.timeout_ms / 1000
    if verdict.variant in ("size", "dtype", "operation"):
        numbers["calls"] = _camps(item, seq)
    if verdict.cause in ("group_order_deadlock", "p2p_unmatched") and verdict.items:
        numbers["waits"] = [{"group": i.group.label, "op": i.sample().op.name, "seq": i.seq,
                             "waiting": i.waiting[:MAX_LISTED], "for": i.awaited[:MAX_LISTED]}
                            for i in verdict.items[:MAX_LISTED]]
    return numbers


def _camps(item: Item, seq: int) -> list[dict[str, Any]]:
    """The different calls with this number, and which ranks made each; the smallest camp first."""
    camps: dict[Any, list[int]] = {}
    for rank, member in item.group.by_rank.items():
        calls = member.calls(seq) or item.calls.get(rank, [])
        if calls:
            camps.setdefault(tuple(entry.op for entry in calls), []).append(rank)
    ordered = sorted(camps.items(), key=lambda camp: (len(camp[1]), camp[1]))
    return [{"ranks": ranks[:MAX_LISTED], **_call(calls[0])} for calls, ranks in ordered[:MAX_CAMPS]]


def _call(op: Op) -> dict[str, Any]:
    return {"op": op.name, "input_sizes": [list(s) for s in op.input_sizes[:16]],
            "output_sizes": [list(s) for s in op.output_sizes[:16]], "dtypes": list(op.input_dtypes[:4])}


def _victims(outcome: Outcome, root: Verdict) -> Iterator[Finding]:
    """Those who only wait, by kind of group and what they wait in."""
    kinds: dict[tuple[str, str], list[Item]] = {}
    for item in outcome.items:
        kinds.setdefault((item.group.label, item.what), []).append(item)
    for (label, what), items in kinds.items():
        ranks = sorted({rank for item in items for rank in item.waiting} - set(root.ranks))
        if not ranks:
            continue
        first = min(items, key=lambda item: (item.time_ns or 1 << 63, item.seq))
        entry = next((first.calls[r][0] for r in first.waiting if r in ranks), first.sample())
        there = f"{len(items)} {what}s" if len(items) > 1 and what != "collective" else ops.in_words(entry)
        many = len({id(item.group) for item in items})
        on = f"{many} groups {label}" if many > 1 else label
        yield Finding(
            cause=root.cause, role="victim", severity="info", confidence=root.confidence,
            summary=f"{words.ranks_text(ranks, capital=True)} {words.wait(ranks)} in {there} on {on}",
            where=Where(ranks=ranks, group=label, time=_time(first.time_ns)),
            numbers={"op": entry.op.name, "seq": first.seq, "groups": many, "waiting": len(ranks)},
        )


def _time(ns: int) -> str | None:
    if not _SANE_NS[0] < ns < _SANE_NS[1]:
        return None
    return datetime.fromtimestamp(ns // 1000 / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
