"""A probe as text for people: tables like those of nccl-tests, 79 columns wide."""

from __future__ import annotations

from collections.abc import Iterator

from diag.probes.comm.records import Extra, Probe, Row
from diag.probes.host_words import plural
from diag.probes.host_words import size as size_words
from diag.report.model import rank_list
from diag.report.text import printable

HEAD = (f"{'# size':>10} {'count':>9} {'type':>5} {'min':>9} {'median':>9} {'p99':>9} {'algbw':>7} {'busbw':>7} "
        f"{'#wrong':>6}")
UNITS = f"{'# (B)':>10} {'(elem.)':>9} {'':>5} {'(us)':>9} {'(us)':>9} {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7}"
#: Groups of one family that are shown in full; the JSON has all.
MAX_GROUPS = 4


def text(probe: Probe, width: int = 80) -> str:
    """Every table of `probe`, ending in an empty line."""
    return "\n".join(line[:max(width, 40)] for line in _lines(probe, max(width, 40))) + "\n\n"


def _lines(probe: Probe, width: int) -> Iterator[str]:
    places: dict[str, list[int]] = {}
    for rank, host in enumerate(probe.hosts):
        places.setdefault(host, []).append(rank)
    first = f"# {plural(probe.world, 'rank')}, {printable(probe.backend)}, torch {printable(probe.torch)}: "
    hosts = [f"{printable(host)} ({rank_list(ranks)})" for host, ranks in places.items()]
    for count in range(len(hosts), -1, -1):  # as many as have room
        left = len(hosts) - count
        more = f"{' and ' if count else ''}{plural(left, 'more host' if count else 'host')}" if left else ""
        line_ = first + ", ".join(hosts[:count]) + more
        if len(line_) <= width:
            break
    yield line_
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in probe.rows:
        tables.setdefault((row.group, row.operation), []).append(row)
    groups: dict[str, list[str]] = {}
    for group, _ in tables:
        family = groups.setdefault(group.split("[")[0], [])
        if group not in family:
            family.append(group)
    for (group, operation), rows in tables.items():
        if group not in groups[group.split("[")[0]][:MAX_GROUPS]:
            continue
        at_once = ", its family at once" if rows[0].concurrent else ""
        yield ""
        yield f"# {printable(operation)}, {printable(group)} ({plural(len(rows[0].ranks), 'rank')}{at_once})"
        yield HEAD
        yield UNITS
        yield from map(line, rows)
    for kind, names in groups.items():
        if len(names) > MAX_GROUPS:
            yield f"# {len(names) - MAX_GROUPS} more groups of {kind} in --json and --save"
    if probe.extras:
        yield ""
    yield from map(_extra, probe.extras)


def line(row: Row) -> str:
    """One size."""
    times = [f"{_short(seconds * 1e6, 9):>9}" for seconds in (row.min_seconds, row.median_seconds, row.p99_seconds)]
    rates = [f"{_short(rate, 7):>7}" for rate in (row.algbw, row.busbw)]
    dtype = printable(row.dtype)[:5]
    return f"{row.bytes:>10} {row.count:>9} {dtype:>5} {' '.join(times)} {' '.join(rates)} {row.wrong:>6}"


def _short(value: float, room: int) -> str:
    """As many decimals as fit: two, of less than one four."""
    for decimals in (2 if value >= 1 else 4, 1, 0):
        found = f"{value:.{decimals}f}"
        if len(found) <= room:
            return found
    return f"{value:.1e}"


def _extra(extra: Extra) -> str:
    n = {key: value for key, value in extra.numbers.items() if isinstance(value, int | float)}
    name, size = printable(extra.name), size_words(n.get("bytes", 0))

    def ms(key: str) -> str:
        return f"{n.get(key, 0.0) * 1e3:.3g} ms"

    if extra.kind == "hierarchy":
        return (f"# all_to_all {size}, {name}: flat {ms('flat_seconds')}, hierarchical {ms('hierarchical_seconds')} "
                f"({n.get('gain', 0):.2f}x)")
    if extra.kind == "overlap":
        share = f"{n['hidden']:.0%}" if "hidden" in n else "too unsteady to tell"
        return (f"# overlap {name} {size}: alone {ms('exchange_seconds')}, products {ms('compute_seconds')}, both "
                f"{ms('both_seconds')}: {share}")
    if extra.kind == "payload":
        return (f"# payload {name} {size}: all_to_all {ms('exchange_seconds')} + conversion "
                f"{ms('convert_seconds')}, error {n.get('largest_error', 0):.1g}")
    if extra.kind == "dispatch":
        return (f"# {name} dispatch of the configuration: {size_words(n.get('bytes_per_rank', 0))} per rank, "
                f"{size_words(n.get('bytes_per_peer', 0))} per peer")
    return f"# {printable(extra.kind)} {name}"
