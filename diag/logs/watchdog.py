"""Collective timeouts: from who complains to who is missing.

The watchdog speaks on the ranks that wait. The guilty rank is the one with the smallest last-enqueued number, the one
that is in another operation, or the one that never complains at all. The first rank to time out is a victim.
Wordings of torch 1.8 to 2.14 (ProcessGroupNCCL.cpp) and of Gloo.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diag.logs.culprit import SILENT_FIX, stuck
from diag.logs.known import number_ranges, pick_evidence, subject_of
from diag.logs.view import Item, View
from diag.schema import Evidence, Finding, Where

#: Collectives that carry a handful of numbers: counters, flags, metrics, barriers.
SMALL = 16
#: A rank that says nothing is named only when at least this share of the world complains.
QUORUM = 0.5
#: Lines before a timeout that show what the run was doing.
LOOK_BACK = 60


@dataclass
class Waiter:
    """What one rank's watchdog said about one process group."""

    rank: int
    at: int | None = None
    op: str | None = None
    numel: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    timed_out: bool = False
    timeout_ms: int | None = None
    items: list[Item] = field(default_factory=list)


def waiters_of(view: View) -> dict[str, dict[int, Waiter]]:
    """Per process group (by name, "0" where the wording has none) and rank: what its watchdog said."""
    groups: dict[str, dict[int, Waiter]] = {}
    group_of_work: dict[tuple[int, int | None], str] = {}
    for item in view.of("watchdog-status", "watchdog-at-work"):
        rank, name = _global_rank(item), _group(item)
        if rank is None:
            continue
        waiter = groups.setdefault(name, {}).setdefault(rank, Waiter(rank))
        waiter.items.append(item)
        if "at" in item.groups:
            group_of_work.setdefault((rank, int(item.groups["at"])), name)
            waiter.at = int(item.groups["at"]) if waiter.at is None else waiter.at
            waiter.timed_out = True
        if "enqueued" in item.groups and waiter.enqueued is None:
            waiter.enqueued, waiter.completed = int(item.groups["enqueued"]), int(item.groups["completed"])
    for item in view.of("watchdog-timeout"):
        rank = _global_rank(item)
        if rank is None:
            continue
        at = int(item.groups["seq"]) if "seq" in item.groups else None
        name = group_of_work.get((rank, at)) or (next(iter(groups)) if len(groups) == 1 else "default")
        waiter = groups.setdefault(name, {}).setdefault(rank, Waiter(rank))
        waiter.items.append(item)
        waiter.timed_out = True
        if waiter.op is None:
            waiter.op = item.groups.get("op")
            waiter.numel = int(item.groups["numel"]) if "numel" in item.groups else None
            waiter.timeout_ms = int(item.groups["timeout"]) if "timeout" in item.groups else None
            waiter.at = at if waiter.at is None else waiter.at
    return groups


def _global_rank(item: Item) -> int | None:
    """The mark "[rank3]:" is global; "[PG ID 2 ... Rank 1]" counts within the group, and is all that old torch has."""
    if item.event.speaker.mark.startswith("[rank") and item.event.speaker.rank is not None:
        return item.event.speaker.rank
    return int(item.groups["rank"]) if "rank" in item.groups else item.rank


def _group(item: Item) -> str:
    """The group: "default" for the world group under any of its names, else description and GUID. Numbers of groups
    are local to a rank and are used only where the wording has nothing else."""
    groups = item.groups
    name = groups.get("desc") or groups.get("desc2") or ""
    if name == "default_pg" or groups.get("guid") == "0" or (not name and groups.get("pg") == "0"):
        return "default"
    return f"{name} {groups['guid']}".strip() if "guid" in groups else name or f"group {groups.get('pg', '?')}"


