"""All findings of the logs together: made by the other modules, then judged in the light of how the run ended."""

from __future__ import annotations

from diag.logs.checkpoint import refine_shapes
from diag.logs.culprit import UNSEEN_FIX, killed_by_launcher
from diag.logs.endings import (
    AT_EXIT,
    SIGNALS,
    attach_exits,
    ended_well,
    exits,
    finished_at,
    jit_lock,
    last_good_save,
    peer_gone,
    planned_exit,
    saved_after,
    silence,
    silent_failure,
)
from diag.logs.exceptions import exception_findings, others_wait
from diag.logs.known import blamed, is_everybody, pick_evidence, signature_findings, subject_of
from diag.logs.memory import refine_cuda_oom
from diag.logs.numerics import numeric_findings
from diag.logs.stacks import fingerprints
from diag.logs.startup import startup_findings
from diag.logs.unknown import unexplained
from diag.logs.view import Item, Place, View
from diag.logs.waiting import waiting_findings
from diag.schema import SEVERITY_ORDER, Finding, Where
from diag.signatures import format_says

#: An absence that nothing confirms counts only when nothing else was found.
SURE_ABSENCE = 0.75
#: Faults of a machine: of the only one there is, when the logs name only one.
HOST_CAUSES = {"p2p_acs_iommu", "fabric_manager", "driver_mismatch", "shm_too_small", "gpu_ecc", "gpu_fell_off_bus",
               "gpu_hw_fault", "nvlink_error", "ib_hca_failure", "ib_gdr_acs", "host_oom", "duplicate_gpu",
               "killed_unconfirmed", "cuda_oom_shared_gpu", "node_failure"}
#: Training that went on for this many steps after a line survived it.
SURVIVED_STEPS = 3
#: What to do about a kill that nobody explains: first find out who did it.
UNCONFIRMED = (
    "Find out who killed it before calling it out of memory: the kernel's log of that host (dmesg -T | grep -iE "
    "'oom|killed process'), memory.events of its cgroup, the scheduler's record (sacct -j JOBID).",
    "No trace there: ask for a health check, a preemption or an operator at that time.",
    "Resume from the last complete checkpoint; if it was memory: fewer loader workers, shards saved one at a time.",
)
#: Ray prints an actor's fields below the line that says it died.
ACTOR_LINES = 8
#: Remarks beside a verdict.
MAX_CONTEXT = 5
_NUMERIC = {"loss_nan", "loss_spike", "loss_divergence", "loss_degenerate", "fp16_loss_scale_collapse", "slow_node",
            "slow_data_io", "moe_router_collapse", "grad_explosion", "loss_resume_jump"}


def findings_of(view: View) -> list[Finding]:
    """Everything the logs show, not yet correlated."""
    known = signature_findings(view)
    for finding in known:
        if finding.cause == "cuda_oom":
            refine_cuda_oom(view, finding, [i for i in view.items if i.rule.cause == "cuda_oom"
                                            and i.rule.role == "initiating" and not i.event.quoted])
        if finding.cause == "ckpt_shape_mismatch":
            refine_shapes(finding, view.of("size-mismatch"))
        if finding.cause in SIGNALS.values():
            attach_exits(view, finding)
    if killed_by_launcher(view):
        known = [f for f in known if f.cause != "killed_unconfirmed"]
    for finding in known:
        launch_failure_of_a_peer(view, finding)
        if "collective-mismatch-detected" in finding.numbers.get("signatures", ()):
            fingerprints(view, finding)
        checkpoint_ranks(view, finding)
        store_of_a_running_job(view, finding)
        store_after_an_exit(view, finding)
        node_of_an_actor(view, finding)
    found = [*known, *exception_findings(view), *waiting_findings(view)]
    found += [f for f in startup_findings(view) if f.confidence >= SURE_ABSENCE or not found]
    found = _merged(found + numeric_findings(view))
    survived(view, found)
    told_to_end(view, found)
    alive = [f for f in found if SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["warning"]]
    if not [f for f in alive if f.cause not in ("scheduler_time_limit", "slow_node", "loss_spike")]:
        quiet = jit_lock(view) or silence(view)
        if quiet is not None:
            found.append(quiet)
            alive.append(quiet)
    if not alive:
        promoted = promote(view)
        for finding in promoted:
            store_after_an_exit(view, finding)
        best = promoted[0] if promoted else None
        if best is None or best.role == "victim" or best.cause == "preempted" or \
                (best.cause == "segfault" and peer_gone(view)):
            # a step is also cancelled because a task has failed, and a watchdog aborts because a peer has gone
            other = silent_failure(view) or peer_gone(view)
            promoted = [other] if other is not None else promoted
        found.extend(promoted)
        alive = promoted
    if alive and all(f.cause in _NUMERIC for f in alive):
        found.extend(f for f in promote(view) if f.cause == "scheduler_time_limit")
    for finding in found:
        if finding.cause == "killed_unconfirmed":
            finding.fix = list(UNCONFIRMED)
    only = view.identity.only_host() or _scheduled_host(view)
    for finding in found:
        if finding.cause in HOST_CAUSES and not finding.where.hosts and only is not None:
            finding.where.hosts = [only]
    at_exit(view, found)
    if not [f for f in found if SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["warning"]]:
        found.extend(unexplained(view))
    elif alive:
        found.extend(victims(view, found))
        found.extend(contexts(view))
    for context in (planned_exit(view),):
        if context is not None:
            found.append(context)
    saved = last_good_save(view)
    if saved is not None:
        for finding in found:
            if SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["error"]:
                finding.numbers.setdefault("last_save_line", saved.line)
    return found


