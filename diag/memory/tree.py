"""Who held the peak, as a tree of phases and lines, and the course of the memory, as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.memory_snapshot import MemorySnapshot
from diag.memory.nouns import DeviceMemory, Owner
from diag.report.model import size
from diag.report.text import printable

#: Devices drawn, owners of a phase, rows of the small tables.
MAX_DEVICES, MAX_OWNERS, MAX_ROWS = 8, 6, 8
BAR = 16


def render(artefacts: Artefacts, *, width: int = 100, colour: bool = False) -> str:
    """The trees of the first devices, ready to print."""
    from rich.console import Console
    from rich.text import Text

    stream = io.StringIO()
    console = Console(file=stream, width=max(width, 60), force_terminal=colour, no_color=not colour, highlight=False,
                      markup=False, emoji=False, color_system="standard" if colour else None, legacy_windows=False,
                      _environ={})
    shown = [(s, d) for s in artefacts.of(MemorySnapshot) for d in s.devices]
    for snapshot, device in shown[:MAX_DEVICES]:
        console.print()
        for style, text in _device(snapshot, device, console.width):
            console.print(Text(text, style=style, no_wrap=True), soft_wrap=True)
    if len(shown) > MAX_DEVICES:
        console.print()
        console.print(Text(f"{len(shown) - MAX_DEVICES} more devices in --json and --html", style="dim"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _device(snapshot: MemorySnapshot, device: DeviceMemory, width: int) -> Iterator[tuple[str, str]]:
    name = f"GPU {device.device}" if isinstance(device.device, int) else str(device.device)
    who = f"rank {snapshot.rank}, {name}" if snapshot.rank is not None else name
    peak = device.peak_requested_bytes
    yield "bold", printable(f"{who} · {snapshot.path} · {snapshot.layout}")
    if not isinstance(device.device, int):
        yield "", f"  {size(peak)} at the peak"
        for title, shares in (("by kind", device.phases), ("fullest moment inside each module", device.modules)):
            yield "dim", f"  {title}"
            for share in shares[:2 * MAX_ROWS]:
                yield "", f"     {_row(share.name, share.bytes, 0, peak, 2)}"
        return
    yield "", (f"  requested {size(peak)}   allocated {size(device.peak_allocated_bytes)}   reserved "
               f"{size(device.peak_reserved_bytes)}   rounding {size(device.rounding_bytes)}   "
               f"(peaks; at the end {size(device.end_requested_bytes)}, {size(device.end_allocated_bytes)}, "
               f"{size(device.end_reserved_bytes)})")
    if device.events:
        seconds = f" over {device.seconds:.3g} s" if device.seconds is not None else ""
        before = device.before_window_at_peak_bytes
        yield "dim", (f"  {device.events:,} events{seconds}; of the peak {size(before)} were allocated before the "
                      "first of them")
    groups = [share for share in device.phases if share.bytes]
    for index, phase in enumerate(groups):
        last = index == len(groups) - 1
        yield "", f"  {'└' if last else '├'}─ {_row(phase.name, phase.bytes, phase.blocks, peak)}"
        mine = _lines(device.owners, phase.name)
        stem = " " if last else "│"
        for place, owner in enumerate(mine[:MAX_OWNERS]):
            end = place == min(len(mine), MAX_OWNERS) - 1
            yield "dim" if owner.bytes < 0.02 * peak else "", \
                f"  {stem}  {'└' if end else '├'}─ {_row(owner.owner, owner.bytes, owner.blocks, peak, 3)}"
    for title, rows in (("by module", device.modules), ("by annotation", device.annotations),
                        ("by size", device.sizes)):
        if rows and (title != "by module" or len(rows) > 1):
            yield "dim", f"  {title}"
            for share in rows[:MAX_ROWS]:
                yield "", f"     {_row(share.name, share.bytes, share.blocks, peak, 2)}"
    if len(device.pools) > 1:
        yield "dim", "  pools at the end"
        for pool in device.pools:
            yield "", (f"     {pool.name}: {size(pool.reserved_bytes)} in {pool.segments:,} segments, "
                       f"{size(pool.allocated_bytes)} allocated")
    for note in [*snapshot.notes, *device.notes]:
        yield "dim", f"  note: {printable(note)}"
    yield from _course(device, width)


def _lines(owners: list[Owner], phase: str) -> list[Owner]:
    """Owners of one phase, the same line of several modules once."""
    merged: dict[str, Owner] = {}
    for owner in owners:
        if owner.phase == phase and owner.bytes:
            entry = merged.setdefault(owner.owner, Owner(owner=owner.owner, phase=phase))
            entry.bytes += owner.bytes
            entry.blocks += owner.blocks
    return sorted(merged.values(), key=lambda o: -o.bytes)


def _row(name: str, held: int, blocks: int, peak: int, indent: int = 0) -> str:
    share = held / max(peak, 1)
    bar = ("█" * round(share * BAR)).ljust(BAR, "·")
    count = f" ({blocks:,} block{'' if blocks == 1 else 's'})" if blocks else ""
    return f"{bar[:BAR - indent]} {100 * share:5.1f} % {size(held):>9}  {printable(name, 90)}{count}"


def _course(device: DeviceMemory, width: int) -> Iterator[tuple[str, str]]:
    line = device.timeline
    if line is None or len(line.index) < 3:
        return
    import numpy as np

    from diag.report.plot import terminal_plot

    steps = np.array(line.index, np.int64)
    marks = [place for place, what in line.marks if what in ("peak", "out of memory")]
    drawn = terminal_plot(steps, np.array(line.allocated, np.float64) / 2**30, marks, width=width, height=8,
                          linear=True, title="  GiB requested, by event (^ peak, out of memory)")
    for text in drawn.splitlines():
        yield "", text


