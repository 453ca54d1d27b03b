"""Ranks that never arrived: fewer members, fewer joined clients, fewer NCCL inits than the world has."""

from __future__ import annotations

from diag.logs.known import number_ranges, pick_evidence, subject_of
from diag.logs.view import View
from diag.schema import Finding, Where


def startup_findings(view: View) -> list[Finding]:
    """At most one finding about missing ranks; none once training made progress."""
    if view.progress:
        return []
    for make in (members, store_barrier, clients, nccl_starts):
        finding = make(view)
        if finding is not None:
            return [finding]
    return []


def members(view: View) -> Finding | None:
    """Lightning's "MEMBER: 3/8" lines."""
    items = view.of("lightning-member")
    if not items or view.of("registered-processes"):
        return None
    world = max(int(i.groups["world"]) for i in items)
    seen = {int(i.groups["rank"]) for i in items}
    missing = sorted(set(range(world)) - seen)
    if not missing or view.of("nccl-init"):
        return None
    ended = view.of("slurm-time-limit", "client-socket-timeout", "keyboard-interrupt", "slurm-cancelled",
                    "store-barrier")
    last = max(i.line for i in items)
    alone = all(log.lines is None or log.lines - last <= 3 for log in view.logs)
    if not ended and not alone:
        return None
    return _missing(missing, world, len(seen), 0.88 if ended else 0.7, pick_evidence([*items[-3:], *ended[:2]]))


def store_barrier(view: View) -> Finding | None:
    """The store-based barrier counts who came."""
    items = view.of("store-barrier")
    failed = [i for i in items if i.groups["verb"].startswith("Timed out")]
    waits = [i for i in items if i.groups["verb"].startswith("Waiting")]
    if not failed and len(waits) < 2:
        return None
    last = (failed or waits)[-1]
    world, count = int(last.groups["world"]), int(last.groups["count"])
    if count == world and not failed:
        return None
    proof = pick_evidence(failed or waits[-3:])
    if count > world:
        return Finding(cause="rendezvous_timeout", severity="fatal", confidence=0.6, evidence=proof,
                       summary=f"The store counts {count} workers of a world of {world}: it is shared with another run "
                               "or left over from an earlier one", numbers={"joined": count, "world": world})
    waiting = {int(i.groups["rank"]) for i in items}
    missing = sorted(set(range(world)) - waiting) if len(waiting) == count else []
    return _missing(missing, world, count, 0.8 if failed else 0.65, proof)


def clients(view: View) -> Finding | None:
    """TCPStore's count of clients."""
    items = view.of("clients-joined")
    if not items:
        return None
    world, count = int(items[-1].groups["world"]), int(items[-1].groups["count"])
    return _missing([], world, count, 0.8, pick_evidence(items)) if count < world else None


def nccl_starts(view: View) -> Finding | None:
    """NCCL's Init START without Init COMPLETE, on fewer ranks than the communicator has."""
    items = view.of("nccl-init")
    if not items or any(i.groups["state"] == "COMPLETE" for i in items):
        return None
    world = max(int(i.groups["nranks"]) for i in items)
    started = {int(i.groups["rank"]) for i in items if int(i.groups["nranks"]) == world}
    missing = sorted(set(range(world)) - started)
    if not missing or not started:
        return None
    stopped = view.of("watchdog-timeout", "client-socket-timeout", "store-wait-timeout", "unique-id-timeout",
                      "keyboard-interrupt", "slurm-time-limit")
    if not stopped and len(started) < world / 2:
        return None  # probably only some of the nodes' logs are here
    return _missing(missing, world, len(started), 0.7 if stopped else 0.5, pick_evidence(items[-4:]))


def _missing(missing: list[int], world: int, count: int, sure: float, proof: list) -> Finding:  # type: ignore[type-arg]
    who = subject_of(missing, []) if missing else f"{world - count} of {world} ranks"
    came = f"only {count} of {world} came"
    return Finding(cause="missing_rank_init", severity="fatal", confidence=sure, where=Where(ranks=missing),
                   summary=f"{who} never reached initialisation ({came})", evidence=proof,
                   numbers={"joined": count, "world": world, "missing": number_ranges(missing)})
