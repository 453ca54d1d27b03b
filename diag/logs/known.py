"""Findings from signatures: the initiating lines of one cause, of all ranks and files, become one finding."""

from __future__ import annotations

import re
from collections.abc import Iterable

from diag.identity import expand_tasks
from diag.logs.culprit import culprit_by_elimination, neighbour
from diag.logs.view import Item, View
from diag.schema import SEVERITY_ORDER, Evidence, Finding, Severity, Where
from diag.signatures import format_says

MAX_EVIDENCE = 6
#: Lines about another rank than the one that prints them, which may be on another host.
OF_ANOTHER = {"pdtrain-pool-lost", "pdtrain-pool-damaged"}
ANALYSER = {"flight-analyser-missing", "flight-analyser-culprit"}
_ANALYSED = re.compile(r"missing ranks: \{[\d, ]+\}|Culprit rank \d+")
#: Rules that only say "a mistake in some program"; `exceptions` decides what they mean.
GENERIC = {"attribute-bug", "torch-api-bug", "fsdp-mixed", "division-config", "ckpt-permission", "network-download"}
#: A cause that this share of all known ranks reports is nobody's own fault.
EVERYBODY = 0.6
#: Lines of one cause this far apart in one file, with a restart between, are two incidents; the first one counts.
RESTARTS = ("agent-restart", "deepspeed-killing")


def signature_findings(view: View) -> list[Finding]:
    """One finding per cause that some initiating line names."""
    groups: dict[str, list[Item]] = {}
    silenced = {(item.place.log, item.line) for item in view.items if item.rule.role == "noise"}
    # what a destructor meets while a worker goes down is no cause: the exception that took it down comes with it
    ignored = {(raised.place.log, raised.traceback.line) for raised in view.ignored}
    for item in view.items:
        rule = item.rule
        if rule.role != "initiating" or rule.cause is None or item.event.quoted or rule.id in GENERIC:
            continue
        if (item.place.log, item.line) in silenced and rule.sure < 0.9 or (item.place.log, item.line) in ignored:
            continue
        groups.setdefault(rule.cause, []).append(item)
    return [build(view, cause, items) for cause, items in groups.items()]


def build(view: View, cause: str, items: list[Item]) -> Finding:
    """The finding that `items`, all of one cause, add up to."""
    items = sorted(items, key=lambda item: (item.place.log, item.line))
    first = first_incident(view, items)
    best = max(first, key=lambda item: (item.rule.sure, SEVERITY_ORDER[item.rule.severity], -item.line))
    rules = {item.rule.id for item in first}
    ranks, hosts, gpus = blamed(view, first)
    if not ranks and best.rule.blames == "rank" and not several_marks(first):
        ranks, hosts = _unmarked(view, first[0], hosts)
    confirming = [item for item in view.items if item.rule.role == "confirming" and item.rule.cause == cause]
    groups: dict[str, str | None] = dict(best.groups)
    named = {item.groups["gpu"] for item in confirming if "gpu" in item.groups and item.place.log == best.place.log}
    if best.rule.blames == "gpu" and not gpus and len(named) == 1:  # a message of several lines names it in another
        name = named.pop()
        groups["gpu"], gpus = name, [shown_gpu(name)]
    summary = format_says(best.rule.says, groups)
    sure = min(0.97, best.rule.sure + 0.02 * (len(rules) - 1) + 0.08 * bool(confirming))
    return Finding(
        cause=cause, summary=_with_subject(summary, ranks, hosts), severity=_worst(first), confidence=round(sure, 3),
        where=Where(ranks=ranks, hosts=hosts, gpus=gpus, time=first[0].evidence().time),
        evidence=pick_evidence([*first, *confirming[:1]]), fix=list(best.rule.fix),
        numbers={"lines": len(items), "signatures": sorted(rules)},
    )


def several_marks(items: list[Item]) -> bool:
    """Whether the lines come from writers that are marked apart: then an unknown rank stays unknown."""
    return len({i.event.speaker.mark for i in items}) > 1


def _unmarked(view: View, item: Item, hosts: list[str]) -> tuple[list[int], list[str]]:
    near = neighbour(view, item) if item.rank is None else None
    if near is not None and near.rank is not None:
        return [near.rank], sorted({*hosts, *([near.host] if near.host else [])})
    if item.event.speaker.local_rank is not None:
        return [], hosts
    ranks = culprit_by_elimination(view, item.place)
    named = sorted({view.identity.host_of[r] for r in ranks if r in view.identity.host_of})
    return sorted(ranks), sorted({*hosts, *named})


def first_incident(view: View, items: list[Item]) -> list[Item]:
    """The items before the first restart of the job that follows the first of them."""
    start = items[0]
    restarts = [r.line for r in view.of(*RESTARTS) if r.place.log == start.place.log and r.line > start.line]
    if not restarts:
        return items
    return [item for item in items if item.place.log != start.place.log or item.line <= restarts[0] + 2]


