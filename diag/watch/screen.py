"""The live screen: the run in six lines with sparklines, the alarms, what is watched. Any width from 40 columns."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diag import balance
from diag.artefacts.metrics import MetricsLog
from diag.pools.gather import COMPUTE, UPDATE, separated
from diag.pools.live import busy_history, link_note
from diag.report.text import printable
from diag.watch.alarms import Alarm
from diag.watch.live import Watch
from diag.watch.messages import details
from diag.watch.pulse import seconds
from diag.watch.ranks import slowest

BARS = "▁▂▃▄▅▆▇█"
#: canonical name, title, form of the value
COLUMNS = (("loss", "loss", "{:.4g}"), ("grad_norm", "grad norm", "{:.3g}"),
           ("tokens_per_second", "tokens/s", "{:,.0f}"), ("step_seconds", "step time", "{:.3g} s"))
SHOWN_ALARMS = 4
SHOWN_PAST = 3
STYLES = {"fatal": "bold red", "error": "bold red", "warning": "bold yellow"}


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity: its latest value in words, and its history, oldest first."""

    name: str
    value: str
    history: Sequence[float]
    note: str = ""


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` in `width` characters: medians of equal parts, scaled between their extremes; "×" for NaN."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    folded = [median(part) if all(map(math.isfinite, part)) else math.nan for part in parts]
    finite = [value for value in folded if math.isfinite(value)]
    if not finite:
        return "×" * count
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else "×" for value in folded)


def rows(watch: Watch) -> list[Row]:
    """What is known of the run, in the order of the screen; quantities that were never recorded are left out."""
    found: list[Row] = []
    run = watch.run
    if run is not None:
        for name, title, show in COLUMNS:
            column = run.get(name) or (run.losses()[0] if name == "loss" and run.losses() else None)
            if column is not None and len(column):
                values = column.values.tolist()
                note = column.key if name == "loss" and column.name != "loss" else ""
                found.append(Row(title, show.format(values[-1]), values, note))
    gini = worst_gini(watch)
    if gini is not None:
        found.append(gini)
    found += pool_rows(watch)
    slow = slowest(watch.jobs)
    if slow is not None:
        rank, ratio, count = slow
        found.append(Row("slowest rank", f"rank {rank}", [], f"{ratio - 1:+.0%} over the others' median, of {count}"))
    return found


def pool_rows(watch: Watch) -> list[Row]:
    """Both pools of a separated run and their link, over its latest steps; nothing where a run has one pool."""
    found: list[Row] = []
    for job in separated(watch.artefacts):
        for role in (COMPUTE, UPDATE):
            busy = busy_history(job, role)
            if busy:
                size = job.size(role)
                found.append(Row(f"{role} pool", f"{busy[-1]:.0%} busy", busy, f"{size} rank{'s' if size > 1 else ''}"))
        note = link_note(job)
        if note:
            found.append(Row("pools' link", note[0], [], note[1]))
    return found


def worst_gini(watch: Watch) -> Row | None:
    """The layer whose routing is furthest above the sampling floor of uniform routing, of the latest records."""
    best: tuple[float, int, list[float]] | None = None
    for log in watch.artefacts.of(MetricsLog):
        for layer, router in log.routers.items():
            history = []
            for window in router.windows:
                value, floor = window.mean("gini"), window.mean("gini_floor")
                if value is None and window.counts is not None:
                    counts = (window.counts / window.records).tolist()
                    value = balance.gini(counts)
                    floor = balance.gini_floor(len(counts), 1, max(sum(counts) / len(counts), 1e-9))
                if value is not None:
                    history.append(value - (floor or 0.0))
            if history and (best is None or history[-1] > best[0]):
                best = history[-1], layer, history
    if best is None:
        return None
    return Row("router excess", f"{best[0]:.3f}", best[2], f"Gini above chance, worst layer: {best[1]}")


def screen(watch: Watch, now: float, width: int, title: str) -> RenderableType:
    """The whole screen for this moment."""
    parts: list[RenderableType] = [_head(watch, now, width, title)]
    table = rows(watch)
    if table:
        parts.append(_table(table, width))
    elif watch.reading:
        parts.append(Text(f"  reading: {watch.follower.behind / 1e6:,.0f} MB left", style="dim"))
    else:
        parts.append(Text("  waiting for the first step", style="dim"))
    parts.append(Text(""))
    parts += _alarms(watch, now, width)
    parts.append(_foot(watch, now, width))
    return Group(*parts)


def _head(watch: Watch, now: float, width: int, title: str) -> Text:
    run, step = watch.run, watch.pulse.step
    done = f"step {step:,}" if step is not None else ""
    if done and run is not None and run.total_steps:
        done += f" of {run.total_steps:,}"
    state = "finished" if watch.finished else f"{seconds(max(now - watch.pulse.last, 0))} ago" if watch.pulse.last \
        else ""
    right = " · ".join(part for part in (done, state) if part)
    left = Text(printable(title), style="bold", no_wrap=True)
    left.truncate(max(width - len(right) - 2, 8), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - len(right)), right)


def _table(found: Sequence[Row], width: int) -> Table:
    table = Table.grid(padding=(0, 1), pad_edge=True)
    room = min(width - 28, 72)
    for row in found:
        notes = row.note if row.note else _range(row.history)
        spark = sparkline(row.history, max(8, room - len(notes) - 2)) if row.history else ""
        table.add_row(Text(row.name, style="dim"), Text(row.value, style="bold", justify="right"),
                      Text.assemble((spark, "cyan"), " " if spark else "", (printable(notes), "dim"), no_wrap=True,
                                    overflow="ellipsis"))
    return table


def _range(values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    return f"{finite[0]:.3g} → {finite[-1]:.3g}" if len(finite) > 1 else ""


def _alarms(watch: Watch, now: float, width: int) -> list[RenderableType]:
    active = watch.alarms.active
    parts: list[RenderableType] = []
    if not active:
        word = "no alarm" if watch.judgements else ""
        parts.append(Text(word, style="green"))
    for alarm in active[:SHOWN_ALARMS]:
        parts += _alarm(alarm)
    if len(active) > SHOWN_ALARMS:
        parts.append(Text(f"and {len(active) - SHOWN_ALARMS} more: " + ", ".join(
            alarm.finding.cause for alarm in active[SHOWN_ALARMS:]), style="yellow"))
    for alarm in reversed(watch.alarms.past[-SHOWN_PAST:]):
        parts.append(Text(f"  {_clock(alarm.raised)} – {_clock(alarm.cleared)}  {alarm.finding.cause}, over: "
                          f"{alarm.reason}", style="dim", no_wrap=True, overflow="ellipsis"))
    return parts


def _alarm(alarm: Alarm) -> list[RenderableType]:
    finding = alarm.finding
    style = STYLES.get(finding.severity, "")
    head = Text.assemble((f"{finding.severity.upper()} ", style), (finding.cause, "bold"),
                         f"  since {_clock(alarm.raised)}  ", )
    lines: list[RenderableType] = [head, Text(f"  {printable(finding.summary)}")]
    table = Table.grid(padding=(0, 1), pad_edge=True)
    for label, text in details(alarm):
        table.add_row(Text(f" {label}", style="dim"), Text(text))
    return [*lines, table]


def _foot(watch: Watch, now: float, width: int) -> Text:
    files = len(watch.follower.tails)
    parts = [f"{files} file{'s' if files != 1 else ''}", _size(watch.follower.bytes)]
    if watch.pulse.usual is not None:
        parts.append(f"progress every {seconds(watch.pulse.usual)}, silent after {seconds(watch.pulse.limit)}")
    if watch.problem:
        parts.append(watch.problem)
    parts.append("Ctrl-C ends")
    return Text(" · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")


def _size(value: int) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB" if value >= 1e5 else f"{value:,} B"


def _clock(moment: float | None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) if moment is not None else "?"
