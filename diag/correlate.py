"""The findings of all ranks and artefacts -> roles: the first initiating failure, and beneath it what it explains.

A finding that nothing else explains is a candidate for the root. `a` explains `b` when the graph in `causes` has the
link, both share what the link asks for, and `a` is not later. Of several candidates the earliest is the root; where
the order is not known, the more specific and more certain one. Unknown never equals unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from diag.artefacts import Artefacts
from diag.causes import CAUSES, EXPLAINS, LATE, VAGUE, VAGUE_SIGNATURES, VERDICTS, VIEWS, Shared, tier
from diag.schema import SEVERITY_ORDER, Evidence, Finding

#: A second unexplained failure makes the verdict less certain.
RIVAL = 0.85
#: A confirmation comes at the latest when the scheduler has cleaned up the step.
LATE_SECONDS = 3600.0
#: Their lines speak of a process or a container; which rank that was the launcher says.
KILLS = frozenset({"host_oom"})
Before = Callable[[Finding, Finding], "bool | None"]


def correlate(findings: list[Finding], artefacts: Artefacts) -> list[Finding]:
    """`findings` with roles assigned, root first, `explains` filled with indexes into the returned list.

    Findings of role "context" and of severity "info" keep their role and never lead.
    """
    candidates = [f for f in findings if can_lead(f)]
    if not candidates:
        candidates = [f for f in findings if standing(f)]
    if not candidates:
        return findings
    roots = [b for b in candidates if not any(explains(a, b) for a in candidates if a is not b)] or candidates
    root = roots[0]
    for other in roots[1:]:
        if leads(other, root):
            root = other
    accounted = _accounted(root, [f for f in findings if f in candidates or _undetermined(f)])
    rivals = [f for f in roots if f is not root and f not in accounted and tier(f.cause) >= 2
              and SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["error"]]
    if rivals and before(root, rivals[0]) is not True:
        root.confidence = round(root.confidence * RIVAL, 3)
    _adopt_victim(root, accounted)
    root.role = "root"
    for finding in [*candidates, *accounted]:
        if finding is not root:
            finding.role = "victim" if finding in accounted else "symptom"
    for finding in findings:
        if finding.role == "victim" and finding not in accounted:
            accounted.append(finding)
    ordered = [root, *accounted, *(f for f in findings if f is not root and f not in accounted)]
    root.explains = list(range(1, 1 + len(accounted)))
    return ordered


def _adopt_victim(root: Finding, accounted: list[Finding]) -> None:
    """A kill that names no rank hit the one rank that is known to have been killed: the kernel knows only pids."""
    if root.cause not in KILLS or root.where.ranks:
        return
    killed = {tuple(f.where.ranks) for f in accounted if f.cause == "killed_unconfirmed" and f.where.ranks and
              (not f.where.hosts or not root.where.hosts or set(f.where.hosts) & set(root.where.hosts))}
    if len(killed) == 1 and len(ranks := killed.pop()) == 1:
        root.where.ranks = list(ranks)


def can_lead(finding: Finding) -> bool:
    """Whether `finding` may be the root of a report."""
    cause = CAUSES.get(finding.cause)
    leads_ = cause is None or cause.verdict in ("failed", "degraded")
    return leads_ and finding.role not in ("context", "victim") and \
        SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["warning"]


def standing(finding: Finding) -> bool:
    """A state of the machine that wants mending (`diag env`). It leads only where nothing happened that could."""
    return bool(finding.numbers.get("standing")) and SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["warning"]


def _undetermined(finding: Finding) -> bool:
    """Seen, serious, and not a cause: something else may account for it."""
    cause = CAUSES.get(finding.cause)
    return cause is not None and cause.verdict == "unknown" and finding.role != "context" and \
        SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["warning"]


def explains(a: Finding, b: Finding) -> bool:
    """Whether `a` accounts for `b`."""
    if standing(a) and standing(b):
        return False  # two states of machines that were measured: neither is a symptom of the other
    if a.cause == b.cause:
        return _seen_closer(a, b)
    if (jump := a.numbers.get("lr_jump_step")) is not None and b.numbers.get("lr_jump_step") == jump:
        return b.cause.startswith("moe_") and not a.cause.startswith("moe_")  # the loss says what it did to the run
    if a.cause in VIEWS and b.cause in VIEWS and bool(a.where.ranks) != bool(b.where.ranks):
        # Two views of one wait: the one that names nobody cannot account for the one that does.
        return bool(a.where.ranks) and (a.where.group is not None or _linked(a, b))
    return _linked(a, b)


def _linked(a: Finding, b: Finding) -> bool:
    """Whether the graph says that `a` may account for `b`, and nothing speaks against it."""
    return any(link.cause == b.cause and (before(b, a) is not True or confirms_late(a, b)) and shares(a, b, link.same)
               for link in EXPLAINS.get(a.cause, ()))


def _seen_closer(a: Finding, b: Finding) -> bool:
    """Whether both are the same fault, which `a` has from the collectives' own records and `b` from a console."""
    return a.where.group is not None and b.where.group is None and \
        (not b.where.ranks or bool(set(a.where.ranks) & set(b.where.ranks)))


