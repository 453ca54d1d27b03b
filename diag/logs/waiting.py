"""Why the others wait: one rank at work longer than their patience, batches that ran out, or nobody knows.

Refines what `watchdog` saw with what the run was doing just before, and reads the waits that have no watchdog (Gloo
and HCCL timeouts, NCCL set-up through the store).
"""

from __future__ import annotations

import re

from diag.artefacts.log_facts import Progress
from diag.logs.culprit import SILENT_FIX, stuck
from diag.logs.known import pick_evidence, subject_of
from diag.logs.stacks import diverged, left_early
from diag.logs.stalled import barrier_finding, horovod_finding
from diag.logs.view import Item, Place, View
from diag.logs.watchdog import SMALL, desync_finding, timeout_finding, waiters_of
from diag.schema import Finding, Where

#: The store broke, as opposed to a wait that ran out.
_LOST = re.compile(r"Connection reset|Broken pipe|Connection closed|failed to recv|Connection refused")
#: A batch counter this close to its end is "at the end of the epoch".
NEAR_END = 2
#: A bar of work, with its count and its total.
_BAR = re.compile(r"\d%\|[^|]{0,400}\| {0,8}(\d+)/(\d+) \[")
#: Work of one rank counts when it is the last thing done before the timeout, or goes on around it.
WORK = ("prep-work", "save-start", "eval-work")


def waiting_findings(view: View) -> list[Finding]:
    """At most one finding: the wait that began first, with the best explanation the logs allow."""
    early = left_early(view)
    if early is not None:
        return [early]
    for make in (desync_finding, timeout_finding, unique_id_finding, barrier_finding, operation_finding,
                 horovod_finding, first_process_finding):
        finding = make(view)
        if finding is not None:
            finding = refine(view, finding)
            other = diverged(view) if finding.confidence < 0.7 else None
            return [other or finding]
    return []


def refine(view: View, finding: Finding) -> Finding:
    """A more telling cause for a wait, where the surroundings show one."""
    first = _first_wait(view)
    if first is None:
        return finding
    waiting = _waiting_ranks(view)
    late = late_joiners(view, first)
    if late:
        ranks = sorted({int(i.groups["rank"]) for i in late})
        finding.cause, finding.confidence = "slow_rank_work", 0.85
        finding.where.ranks = ranks
        finding.summary = f"{subject_of(ranks, [])} reached initialisation only after the others had timed out"
        finding.evidence = [*finding.evidence[:3], *pick_evidence(late)][:7]
        return finding
    end = epoch_end(view, first) if _small(view) else None
    work = busy_rank(view, first, waiting)
    if work is not None and end is not None and work[0].rule.id != "prep-work":
        work = None
    if work is not None and finding.confidence < 0.8:
        item, ranks = work
        finding.cause = "slow_rank_work"
        finding.confidence = 0.8 if item.rule.id == "prep-work" else 0.6
        finding.where.ranks = ranks or finding.where.ranks
        finding.where.hosts = [view.identity.host_of[r] for r in finding.where.ranks if r in view.identity.host_of]
        who = subject_of(finding.where.ranks, []) or "One rank"
        finding.summary = f"{who} was still busy (\"{_short(item)}\") when the others' timeout ran out"
        finding.evidence = [*finding.evidence[:4], *pick_evidence([item])][:7]
        return finding
    vague = finding.cause in ("collective_mismatch", "collective_missing_rank", "hang_undetermined") and \
        finding.confidence < 0.8 and not (finding.cause == "collective_missing_rank" and finding.where.ranks)
    if vague and end is not None:
        finding.cause, finding.confidence = "uneven_batches", 0.62
        finding.summary = f"A rank waits in a small collective at the end of its batches; its peers had fewer or " \
                          f"more of them ({finding.summary})"
        finding.numbers["progress"] = end.text[:160]
    return finding


def _first_wait(view: View) -> Item | None:
    items = view.of("watchdog-timeout", "watchdog-at-work", "unique-id-timeout", "gloo-timeout", "hccl-wait",
                    "store-wait-timeout", "monitored-barrier-peer")
    return items[0] if items else None


def _waiting_ranks(view: View) -> set[int]:
    waiting = {w.rank for group in waiters_of(view).values() for w in group.values() if w.timed_out}
    waiting |= {int(i.groups["rank"]) for i in view.of("unique-id-timeout")}
    waiting |= {int(i.groups["rank"]) for i in view.of("monitored-barrier-peer")}
    return waiting | {i.rank for i in view.of("gloo-timeout", "hccl-wait") if i.rank is not None}


def late_joiners(view: View, first: Item) -> list[Item]:
    """NCCL init lines of ranks that appear only after the first timeout."""
    early = {i.groups["rank"] for i in view.of("nccl-init") if i.place.before(first.place) is True}
    return [i for i in view.of("nccl-init")
            if i.groups["state"] == "START" and i.groups["rank"] not in early
            and first.place.before(i.place) is True and early]