def _scheduled_host(view: View) -> str | None:
    """The one host that the scheduler names for the job, where no line of the job names another."""
    named = {item.groups["host"] for item in view.items if item.rule.id.startswith("slurm-") and
             item.groups.get("host")}
    return named.pop() if len(named) == 1 and not view.identity.hosts else None


def launch_failure_of_a_peer(view: View, finding: Finding) -> None:
    """"unspecified launch failure" on one rank while others wait says that the rank died, not why."""
    if finding.cause != "cuda_kernel_fault" or finding.numbers.get("signatures") != ["cuda-launch-failure"]:
        return
    first = finding.evidence[0]
    place = next((i.place for i in view.of("cuda-launch-failure") if i.line == first.line), None)
    if place is not None and others_wait(view, place, set(finding.where.ranks)):
        finding.cause, finding.severity, finding.confidence = "peer_exception", "fatal", 0.8
        finding.summary += "; the other ranks only wait for it"


def store_of_a_running_job(view: View, finding: Finding) -> None:
    """The agent asks the store for newcomers only while its workers run: there the store was lost, not never met."""
    if finding.cause == "rendezvous_timeout" and any(
            frame.function in ("num_nodes_waiting", "_exit_barrier") for raised in view.raised
            for frame in raised.traceback.frames if raised.short.startswith("Rendezvous")):
        finding.cause, finding.confidence = "store_lost", max(finding.confidence, 0.6)


def store_after_an_exit(view: View, finding: Finding) -> None:
    """The store goes with the agent whose rank has failed: an exit above the complaint came first, whatever it was."""
    first = silent_failure(view)
    if finding.cause not in ("store_lost", "rendezvous_timeout") or first is None or not finding.evidence:
        return
    said, told = finding.evidence[0], first.evidence[:1]
    if told and told[0].path == said.path and (told[0].line or 0) < (said.line or 0):
        finding.severity, finding.role = "info", "victim"


def node_of_an_actor(view: View, finding: Finding) -> None:
    """Ray names a dead node by an id only; the address stands among the fields of the actor that lived there."""
    if finding.numbers.get("signatures") == ["ray-node-gone"] and not finding.where.hosts:
        gone = view.of("ray-node-gone")
        finding.where.hosts = sorted({i.groups["host"] for i in view.of("ray-actor-address") if any(
            i.log is g.log and 0 < g.line - i.line <= ACTOR_LINES for g in gone)})[:1]


def checkpoint_ranks(view: View, finding: Finding) -> None:
    """torch.distributed.checkpoint lists the ranks on which loading failed."""
    listed = view.of("checkpoint-exception")
    if finding.cause.startswith("ckpt_") and listed and not finding.where.ranks:
        ranks = {int(n) for i in listed for n in i.groups["ranks"].split(",") if n.strip().isdigit()}
        if not is_everybody(view, ranks):
            finding.where.ranks = sorted(ranks)


