"""What a probe says: findings of its records. Pure; the same for a probe just made and for one read from a file."""

from __future__ import annotations

from collections.abc import Iterator

from diag.detectors import NotChecked
from diag.playbooks import fill
from diag.probes import hardware
from diag.probes.comm.records import Lost, Probe, Row
from diag.probes.host_words import plural
from diag.probes.host_words import size as size_words
from diag.schema import Evidence, Finding, Where

#: What became of a rank, as a sentence goes on.
HOW = {
    "gone": "died: its process is gone",
    "stopped": "is stopped (SIGSTOP, or a debugger): its process exists and does not run",
    "silent": "stopped answering: killed, stopped, or its host is cut off",
    "absent": "never arrived",
}


def judge(probe: Probe, path: str) -> Iterator[Finding | NotChecked]:
    """Every finding and everything that could not be judged. `path` stands in the evidence.

    All are states of the machines at the time of the probe: they never lead over what a run's own artefacts say.
    """
    for item in _judge(probe, path):
        if isinstance(item, Finding):
            item.role, item.numbers = "context", {"standing": True, **item.numbers}
        yield item


def _judge(probe: Probe, path: str) -> Iterator[Finding | NotChecked]:
    yield from _lost(probe, path)
    yield from _wrong(probe, path)
    yield from _floors(probe, path)
    yield from _links(probe)
    for note in probe.notes:
        yield NotChecked(note)
    yield Finding(cause="link_measured", role="context", severity="info", confidence=1.0,
                  summary=summary(probe))


def _lost(probe: Probe, path: str) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Lost]] = {}
    for item in probe.lost:
        groups.setdefault((item.how, item.at), []).append(item)
    where = [Evidence(path=path, text=text) for text in probe.position]
    for (how, at), items in groups.items():
        ranks = sorted(item.rank for item in items)
        hosts = sorted({item.host for item in items if item.host})
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        on = f" on {', '.join(hosts)}" if hosts else ""
        during = f" during {at}" if at else ""
        yield Finding(cause="peer_unreachable", severity="error", confidence=0.95, evidence=where,
                      where=Where(ranks=ranks, hosts=hosts), summary=f"{names}{on} {HOW.get(how, how)}{during}",
                      numbers={"how": how, "silent_seconds": max(item.seconds for item in items),
                               "timeout_seconds": probe.timeout})
    kind, _, text = probe.stopped.partition(": ")
    if not probe.stopped or probe.lost:
        return
    if kind == "stuck":
        summary = f"every rank answers and none gets on: {'; '.join(probe.position)}"
        yield Finding(cause="hang_all_waiting", severity="error", confidence=0.8, summary=summary, evidence=where)
    elif kind == "store":
        yield Finding(cause="store_lost", severity="error", confidence=0.7, evidence=where,
                      summary="the store of the job (on the host of rank 0) no longer answers: that host is gone, or "
                      f"this one is cut off ({text})")
    elif kind == "failed":
        yield Finding(cause="exception_unknown", severity="error", confidence=0.7, evidence=where,
                      summary=f"the probe failed on {text}")
    else:
        yield Finding(cause="preempted", severity="warning", confidence=0.9, evidence=where,
                      summary=f"the probe was interrupted by {text or 'a signal'}; what was measured until then stands")


def _links(probe: Probe) -> Iterator[Finding | NotChecked]:
    """What localisation said, but for what the heartbeats say already, and for links that are none.

    Processes of one host that speak Gloo copy memory: their rates are those of the processors that they share with
    everybody else, and differ by chance. Only that nothing passes at all is a finding there.
    """
    known = {item.rank for item in probe.lost}
    copies = probe.backend == "gloo" and len(set(probe.hosts)) == 1
    for item in probe.link_findings:
        if item.cause == "peer_unreachable" and item.where.ranks and set(item.where.ranks) <= known:
            continue
        if copies and item.cause != "peer_unreachable" and item.numbers.get("ratio") != 0:
            continue
        item.fix = [fill(step, item.where) for step in item.fix]
        yield item
    if copies and probe.links:
        yield NotChecked("links: within one host Gloo copies memory; those rates are shown and not judged")