def busy_rank(view: View, first: Item, waiting: set[int]) -> tuple[Item, list[int]] | None:
    """Work that was going on when the first wait ran out, and whose it was when that can be told."""
    best: Item | None = None
    full = _full_bars(view)
    for item in view.of(*WORK):
        if item.rank is not None and item.rank in waiting:
            continue
        bar = _BAR.search(item.event.text)
        if bar is not None and item.line <= full.get((item.place.log, bar[2]), 0):
            continue
        if item.place.log != first.place.log and item.place.before(first.place) is None:
            continue
        if item.place.before(first.place) is False:
            if item.rule.id == "prep-work" and item.line <= first.line + 400:
                best = best or item
            continue
        best = item
    if best is None or _trained_between(view, best.place, first.place):
        return None
    if best.rule.id == "save-start" and _saved_between(view, best.place, first.place):
        return None
    if best.rank is not None:
        return best, [best.rank]
    missing = {int(i.groups["missing"]) for i in view.of("unique-id-timeout")}
    if len(missing) == 1:
        return best, sorted(missing)
    world = view.world or (max(waiting) + 1 if waiting and 0 not in waiting else None)
    if world is not None:
        silent = set(range(world)) - waiting
        if len(silent) == 1 or (waiting and silent and 0 in silent and len(silent) <= world // 2):
            return best, [min(silent)] if 0 in silent else sorted(silent)
    return best, []


def _full_bars(view: View) -> dict[tuple[int, str], int]:
    """The last line, per log and total, at which a bar had reached its end: that work was done by then."""
    bars = [(i, _BAR.search(i.event.text)) for i in view.of(*WORK)]
    return {(item.place.log, bar[2]): item.line for item, bar in bars if bar is not None and bar[1] == bar[2]}


def _trained_between(view: View, start: Place, end: Place) -> bool:
    return any(index == start.log == end.log and start.line < p.line < end.line for index, p in view.progress)


def _saved_between(view: View, start: Place, end: Place) -> bool:
    return any(i.place.log == start.log == end.log and start.line < i.line < end.line for i in view.of("save-done"))


def epoch_end(view: View, first: Item) -> Progress | None:
    """The last batch counter before the wait, when it stands at its end or an evaluation had just begun."""
    log = view.logs[first.place.log]
    before = [p for p in log.progress if p.line < first.line and first.line - p.line < 200 and p.total]
    if not before:
        return None
    last = before[-1]
    if last.total and last.step >= last.total - NEAR_END:
        return last
    ended = any(p.total and p.step >= p.total - NEAR_END for p in before[-4:])
    return last if ended and last.step <= NEAR_END + 1 else None


def _small(view: View) -> bool:
    sizes = [w.numel for group in waiters_of(view).values() for w in group.values() if w.numel is not None]
    return not sizes or min(sizes) <= SMALL


def _short(item: Item) -> str:
    return item.event.text.strip()[:70]


def first_process_finding(view: View) -> Finding | None:
    """A rank that failed while it waited for the main process, which goes first: rank 0 was still at work."""
    frames = [i for i in view.by_rule.get("main-process-first", ()) if i.rank != 0]
    work = [i for i in view.of("prep-work") if frames and i.rank in (0, None)
            and i.place.before(frames[0].place) is not False]
    if not frames or not work:
        return None
    return Finding(cause="slow_rank_work", severity="error", confidence=0.75, where=Where(ranks=[0]),
                   summary=f"Rank 0 was still busy (\"{_short(work[-1])}\") when the ranks that wait for it gave up",
                   evidence=pick_evidence([work[-1], *frames[:2]]))


def unique_id_finding(view: View) -> Finding | None:
    """Ranks that waited in vain for the rank that makes NCCL's unique id."""
    items = view.of("unique-id-timeout")
    if not items:
        return None
    missing = sorted({int(i.groups["missing"]) for i in items})
    if all(_LOST.search(i.groups.get("what", "")) for i in items):
        return Finding(cause="store_lost", severity="fatal", confidence=0.6, where=Where(),
                       summary=f"The process that serves the store ({subject_of(missing, []).lower()}) was gone while "
                               "the others set up NCCL", evidence=pick_evidence(items))
    return Finding(cause="missing_rank_init", severity="fatal", confidence=0.6, where=Where(ranks=missing),
                   summary=f"{subject_of(missing, [])} never came to set up NCCL; the others waited in vain",
                   evidence=pick_evidence(items),
                   numbers={"waiting_ranks": sorted({int(i.groups["rank"]) for i in items})})


def operation_finding(view: View) -> Finding | None:
    """Gloo and HCCL operations that timed out."""
    library, items = "Gloo", view.of("gloo-timeout")
    if not items:
        library, items = "HCCL", view.of("hccl-wait")
    if not items:
        return None
    ranks = {i.rank for i in items if i.rank is not None}
    guilty: list[int] = []
    if view.world and len(ranks) == view.world - 1:
        guilty = sorted(set(range(view.world)) - ranks)
    elif stuck(view) - ranks:
        guilty = sorted(stuck(view) - ranks)
    awaited = {int(i.groups["peer"]) for i in items if i.groups.get("peer")} - ranks
    if not guilty and len(awaited) == 1 and len(ranks) > 1:  # each names its neighbour; only this one waits for nobody
        guilty = sorted(awaited)
    patience = items[0].groups.get("ms")
    count = f"{len(items)} operation{'s' if len(items) > 1 else ''}"
    waited = f"; {count} waited {int(patience) / 1000:.0f} s" if patience else ""
    words = f"{subject_of(guilty, [])} did not take part" if guilty else f"{library} operations timed out"
    return Finding(cause="collective_mismatch" if guilty else "hang_undetermined", severity="fatal",
                   confidence=0.55 if guilty else 0.35, where=Where(ranks=guilty),
                   summary=f"{words}{waited}", evidence=pick_evidence(items),
                   fix=list(SILENT_FIX) if guilty else list(items[0].rule.fix))
