"""The links as a heat map: in the terminal, as PNG, as a table of an HTML page."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from diag.errors import MissingExtra, UsageError
from diag.probes.comm.records import Link, Probe
from diag.report.text import printable
from diag.schema import Report

#: Ranks or hosts along one side of the picture in a terminal and a page; of more, hosts stand for their ranks.
MOST = 64


def matrix(links: list[Link], most: int = MOST) -> tuple[list[str], list[list[float | None]]]:
    """(labels, B/s from row to column): by rank, or by host (the slowest link of each pair) when ranks are too many."""
    ranks = sorted({rank for link in links for rank in (link.src, link.dst)})
    hosts = {rank: host for link in links for rank, host in ((link.src, link.src_host), (link.dst, link.dst_host))}
    by_host = len(ranks) > most and len(set(hosts.values())) > 1
    labels = list(dict.fromkeys(hosts[rank] for rank in ranks)) if by_host else [str(rank) for rank in ranks]
    labels = labels[:most]
    at = {label: index for index, label in enumerate(labels)}
    cells: list[list[float | None]] = [[None] * len(labels) for _ in labels]
    for link in links:
        row, column = (at.get(hosts[rank] if by_host else str(rank)) for rank in (link.src, link.dst))
        if row is None or column is None or (row == column and by_host):
            continue
        known = cells[row][column]
        cells[row][column] = link.bytes_per_second if known is None else min(known, link.bytes_per_second)
    return labels, cells


def row_names(probe: Probe, labels: list[str]) -> list[str]:
    """`labels` for the side of a picture: a rank with its host, where there are several."""
    if len(set(probe.hosts)) < 2:
        return labels
    return [f"{label} {probe.hosts[int(label)]}" if label.isdigit() and int(label) < len(probe.hosts) else label
            for label in labels]


def _median(cells: list[list[float | None]]) -> float:
    known = sorted(value for row in cells for value in row if value is not None)
    return known[len(known) // 2] if known else 0.0


def terminal(probe: Probe, width: int) -> str:
    """Rows send, columns receive; darker is nearer to the median or above. Empty without links."""
    if not probe.links:
        return ""
    labels, cells = matrix(probe.links, min(MOST, max(4, (width - 22) // 2)))
    labels = row_names(probe, labels)
    middle = _median(cells) or 1.0
    room = min(20, max(map(len, labels)))
    wide = 2 if len(labels) * 2 + room + 2 <= width else 1
    lines = [f"# links, B/s relative to the median ({middle / 1e9:.3g} GB/s): rows send, columns receive"]
    for label, row in zip(labels, cells, strict=True):
        marks = "".join((" ·" if value is None else f" {_shade(value / middle)}")[-wide:] for value in row)
        lines.append(f"{printable(label)[:room]:<{room}} {marks}")
    lines.append(f"{'':>{room}}  · not measured; tenths of the median, # from 95 %")
    return "\n".join(line[:width] for line in lines) + "\n\n"


def _shade(share: float) -> str:
    """The first digit of the share of the median; a link as fast as that is #."""
    return "#" if share >= 0.95 else str(max(0, min(9, int(share * 10))))


def need_matplotlib() -> None:
    """Raises MissingExtra before anything is measured."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("pdtrain diag comm --png", "plot", "matplotlib")


def png(probe: Probe, path: Path) -> None:
    """Draw the links, or say on stderr that there are none. Raises UsageError when the file cannot be written."""
    need_matplotlib()
    if not probe.links:  # it ended before them, or is a saved one without
        print("pdtrain: --png draws links and none were measured: not written", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels, cells = matrix(probe.links, 1024)
    values = [[float("nan") if value is None else value / 1e9 for value in row] for row in cells]
    figure, axes = pyplot.subplots(figsize=(7, 6))
    image = axes.imshow(values, cmap="viridis", vmin=0)
    figure.colorbar(image, label="GB/s")
    axes.set(xlabel="receives", ylabel="sends", title=f"links of {probe.world} ranks")
    if len(labels) <= 32:
        shown = [printable(label).replace("$", r"\$") for label in labels]
        axes.set_xticks(range(len(labels)), shown, rotation=90)
        axes.set_yticks(range(len(labels)), [printable(name).replace("$", r"\$")[:24] for name in
                                             row_names(probe, labels)])
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise UsageError(f"--png {path}: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def page(report: Report, probes: list[Probe]) -> str:
    """The report's page with the heat map and the tables before its end."""
    from diag.probes.comm.table import text
    from diag.report.html import render

    parts = []
    for probe in probes:
        if probe.links:
            parts.append(f"<h2>Links</h2><div class=scroll>{_table(probe)}</div>")
        parts.append(f"<h2>Measurements</h2><div class=scroll><pre style='white-space:pre'>{escape(text(probe))}</pre>"
                     "</div>")
    whole = render(report)
    head, found, tail = whole.rpartition("</body>")
    return f"{head}{''.join(parts)}{found}{tail}" if found else whole + "".join(parts)


def _table(probe: Probe) -> str:
    labels, cells = matrix(probe.links)
    middle = _median(cells) or 1.0
    head = "".join(f"<th>{escape(printable(label))}</th>" for label in labels)
    rows = []
    for label, row in zip(row_names(probe, labels), cells, strict=True):
        marks = "".join("<td></td>" if value is None else
                        f"<td class=n style='background:hsl({120 * min(1.0, value / middle):.0f} 60% 50% / 45%)'>"
                        f"{value / 1e9:.3g}</td>" for value in row)
        rows.append(f"<tr><th>{escape(printable(label))}</th>{marks}</tr>")
    return f"<p class=dim>GB/s, rows send, columns receive</p><table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