def _merged(found: list[Finding]) -> list[Finding]:
    """One finding per cause: signature and number checks may both see the same thing."""
    by_cause: dict[str, Finding] = {}
    result = []
    for finding in found:
        first = by_cause.get(finding.cause)
        if first is None or finding.cause in ("exception_unknown", "peer_exception", "code_error"):
            by_cause.setdefault(finding.cause, finding)
            result.append(finding)
            continue
        first.confidence = max(first.confidence, finding.confidence)
        first.evidence = sorted({(e.path, e.line): e for e in [*first.evidence, *finding.evidence]}.values(),
                                key=lambda e: (e.path, e.line or 0))[:7]
        if not first.where.ranks:
            first.where.ranks = finding.where.ranks
        if not first.where.hosts:
            first.where.hosts = finding.where.hosts
        if first.where.step is None:
            first.where.step = finding.where.step
        first.numbers = finding.numbers | first.numbers
    return result


def told_to_end(view: View, found: list[Finding]) -> None:
    """The signal at a time limit: programs print it at once, the scheduler's own line may come far below.

    The same signal from the launcher, which ends the other ranks after one has failed, is no preemption.
    """
    if any(f.cause == "scheduler_time_limit" for f in found) or _told_by_launcher(view):
        for finding in found:
            if finding.cause == "preempted" and finding.numbers.get("signatures") == ["preempt-signal"]:
                finding.severity, finding.role = "info", "victim"


def _told_by_launcher(view: View) -> bool:
    """Whether the launcher reports a failure, was not told to stop itself, and signalled as many as say so."""
    told = {item.groups.get("pid") for item in view.of("agent-sigterm")}
    said = {(item.place.log, item.event.speaker.mark) for item in view.of("preempt-signal")}
    failed = any(end.code not in (0, -15, 143) for end in exits(view))
    return failed and len(said) <= len(told) and not view.of("agent-death-signal", "agent-sigterm-received")


def survived(view: View, found: list[Finding]) -> None:
    """Failures after which training went on did not end the run: they become context."""
    index = {log.path: number for number, log in enumerate(view.logs)}
    for finding in found:
        if finding.cause in _NUMERIC or not finding.evidence:
            continue
        lines = [e.line for e in finding.evidence if e.line is not None and e.path == finding.evidence[0].path]
        log = index.get(finding.evidence[0].path)
        if log is None or not lines:
            continue
        steps = {p.step for number, p in view.progress if number == log and p.line > max(lines)}
        if finding.cause == "driver_mismatch" and _set_up(view, log, max(lines)):  # NVML alone; CUDA does not need it
            finding.severity, finding.role = "info", "context"
        if len(steps) >= SURVIVED_STEPS and not _ends_it(view, log, max(lines)):
            finding.severity, finding.role = "info", "context"
            finding.numbers["survived_steps"] = len(steps)


def _set_up(view: View, log: int, line: int) -> bool:
    """Whether NCCL set up a communicator below a line."""
    return any(i.groups["state"] == "COMPLETE" and i.place.log == log and i.line > line for i in view.of("nccl-init"))


def _ends_it(view: View, log: int, line: int) -> bool:
    """Whether the run was started anew after `line`: then progress after it belongs to the next attempt."""
    restarts = [i for i in view.of("agent-restart", "agent-failed", "torchrun-root", "srun-task", "slurm-preempted")
                if i.place.log == log and i.line >= line]
    return bool(restarts) and restarts[0].line - line < 400


