"""What a localisation found, as findings: exactly the guilty hosts and ranks, the direction, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diag.probes.localise import Outcome
from diag.probes.localise_faults import Fault
from diag.report.model import clip_list, rank_list
from diag.report.text import printable
from diag.schema import Evidence, Finding, Severity, Where

PLAYBOOK = "slow-link"
#: From this many hosts on, alike in direction, they are told as one group.
GROUP = 3
#: Below this share of the peers a link is an error: a collective runs at the pace of its slowest member.
ERROR_RATIO = 0.5
WAYS = {"send": "sending", "receive": "receiving", "both": "sending and receiving"}


def findings(outcome: Outcome) -> list[Finding]:
    """One finding per fault, several hosts alike in one; a rank that fell silent in its own. Empty when all is well."""
    gone = sorted({place.host for place in outcome.silent})
    alone = len(gone) > 1 and len(gone) == len({host for host, _ in outcome.ends}) - 1
    found = [_alone(outcome)] if alone else [_silent(outcome, host) for host in gone]
    hosts = [(index, fault) for index, fault in enumerate(outcome.faults) if fault.kind == "host"]
    for direction in ("send", "receive", "both"):
        alike = [item for item in hosts if item[1].direction == direction and not item[1].intermittent
                 and item[1].against == "peers"]
        if len(alike) >= GROUP:
            found.append(_group(outcome, [fault for _, fault in alike]))
            hosts = [item for item in hosts if item not in alike]
    found += [_host(outcome, index, fault) for index, fault in hosts]
    found += list(_others(outcome))
    return found


def _others(outcome: Outcome) -> Iterator[Finding]:
    for fault in outcome.faults:
        if fault.kind == "pair":
            yield _pair(outcome, fault)
        elif fault.kind == "split":
            yield _split(outcome, fault)
        elif fault.kind == "all":
            yield Finding(
                cause="bandwidth_low", severity="warning", role="root", confidence=0.7, playbook="bandwidth",
                summary=f"all {_what(outcome)} together run at {fault.ratio:.0%} of the baseline; none stands out",
                evidence=_evidence(outcome, fault), numbers={"ratio": round(fault.ratio, 3), "against": "baseline"},
                fix=["Find what all of them share and what changed since: switch, another job, a variable, a driver."])


def _host(outcome: Outcome, index: int, fault: Fault) -> Finding:
    host, ranks = outcome.ends[fault.ends[0]]
    slow = outcome.slow_ranks.get(index, [])
    named = slow or ranks
    who = f"rank {ranks[0]} on {printable(host)}" if outcome.by_rank else printable(host)
    if slow and len(slow) < len(ranks):
        who += f", rank{'s' if len(slow) > 1 else ''} {rank_list(slow)}"
    if fault.ratio == 0:
        summary = (f"{who}: {WAYS[fault.direction]}, no message arrived in time, with any of {fault.partners} partners")
    elif fault.intermittent:
        was = "was slow for moments" if fault.passing else "was slow"
        summary = (f"{who}: {WAYS[fault.direction]} {was} in {fault.slow} of {fault.flows} measurements, at "
                   f"{fault.ratio:.0%} of the others, and fast in the rest")
    else:
        peers = "the baseline" if fault.against == "baseline" else "the others"
        partners = f", with each of {fault.partners} partners" if fault.partners else ""
        summary = f"{who}: {WAYS[fault.direction]} runs at {fault.ratio:.0%} of {peers}{partners}"
    return Finding(
        cause="link_intermittent" if fault.intermittent else "link_slow", severity=_severity(fault), role="root",
        confidence=_confidence(fault), summary=summary, playbook=PLAYBOOK,
        where=Where(hosts=[host], ranks=sorted(named)), evidence=_evidence(outcome, fault),
        numbers=_numbers(outcome, fault), fix=_fix(fault))


def _group(outcome: Outcome, faults: Sequence[Fault]) -> Finding:
    ends = sorted(fault.ends[0] for fault in faults)
    hosts = [outcome.ends[end][0] for end in ends]
    worst = min(faults, key=lambda fault: fault.ratio)
    ratios = f"{worst.ratio:.0%}" if len({round(f.ratio, 1) for f in faults}) == 1 else (
        f"{worst.ratio:.0%} to {max(f.ratio for f in faults):.0%}")
    together = " (neighbours)" if ends[-1] - ends[0] == len(ends) - 1 else ""
    return Finding(
        cause="link_slow", severity=_severity(worst), role="root", confidence=0.85, playbook=PLAYBOOK,
        summary=f"several {_what(outcome)} of one group{together}, {clip_list([printable(host) for host in hosts])}: "
                f"{WAYS[worst.direction]} runs at {ratios} of the other {len(outcome.ends) - len(ends)}",
        where=Where(hosts=hosts, ranks=sorted(rank for end in ends for rank in outcome.ends[end][1])),
        evidence=_evidence(outcome, worst), numbers=_numbers(outcome, worst) | {"ends": len(ends)},
        fix=["Look for what these have in common and the others have not: a switch, a rail, a rack, a firmware."])


def _pair(outcome: Outcome, fault: Fault) -> Finding:
    (a, first), (b, second) = (outcome.ends[end] for end in fault.ends)
    names = [f"rank {first[0]}", f"rank {second[0]}"] if outcome.by_rank else [printable(a), printable(b)]
    arrow = "and" if fault.direction == "both" else "to"
    way = f"between {names[0]} and {names[1]}" if fault.direction == "both" else f"from {names[0]} to {names[1]}"
    passes = f"the link runs at {fault.ratio:.0%} of what both do elsewhere"
    if fault.ratio == 0:
        passes = "no message arrived in time"
    two = len(outcome.ends) - len({place.host for place in outcome.silent}) == 2
    also = "; with two alone, sender and receiver cannot be told apart" if two else ""
    return Finding(
        cause="link_slow", severity=_severity(fault), role="root", confidence=0.6 if two else _confidence(fault),
        summary=f"{way}: {passes}{also}", playbook=PLAYBOOK,
        where=Where(hosts=list(dict.fromkeys([a, b])), ranks=sorted([first[0], second[0]])),
        evidence=_evidence(outcome, fault),
        numbers=_numbers(outcome, fault) | {"link": f"{names[0]} {arrow} {names[1]}", "source": a, "target": b},
        fix=["Both ends are sound with others: look at the path between them (route, switch ports, ECMP, one rail)."])


def _split(outcome: Outcome, fault: Fault) -> Finding:
    small, large = ([outcome.ends[end][0] for end in group] for group in fault.groups)
    way = {"both": "both directions", "send": "from the first to the second", "receive": "from the second to the first"}
    return Finding(
        cause="link_slow", severity=_severity(fault), role="root", confidence=0.85, playbook=PLAYBOOK,
        summary=f"two groups of {_what(outcome)} are fast within and run at {fault.ratio:.0%} between each other "
                f"({way[fault.direction]}): {clip_list([printable(name) for name in small])} and {len(large)} others",
        where=Where(hosts=small), evidence=_evidence(outcome, fault),
        numbers=_numbers(outcome, fault) | {"groups": [len(small), len(large)]},
        fix=["Look at what joins the two groups: the uplink of a switch, a trunk that lost members."])


def _silent(outcome: Outcome, host: str) -> Finding:
    ranks = sorted(place.rank for place in outcome.silent if place.host == host)
    why = outcome.silent_why.get(ranks[0], "did not answer")
    return Finding(
        cause="peer_unreachable", severity="error", role="root", confidence=0.9, playbook="peer-unreachable",
        summary=f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)} on {printable(host)} "
                f"{printable(why, 200)}; the others were measured without it",
        where=Where(hosts=[host], ranks=ranks), numbers={"rounds": outcome.rounds},
        fix=["See whether the process is still there; then whether the host answers over the interface of the job."])


def _alone(outcome: Outcome) -> Finding:
    """Nobody answers the conductor: it is more likely that its own host is cut off than that all others are."""
    host = outcome.ends[0][0]
    return Finding(
        cause="peer_unreachable", severity="error", role="root", confidence=0.6, playbook="peer-unreachable",
        summary=f"none of the other {len(outcome.ends) - 1} hosts answered rank 0: {printable(host)}, where it runs, "
                "is probably cut off",
        where=Where(hosts=[host]), numbers={"rounds": outcome.rounds},
        fix=["See whether the other hosts reach each other; then look at the link of this one."])


def _what(outcome: Outcome) -> str:
    return "ranks" if outcome.by_rank else "hosts"


def _severity(fault: Fault) -> Severity:
    return "error" if fault.ratio < ERROR_RATIO and not fault.intermittent else "warning"


def _confidence(fault: Fault) -> float:
    """More measurements and partners, and a clearer ratio, make it surer."""
    if fault.intermittent or fault.against == "baseline":
        return 0.7
    return 0.95 if fault.ratio < 0.75 and fault.flows >= 3 else 0.85


def _numbers(outcome: Outcome, fault: Fault) -> dict[str, object]:
    found: dict[str, object] = {
        "direction": fault.direction, "ratio": round(fault.ratio, 3), "slow": fault.slow, "measurements": fault.flows,
        "rounds": outcome.rounds, "against": fault.against}
    if outcome.reference:
        found["reference_bytes_per_second"] = round(outcome.reference)
    return found


def _evidence(outcome: Outcome, fault: Fault) -> list[Evidence]:
    """The rates themselves: of a host in its bad direction, of a pair between the two."""
    ranks = {rank for end in fault.ends for rank in outcome.ends[end][1]}
    rows = []
    for link in outcome.links:
        sends, receives = link["src"] in ranks, link["dst"] in ranks
        pair = fault.kind == "pair" and sends and receives
        host = fault.kind == "host" and (
            (sends and fault.direction != "receive") or (receives and fault.direction != "send"))
        if pair or host:
            rows.append(link)
    rows.sort(key=lambda link: float(link["bytes_per_second"]))
    return [Evidence(path="probe", rank=int(link["src"]),
                     text=f"rank {link['src']} ({printable(str(link['src_host']))}) -> rank {link['dst']} "
                          f"({printable(str(link['dst_host']))}): {float(link['bytes_per_second']) / 1e6:,.1f} MB/s")
            for link in rows[:6]]


def _fix(fault: Fault) -> list[str]:
    if fault.intermittent:
        return ["Repeat with --thorough --passes 10; read the error counters of {hosts} before and after.",
                "A link that comes and goes is a cable, an optic or a port: reseat, then replace."]
    if fault.against == "baseline":
        return ["Repeat on an idle fabric; then compare what changed on {hosts} since (pdtrain diag env)."]
    way = {"send": "its outgoing side", "receive": "its incoming side", "both": "both directions"}[fault.direction]
    return [f"On {{hosts}}, look at {way}: negotiated speed and width, error counters, a shaper, another job.",
            "Take it out of the job until it is repaired: every collective runs at its pace."]