def timeout_finding(view: View) -> Finding | None:
    """The finding of the group that timed out first, or None when no watchdog spoke."""
    groups = waiters_of(view)
    spoken = {name: ranks for name, ranks in groups.items() if any(w.timed_out for w in ranks.values())}
    if not spoken:
        return None
    name = min(spoken, key=lambda n: min((i.place.log, i.line) for w in spoken[n].values() for i in w.items))
    waiters = spoken[name]
    timed = [w for w in waiters.values() if w.timed_out]
    first = min((i for w in timed for i in w.items), key=lambda i: (i.place.log, i.line))
    items = [i for w in sorted(waiters.values(), key=lambda w: w.rank) for i in w.items]
    finding = Finding(cause="hang_undetermined", severity="fatal", summary="", confidence=0.4,
                      where=Where(group=name, time=first.evidence().time),
                      evidence=pick_evidence([first, *items]), numbers=_numbers(timed))
    verdict = _behind(view, waiters) or _other_operation(view, timed)
    if verdict is None:
        verdict = _silent(view, waiters) or _all_wait(view, timed)
        finding.fix = list(SILENT_FIX) if verdict[1] else []
    cause, guilty, sure, words, proof = verdict
    finding.cause, finding.confidence = cause, sure
    finding.where.ranks = guilty
    finding.where.hosts = sorted({view.identity.host_of[r] for r in guilty if r in view.identity.host_of})
    waits = timed[0].timeout_ms
    limit = f" for {waits / 1000:.0f} s" if waits else ""
    finding.summary = f"{words} ({len(timed)} rank{'s' if len(timed) > 1 else ''} waited{limit} in {_what(timed)})"
    finding.evidence = _merge(proof, finding.evidence)
    return finding


def _numbers(timed: list[Waiter]) -> dict[str, object]:
    numbers: dict[str, object] = {"waiting_ranks": sorted(w.rank for w in timed)}
    if timed[0].timeout_ms:
        numbers["timeout_seconds"] = timed[0].timeout_ms / 1000
    if timed[0].at is not None:
        numbers["sequence"] = timed[0].at
    return numbers


def _what(timed: list[Waiter]) -> str:
    ops = Counter(w.op for w in timed if w.op)
    op = ops.most_common(1)[0][0] if ops else "a collective"
    at = timed[0].at
    return f"{op} #{at}" if at is not None else op


Verdict = tuple[str, list[int], float, str, list[Evidence]]


def _behind(view: View, waiters: dict[int, Waiter]) -> Verdict | None:
    """Ranks whose last enqueued work is older than the others': they never got there."""
    known = {r: w.enqueued for r, w in waiters.items() if w.enqueued is not None}
    if len(known) < 2 or len(set(known.values())) < 2:
        return None
    low, high = min(known.values()), max(known.values())
    behind = sorted(r for r, n in known.items() if n == low)
    if len(behind) > len(known) / 2:
        return None
    proof = pick_evidence([i for r in behind for i in waiters[r].items if i.rule.id == "watchdog-status"])
    words = f"{subject_of(behind, [])} stopped after work {low} while the others went on to {high}"
    return "collective_mismatch", behind, 0.86, words, proof


def _other_operation(view: View, timed: list[Waiter]) -> Verdict | None:
    """The same sequence number with another operation or size on a minority of the ranks."""
    by_at: dict[int, list[Waiter]] = {}
    for waiter in timed:
        if waiter.at is not None and waiter.op is not None:
            by_at.setdefault(waiter.at, []).append(waiter)
    for at, same in sorted(by_at.items()):
        kinds = Counter((w.op, w.numel) for w in same)
        if len(kinds) > 1:
            (most, count), *others = kinds.most_common()
            odd = sorted(w.rank for w in same if (w.op, w.numel) != most)
            tie = others and others[0][1] == count
            words = (f"Ranks are in different collectives at #{at}: " +
                     ", ".join(f"{op}[{numel}] on {n}" for (op, numel), n in kinds.most_common(3)))
            proof = pick_evidence([i for w in same for i in w.items[:1]])
            return "collective_mismatch", [] if tie else odd, 0.7 if tie else 0.85, words, proof
    if len(by_at) > 1:
        counts = Counter({at: len(same) for at, same in by_at.items()})
        low = min(counts)
        behind = sorted(w.rank for w in by_at[low])
        total = sum(counts.values())
        guilty = behind if len(behind) < total / 2 else []
        words = "Ranks wait in different collectives: " + ", ".join(f"#{at} on {n}" for at, n in sorted(counts.items()))
        proof = pick_evidence([i for same in by_at.values() for w in same for i in w.items[:1]])
        return "collective_mismatch", guilty, 0.75, words, proof
    return None if by_at else _other_kind(timed)