def confirms_late(a: Finding, b: Finding) -> bool:
    """Whether `a`, though printed below `b`, may be what happened first: nobody prints it at once, and `b` is vague.

    Time stamps that lie further apart than `LATE_SECONDS` contradict, and so do two hosts.
    """
    seen = set(b.numbers.get("signatures") or ())
    vague = b.cause in VAGUE or tier(b.cause) == 1 or bool(seen and seen <= VAGUE_SIGNATURES)
    investigated = b.cause == "loss_nan" and bool(VERDICTS & set(a.numbers.get("signatures") or ()))
    if not investigated and (a.cause not in LATE or not vague):
        return False
    if a.where.hosts and b.where.hosts and not set(a.where.hosts) & set(b.where.hosts):
        return False
    first, second = _onset(a), _onset(b)
    times = [_seconds(e.time) for e in (first, second) if e is not None and e.time]
    return len(times) < 2 or None in times or abs(times[0] - times[1]) <= LATE_SECONDS  # type: ignore[operator]


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def shares(a: Finding, b: Finding, what: Shared) -> bool:
    """Whether both findings name the same rank, host or group. Everything here is one job."""
    if what == "job":
        return True
    if what == "group":
        return a.where.group is not None and a.where.group == b.where.group
    ours, theirs = (a.where.ranks, b.where.ranks) if what == "rank" else (a.where.hosts, b.where.hosts)
    return bool(set(ours) & set(theirs))  # type: ignore[arg-type]


def leads(a: Finding, b: Finding) -> bool:
    """Whether `a` rather than `b` should be the root; neither explains the other."""
    serious = [SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["error"] for f in (a, b)]
    if serious[0] != serious[1]:
        return serious[0]
    ended = [_ends_runs(f) for f in (a, b)]
    if ended[0] != ended[1]:
        return ended[0]
    if _of_another_run(b, a):
        return True
    order = before(a, b)
    if order is not None:
        return order and not _of_another_run(a, b)
    return (tier(a.cause), a.confidence) > (tier(b.cause), b.confidence)


def _of_another_run(early: Finding, late: Finding) -> bool:
    """Whether `early` is a crash of a program long before a GPU failed: a kernel's log holds the runs of weeks.

    Who asks wants to know of the hardware, and a process does not live on after an illegal access.
    """
    if early.cause not in VAGUE or late.cause not in LATE or not (early.where.gpus and late.where.gpus):
        return False
    times = [_seconds(e.time) for e in (_onset(early), _onset(late)) if e is not None and e.time]
    return len(times) == 2 and None not in times and times[1] - times[0] > LATE_SECONDS  # type: ignore[operator]


def _ends_runs(finding: Finding) -> bool:
    """Whether this kind of thing ends a run by itself, rather than making it bad."""
    cause = CAUSES.get(finding.cause)
    return finding.severity == "fatal" or cause is None or cause.verdict == "failed"


def before(a: Finding, b: Finding) -> bool | None:
    """Whether `a` began earlier than `b`: by line within one file, by time between files; None when unknown."""
    first, second = _onset(a), _onset(b)
    if first is None or second is None:
        return None
    if first.path == second.path:
        if first.line is None or second.line is None or first.line == second.line:
            return None
        return first.line < second.line
    if first.time and second.time and len(first.time) == len(second.time) and first.time != second.time:
        return first.time < second.time
    return None


def _onset(finding: Finding) -> Evidence | None:
    """The line that a finding began with: its first evidence."""
    return finding.evidence[0] if finding.evidence else None


def _accounted(root: Finding, candidates: list[Finding]) -> list[Finding]:
    """Everything that `root` explains, directly or through what it explains, in reading order."""
    found: list[Finding] = []
    queue = [root]
    while queue:
        current = queue.pop(0)
        for other in candidates:
            if other is not root and other not in found and explains(current, other):
                found.append(other)
                queue.append(other)
    return [f for f in candidates if f in found]
