"""The HTML report with a timeline per device: one file, no external resource, data thinned before it is written.

The page of `diag.report.html` forbids scripts; this one allows exactly the script beside this file, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import msgspec

from diag.artefacts import Artefacts
from diag.artefacts.memory_snapshot import MemorySnapshot
from diag.memory.nouns import DeviceMemory
from diag.report import html
from diag.report.model import size
from diag.report.text import printable
from diag.schema import Report

#: Timelines in one page: 4,000 points of 14 layers are about 0.4 MB each.
MAX_TIMELINES = 16
MAX_ROWS = 40
_STYLE = """
figure.memory{margin:.6rem 0 1.4rem;position:relative}
figure.memory canvas{width:100%;height:340px;touch-action:none;cursor:crosshair;display:block}
figure.memory .bar{display:flex;gap:.5rem;align-items:center;font-size:.85rem}
figure.memory button{font:inherit;color:inherit;background:var(--box);border:1px solid var(--line);
border-radius:.3rem;padding:.1rem .5rem;cursor:pointer}figure.memory button:disabled{opacity:.4}
figure.memory .legend{display:flex;flex-wrap:wrap;gap:.3rem;margin:.5rem 0;font-size:.78rem}
figure.memory .legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
figure.memory .legend .off{opacity:.35}
figure.memory .tip{font-size:.78rem;columns:2 20rem;font-variant-numeric:tabular-nums;min-height:6em}
figure.memory .tip div{display:flex;justify-content:space-between;gap:1rem;break-inside:avoid}
.bar-cell{min-width:8rem}.bar-cell span{display:block;height:.7em;background:var(--dim);border-radius:2px}
"""


def render(report: Report, artefacts: Artefacts) -> str:
    """`report` as a complete HTML document with timelines and tables of who held the peak."""
    page = html.render(report)
    shown = [(s, d) for s in artefacts.of(MemorySnapshot) for d in s.devices]
    drawn = [(s, d) for s, d in shown if d.timeline][:MAX_TIMELINES]
    if not shown:
        return page
    script = Path(__file__).with_name("timeline.js").read_text("utf-8")
    parts = []
    for snapshot, device in shown[:64]:
        parts.append(_section(snapshot, device, next((i for i, (_, d) in enumerate(drawn) if d is device), None)))
    if drawn:
        data = [_data(device) for _, device in drawn]
        text = msgspec.json.encode(data).decode().replace("<", "\\u003c").replace("\u2028", "").replace("\u2029", "")
        parts.append(f'<script type="application/json" id="memory-data">{text}</script>\n<script>{script}</script>')
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        page = page.replace("style-src 'unsafe-inline'", f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'", 1)
    page = page.replace("</style>", f"{_STYLE}</style>", 1)
    # the pictures come before the lists of what else was found
    for mark in ("<h2>Found</h2>", "<h2>Also found</h2>", "</main>"):
        head, found, tail = page.rpartition(mark)
        if found:
            return f"{head}{''.join(parts)}\n{mark}{tail}"
    return page


def _data(device: DeviceMemory) -> dict[str, object]:
    line = device.timeline
    assert line is not None
    return {"index": line.index, "time_us": line.time_us, "allocated": line.allocated, "reserved": line.reserved,
            "layers": [printable(name, 120) for name in line.layers], "values": line.values,
            "marks": [(place, printable(what, 80)) for place, what in line.marks]}


def _section(snapshot: MemorySnapshot, device: DeviceMemory, place: int | None) -> str:
    who = f"rank {snapshot.rank}, " if snapshot.rank is not None else ""
    name = f"GPU {device.device}" if isinstance(device.device, int) else str(device.device)
    parts = [f"<h2>{html.esc(who + name)} <span class=dim>{html.esc(snapshot.path)}</span></h2>"]
    if place is not None:
        parts.append(
            f'<figure class=memory data-place="{place}"><div class=bar><button class=back>whole window</button>'
            "<button class=time>by time</button><span class=dim>drag to zoom, double click to go back; black line: "
            'reserved</span></div><canvas tabindex=0></canvas><div class=legend></div><div class=tip></div></figure>')
    peak = max(device.peak_requested_bytes, 1)
    rows = [(o.owner, o.phase, o.bytes, o.blocks) for o in device.owners[:MAX_ROWS]]
    parts.append(_table("Who held the peak", ("line", "phase"), [((a, b), c, d) for a, b, c, d in rows], peak))
    for title, shares in (("By module", device.modules), ("By annotation", device.annotations),
                          ("By size", device.sizes)):
        parts.append(_table(title, ("name",), [((s.name,), s.bytes, s.blocks) for s in shares[:MAX_ROWS]], peak))
    return "\n".join(part for part in parts if part)


def _table(title: str, names: tuple[str, ...], rows: list[tuple[tuple[str, ...], int, int]], peak: int) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.esc(name)}</th>" for name in names)
    lines = []
    for texts, held, blocks in rows:
        cells = "".join(f"<td>{html.esc(text, 160)}</td>" for text in texts)
        share = 100 * held / peak
        lines.append(f"<tr>{cells}<td class=n>{size(held)}</td><td class=n>{share:.1f} %</td><td class=n>{blocks:,}"
                     f'</td><td class=bar-cell><span style="width:{min(share, 100):.1f}%"></span></td></tr>')
    return (f"<details{' open' if title.startswith('Who') else ''}><summary>{html.esc(title)}</summary>"
            f"<div class=scroll><table><tr>{head}<th>bytes</th><th>share</th><th>blocks</th><th></th></tr>"
            f"{''.join(lines)}</table></div></details>")