def _other_kind(timed: list[Waiter]) -> Verdict | None:
    """Wordings without numbers (torch before 2.0) show only which kind of operation each rank waits in."""
    named = [w for w in timed if w.op is not None]
    kinds = Counter(w.op for w in named)
    if len(kinds) < 2:
        return None
    (most, count), (_, second), *_ = kinds.most_common()
    odd = sorted(w.rank for w in named if w.op != most) if second < count else []
    words = "Ranks wait in different collectives: " + ", ".join(f"{op} on {n}" for op, n in kinds.most_common(3))
    return "collective_mismatch", odd, 0.65, words, pick_evidence([i for w in named for i in w.items[:1]])


def _silent(view: View, waiters: dict[int, Waiter]) -> Verdict | None:
    """Ranks of the group that never complain, when most others do."""
    world, spoke = view.world, set(waiters)
    hung = sorted(stuck(view) - spoke)
    if hung:
        words = f"{subject_of(hung, [])} did not even react to the launcher's SIGTERM: stopped, or stuck in a call"
        return "collective_mismatch", hung, 0.7, words, pick_evidence(view.of("forced-exit"))
    if world is None and len(spoke) >= 2 and spoke == set(range(min(spoke), max(spoke) + 1)) and min(spoke) == 1:
        world = max(spoke) + 1  # everybody but rank 0 complains
    if world is None or len(spoke) < QUORUM * world or len(spoke) >= world:
        return None
    silent = sorted(set(range(world)) - spoke)
    if len(silent) > len(spoke):
        return None
    words = f"{subject_of(silent, [])} never joined the collective that rank{'s' if len(spoke) > 1 else ''} " \
            f"{number_ranges(sorted(spoke))} waited in"
    return "collective_mismatch", silent, 0.55, words, []


def _all_wait(view: View, timed: list[Waiter]) -> Verdict:
    """Everybody who speaks waits in the same operation."""
    first_ever = all((w.at or 0) <= 1 and (w.completed is None or w.completed <= 0) for w in timed) and \
        any(w.at is not None for w in timed)
    ranks = sorted(w.rank for w in timed)
    size = view.world or _gathered(timed)
    complete = size is not None and len(ranks) >= size
    if complete and first_ever:
        peers = view.of("chat-nccl-p2p")
        host = view.identity.only_host()
        if peers and not view.of("chat-nccl-net"):
            acs = view.of("acs-enabled")
            words = "The first collective never completes on any rank: GPU peer-to-peer transfers hang"
            proof = pick_evidence([*peers[:1], *acs[:1]])
            return "p2p_acs_iommu", [], 0.9 if acs else 0.72 if host else 0.5, words, proof
        return "hang_all_waiting", [], 0.45, "The first collective never completes on any rank", []
    if complete:
        return "hang_all_waiting", [], 0.5, "All ranks wait in the same collective and it never completes", []
    numbered = ranks == list(range(len(ranks))) and len(ranks) % 8 == 0
    if numbered and view.world is None and len({(w.at, w.op, w.numel) for w in timed}) == 1:
        words = "All ranks that speak wait in the same collective, none is seen to miss, and it never completes"
        return "hang_all_waiting", [], 0.45, words, []
    if len(timed) == 1 and view.world == 2:
        other = 1 - ranks[0]
        return "collective_mismatch", [other], 0.5, f"Rank {other} never joined the collective", []
    return "collective_missing_rank", [], 0.4, "A collective timed out; who is missing cannot be seen here", []


def _gathered(timed: list[Waiter]) -> int | None:
    """The size of the group as an all-gather shows it: the output is that many inputs."""
    for waiter in timed:
        for item in waiter.items:
            taken, given = item.groups.get("numel"), item.groups.get("numel_out")
            if taken and given and "GATHER" in (waiter.op or "") and int(taken) and int(given) % int(taken) == 0:
                return int(given) // int(taken)
    return None


def _merge(first: list[Evidence], second: list[Evidence]) -> list[Evidence]:
    seen: set[tuple[str, int | None]] = set()
    merged = []
    for item in [*first, *second]:
        if (item.path, item.line) not in seen:
            seen.add((item.path, item.line))
            merged.append(item)
    return merged[:7]


def desync_finding(view: View) -> Finding | None:
    """The desync report says outright who did not join."""
    items = view.of("desync-report")
    if not items:
        return None
    ranks = sorted({int(n) for i in items for n in i.groups["ranks"].replace("-", " ").replace(",", " ").split()})
    return Finding(cause="collective_mismatch", severity="fatal", confidence=0.9, where=Where(ranks=ranks),
                   summary=f"{subject_of(ranks, [])} did not join collective #{items[0].groups['missed']}",
                   evidence=pick_evidence(items))