def _wrong(probe: Probe, path: str) -> Iterator[Finding]:
    for row in probe.rows:
        if row.wrong:
            yield Finding(cause="collective_wrong_result", severity="error", confidence=0.95, where=_where(row),
                          summary=f"{named(row)} returned {row.wrong:,} wrong values",
                          evidence=[Evidence(path=path, text=f"#wrong {row.wrong}")], numbers={"wrong": row.wrong})
    for extra in probe.extras:
        wrong = extra.numbers.get("wrong", 0)
        if extra.kind == "hierarchy" and isinstance(wrong, int) and wrong:
            yield Finding(cause="collective_wrong_result", severity="error", confidence=0.9, numbers={"wrong": wrong},
                          summary=f"the hierarchical all-to-all returned {wrong:,} values that the flat one did not")


def _floors(probe: Probe, path: str) -> Iterator[Finding | NotChecked]:
    """Bandwidth against what sound hardware shows, where somebody has published that."""
    models = set(probe.devices)
    best: dict[str, Row] = {}
    for row in probe.rows:
        if row.group == "world" and (row.operation not in best or row.bytes > best[row.operation].bytes):
            best[row.operation] = row
    if not best:
        return
    judged = False
    for row in best.values():
        floor = hardware.floor_of(next(iter(models)), row.operation, len(row.ranks), row.bytes) \
            if len(models) == 1 and len(set(probe.hosts)) == 1 else None
        if floor is None:
            continue
        judged = True
        if row.busbw < floor.bus_bandwidth:
            yield Finding(cause="bandwidth_low", severity="warning", confidence=0.9, summary=f"{named(row)} reaches "
                          f"{row.busbw:.4g} GB/s (bus bandwidth); sound {floor.model} shows at least "
                          f"{floor.bus_bandwidth:g}", evidence=[Evidence(path=path, text=f"busbw {row.busbw:.4g}")],
                          numbers={"bus_bandwidth": row.busbw, "floor": floor.bus_bandwidth, "source": floor.source})
    if not judged:
        device = ", ".join(sorted(name for name in models if name)) or "CPUs and Gloo"
        yield NotChecked(f"bandwidth: floor unknown for {device} with these operations and sizes")


def named(row: Row) -> str:
    """ "all_reduce of 64 MiB among 8 ranks"."""
    place = f"among {plural(len(row.ranks), 'rank')}" if row.group == "world" else f"in {row.group}"
    return f"{row.operation} of {size_words(row.bytes)} {place}"


def time_words(seconds: float) -> str:
    """ "35.4 ms", "412 µs"."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _where(row: Row) -> Where:
    return Where(group=None if row.group == "world" else row.group)


def summary(probe: Probe) -> str:
    """One line: how many ranks, the largest all_reduce, the small one, the links."""
    hosts = len(set(probe.hosts)) or 1
    parts = [f"{plural(probe.world, 'rank')} on {plural(hosts, 'host')} ({probe.backend})"]
    reduces = [row for row in probe.rows if row.operation == "all_reduce"]
    if reduces:
        top, low = max(reduces, key=lambda row: row.bytes), min(reduces, key=lambda row: row.bytes)
        parts.append(f"{named(top)} {top.busbw:.3g} GB/s (busbw)")
        parts.append(f"of {size_words(low.bytes)} {time_words(low.median_seconds)}")
    small = min((row.bytes for row in reduces if row.group.startswith("tp[")), default=0)
    if small:
        worst = max((row for row in reduces if row.group.startswith("tp[") and row.bytes == small),
                    key=lambda row: row.median_seconds)
        parts.append(f"the small all_reduce that TP waits for ({size_words(small)}) takes up to "
                     f"{time_words(worst.median_seconds)} ({worst.group})")
    if probe.links:
        rates = sorted(link.bytes_per_second for link in probe.links)
        parts.append(f"{plural(len(rates), 'link')} in {plural(probe.rounds, 'round')}: median "
                     f"{rates[len(rates) // 2] / 1e9:.3g} GB/s")
    return "; ".join(parts)