def promote(view: View) -> list[Finding]:
    """When only the victims speak: the best guess that their lines allow, said with little confidence."""
    items = [i for i in view.items if i.rule.role == "victim" and not i.event.quoted
             and i.rule.cause not in ("unexplained_end", "hang_undetermined", "hang_silent")
             and SEVERITY_ORDER[i.rule.severity] >= SEVERITY_ORDER["warning"]]
    items = [i for i in items if len({p.step for n, p in view.progress
                                      if n == i.place.log and p.line > i.line}) < SURVIVED_STEPS]
    if not items:
        return []
    best = max(items, key=lambda i: (i.rule.sure, -i.line))
    same = [i for i in items if i.rule.cause == best.rule.cause]
    hosts = blamed(view, same)[1] if best.rule.id in ("slurm-cancelled", "mpi-peer-gone") else []
    if best.rule.id == "ray-actor-died":
        near = [i for i in view.of("ray-actor-address") if i.log is best.log and 0 < i.line - best.line <= ACTOR_LINES]
        hosts = [near[0].groups["host"]] if near else []
    finding = Finding(cause=best.rule.cause or "unexplained_end", severity="error", confidence=best.rule.sure,
                      summary=_sentence(best), where=Where(hosts=hosts, time=same[0].evidence().time),
                      evidence=pick_evidence(same), fix=list(best.rule.fix))
    if best.rule.id == "mpi-peer-gone":
        finding.fix = list(UNSEEN_FIX)
    if finding.cause in SIGNALS.values():
        attach_exits(view, finding)
    return [finding]


def _sentence(item: Item) -> str:
    text = format_says(item.rule.says, dict(item.groups))
    return text[:1].upper() + text[1:]


def at_exit(view: View, found: list[Finding]) -> None:
    """Trouble after the work was done and saved is trouble of the exit only."""
    done = finished_at(view)
    if done is None:
        return
    index = {log.path: number for number, log in enumerate(view.logs)}
    serious = [f for f in found if SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["warning"]
               and f.cause not in _NUMERIC and f.role != "context"]
    late = []
    for finding in serious:
        first = finding.evidence[0] if finding.evidence else None
        place = Place(index.get(first.path, -1), first.line or 0) if first is not None else None
        if place is None or place.log != done.place.log or place.line < done.line:
            return
        late.append(finding)
    if not late or any(f.cause not in AT_EXIT for f in late) or not saved_after(view, done.place):
        return
    lead = max(late, key=lambda f: f.confidence)
    for finding in late:
        if finding is not lead:
            finding.severity, finding.role = "info", "context"
    lead.numbers["seen_as"] = lead.cause
    if ended_well(view, done.place):  # the ranks only left one after the other
        lead.severity, lead.role = "info", "context"
        return
    lead.cause, lead.severity, lead.confidence = "teardown_hang", "warning", max(0.75, lead.confidence)
    lead.summary = f"The work was finished before this; only the exit failed: {lead.summary}"
    lead.where = Where(time=lead.where.time)
    lead.evidence = [done.evidence(), *lead.evidence][:6]


def contexts(view: View) -> list[Finding]:
    """Lines worth knowing beside a verdict (a throttled GPU, a slow mount), one finding per rule."""
    groups: dict[str, list[Item]] = {}
    for item in view.items:
        if item.rule.role == "context" and item.rule.cause and item.rule.says and not item.event.quoted:
            groups.setdefault(item.rule.id, []).append(item)
    result = []
    for items in list(groups.values())[:MAX_CONTEXT]:
        ranks, hosts, gpus = blamed(view, items)
        result.append(Finding(cause=items[0].rule.cause or "", role="context", severity="info",
                              confidence=items[0].rule.sure, summary=_sentence(items[0]),
                              where=Where(ranks=ranks, hosts=hosts, gpus=gpus), evidence=pick_evidence(items)[:2],
                              numbers={"lines": len(items)}))
    return result


def victims(view: View, found: list[Finding]) -> list[Finding]:
    """The complaints of ranks that suffer from somebody else's failure, one finding per kind."""
    groups: dict[str, list[Item]] = {}
    used = {(e.path, e.line) for f in found for e in f.evidence}
    for item in view.items:
        if item.rule.role == "victim" and not item.event.quoted and item.rule.cause and \
                (item.log.path, item.line) not in used:
            groups.setdefault(item.rule.id, []).append(item)
    result = []
    for items in groups.values():
        ranks = sorted({i.rank for i in items if i.rank is not None})
        hosts = sorted({i.host for i in items if i.host is not None})
        who = subject_of(ranks, hosts if len(hosts) < 4 else [])
        result.append(Finding(
            cause=items[0].rule.cause or "unexplained_end", role="victim", severity="info",
            confidence=items[0].rule.sure, summary=f"{who}: {_sentence(items[0])}" if who else _sentence(items[0]),
            where=Where(ranks=ranks, hosts=hosts), evidence=pick_evidence(items)[:3], numbers={"lines": len(items)}))
    return result