def blamed(view: View, items: Iterable[Item]) -> tuple[list[int], list[str], list[str]]:
    """The ranks, hosts and GPUs that these lines hold guilty, as their rules say."""
    ranks: set[int] = set()
    hosts: set[str] = set()
    gpus: set[str] = set()
    pairs: set[int] = set()
    speakers: set[int] = set()  # of lines that name both sides: who speaks was alive
    waited: set[int] = set()  # that still answered who accuses them, so nobody had gone yet
    who = view.identity
    for item in items:
        if item.rule.id == "duplicate-gpu":
            pairs.update((int(item.groups["a"]), int(item.groups["b"])))
        if item.rule.id in ANALYSER:  # it has seen every rank: its answer stands, however many they are
            pairs.update(int(n) for found in _ANALYSED.findall(item.event.text) for n in re.findall(r"\d+", found))
        groups, blames = item.groups, item.rule.blames
        if blames == "job":
            continue
        host = groups.get("host") or (item.host if item.rule.id not in OF_ANOTHER else None)
        if blames == "rank" or (blames == "reporter" and item.rank is not None):
            named = [int(n) for key in ("rank", "who") for n in re.findall(r"\d+", groups.get(key, ""))]
            ranks.update(named or ([item.rank] if item.rank is not None else []))
            speakers.update(int(n) for n in re.findall(r"\d+", groups.get("by", "")))
            waited.update(named if "waited" in groups else ())
        if "tasks" in groups:
            ranks.update(expand_tasks(groups["tasks"]))
        if blames == "gpu" and "gpu" in groups:
            gpus.add(shown_gpu(groups["gpu"]))
            ranks.update(who.gpu_ranks(groups["gpu"], host))
        if host is not None and blames in ("rank", "host", "gpu", "reporter"):
            hosts.add(host)
    ranks = ranks - speakers or waited or ranks
    if not pairs and is_everybody(view, ranks):
        return [], (sorted(hosts) if len(hosts) == 1 and not who.one_host() else []), sorted(gpus)
    ranks |= pairs
    for rank in ranks:
        if rank in who.host_of:
            hosts.add(who.host_of[rank])
    return sorted(ranks), sorted(hosts), sorted(gpus)


def shown_gpu(text: str) -> str:
    """A PCI address in the kernel's form without the function: "PCI:0000:06:00.0:" and "0000:06:00" -> "0000:06:00"."""
    name = text.strip().rstrip(":").removeprefix("PCI:")
    return re.sub(r"(?<=[0-9A-Fa-f]{2})\.\d$", "", name)


def is_everybody(view: View, ranks: set[int]) -> bool:
    """Whether so many ranks are named that it is no rank's own fault."""
    known = view.world or max([len(view.identity.ranks), *(rank + 1 for rank in ranks)])  # ranks count from 0
    return len(ranks) >= 2 and len(ranks) >= EVERYBODY * max(known, 2)


def pick_evidence(items: list[Item]) -> list[Evidence]:
    """The first lines, of as many different rules and ranks as fit; the very first line leads."""
    chosen: list[Item] = []
    seen: set[object] = set()
    for key in ("rule", "rank", "line"):
        for item in items:
            mark = (item.rule.id if key == "rule" else item.rank if key == "rank" else (item.place.log, item.line))
            if item not in chosen and mark not in seen and len(chosen) < MAX_EVIDENCE:
                chosen.append(item)
                seen.add(mark)
    unique: dict[tuple[int, int], Item] = {}
    for item in sorted(chosen, key=lambda item: (item.place.log, item.line)):
        unique.setdefault((item.place.log, item.line), item)
    return [item.evidence() for item in unique.values()]


def _worst(items: list[Item]) -> Severity:
    return max((item.rule.severity for item in items), key=lambda severity: SEVERITY_ORDER[severity])


def _with_subject(summary: str, ranks: list[int], hosts: list[str]) -> str:
    """"rank 3 on node-7: ..." in front of a summary that does not name them yet."""
    subject = subject_of(ranks, hosts)
    text = summary[:1].upper() + summary[1:]
    if not subject or subject.lower() in summary.lower() or any(h in summary for h in hosts):
        return text
    return f"{subject}: {summary}"


def subject_of(ranks: list[int], hosts: list[str]) -> str:
    """"Rank 3 on node-7", "Ranks 4-7", "node-7", or nothing."""
    who = ""
    if ranks:
        who = ("Rank " if len(ranks) == 1 else "Ranks ") + number_ranges(ranks)
    if hosts and len(hosts) <= 3:
        place = ", ".join(hosts)
        return f"{who} on {place}" if who else place
    return who


def number_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" if len(p) > 2 else f"{p[0]}, {p[1]}" for p in parts]
    return ", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")
