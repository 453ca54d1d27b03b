"""Pictures of a loss curve with its anomalies marked: in braille dots on a terminal, as PNG with matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diag.errors import MissingExtra, UsageError
from diag.report.text import printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from diag.artefacts import Artefacts
    from diag.schema import Finding, Report
    from diag.series import Column, Run

    Floats = npt.NDArray[np.float64]

HEIGHT = 12
LABEL = 10
#: Dots of a braille cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
#: A curve that spans more than this factor is drawn on a logarithmic scale.
LOG_FACTOR = 8.0
_WIDTH_LIMITS = 40, 160


def pictures(artefacts: Artefacts, report: Report) -> list[tuple[Run, Column, list[Finding]]]:
    """(run, loss, its findings with a step) for each run that has a loss."""
    from diag.series import runs

    found = []
    for run in runs(artefacts):
        losses = run.losses()
        if not losses or len(losses[0]) < 2:
            continue
        paths = {part.path for part in run.parts}
        marks = [f for f in report.findings if f.severity != "info" and f.where.step is not None
                 and f.evidence and f.evidence[0].path in paths]
        found.append((run, losses[0], marks))
    return found


def terminal_plot(steps: npt.NDArray[np.int64], values: Floats, marks: list[int], *, width: int = 80,
                  height: int = HEIGHT, title: str = "", linear: bool = False) -> str:
    """`values` [n] over `steps` [n] in braille, `width` columns wide, with a caret below each step of `marks`."""
    import numpy as np

    good = np.isfinite(values)
    if good.sum() < 2 or steps[-1] <= steps[0]:
        return ""
    columns = min(max(width, _WIDTH_LIMITS[0]), _WIDTH_LIMITS[1]) - LABEL - 2
    x = ((steps - steps[0]) / (steps[-1] - steps[0]) * (2 * columns - 1)).astype(int)
    shown = values[good]
    low, high = float(shown.min()), float(shown.max())
    logarithmic = not linear and low > 0 and high > LOG_FACTOR * low
    y = np.log(shown) if logarithmic else shown
    bottom, top = float(y.min()), float(y.max())
    if top <= bottom:
        top = bottom + 1.0
    rows = 4 * height
    place = np.clip(((top - y) / (top - bottom) * (rows - 1)).round().astype(int), 0, rows - 1)
    cells = [[0] * columns for _ in range(height)]
    xs = x[good]
    previous: tuple[int, int] | None = None
    for column in range(2 * columns):
        here = place[xs == column] if len(xs) < 4000 else place[np.searchsorted(xs, column) : np.searchsorted(
            xs, column, side="right")]
        if not len(here):
            continue
        first_row, last_row = int(here.min()), int(here.max())
        if previous is not None:  # join neighbours, so that a jump is a line
            for between in range(previous[0], column + 1):
                share = (between - previous[0]) / (column - previous[0])
                row = round(previous[1] + share * (int(here[0]) - previous[1]))
                cells[row // 4][between // 2] |= _DOTS[row % 4][between % 2]
        for row in range(first_row, last_row + 1):
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        previous = column, int(here[-1])
    lines = [title] if title else []
    for index, cells_of_row in enumerate(cells):
        at = top - (top - bottom) * index / max(height - 1, 1)
        value = float(np.exp(at)) if logarithmic else at
        label = f"{value:.4g}" if index in (0, height // 2, height - 1) else ""
        lines.append(f"{label:>{LABEL}} |" + "".join(
            chr(0x2800 + c) if c else " " for c in cells_of_row).rstrip())
    axis = [" "] * columns
    for step in marks:
        column = int((step - steps[0]) / (steps[-1] - steps[0]) * (columns - 1))
        if 0 <= column < columns:
            axis[column] = "^"
    if "^" in axis:
        lines.append(" " * LABEL + "  " + "".join(axis).rstrip())
    first, last = f"{int(steps[0]):,}", f"{int(steps[-1]):,}"
    lines.append(" " * (LABEL + 2) + first + last.rjust(columns - len(first)))
    return "\n".join(lines)


def draw_terminal(artefacts: Artefacts, report: Report, *, width: int, limit: int = 3) -> str:
    """The plots of the first runs, ready to print."""
    parts = []
    for run, column, marks in pictures(artefacts, report)[:limit]:
        title = printable(f"{column.key} of {run.label}")
        parts.append(terminal_plot(column.steps, column.values, [f.where.step or 0 for f in marks], width=width,
                                   title=title))
    return "\n\n".join(part for part in parts if part) + ("\n" if parts else "")


def require_png(target: str, *, force: bool = False) -> None:
    """Refuse before any work: `MissingExtra` without matplotlib, `UsageError` where `target` cannot be written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("--png", "plot", "matplotlib") from None
    path = Path(target)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{target}: there is no directory {path.absolute().parent}")
    if path.is_dir() or (path.exists() and not force):
        raise UsageError(f"{target}: exists; choose another name, or overwrite it with --force")


def draw_png(artefacts: Artefacts, report: Report, target: str) -> None:
    """One panel per run: the loss, the gradient norm where recorded, and a line at each anomaly."""
    from matplotlib.figure import Figure

    shown = pictures(artefacts, report)[:6]
    if not shown:
        print("nothing to draw: no run has a loss of two points or more", file=sys.stderr)
        return
    figure = Figure(figsize=(11, 4 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for panel, (run, column, marks) in zip(panels, shown, strict=True):
        panel.plot(column.steps, column.values, linewidth=0.8, label=_plain(column.key))
        norm = run.get("grad_norm")
        if norm is not None and len(norm) > 1:
            other = panel.twinx()
            other.plot(norm.steps, norm.values, linewidth=0.5, alpha=0.4, color="tab:orange")
            other.set_ylabel("gradient norm")
        good = column.finite().values
        if len(good) and good.min() > 0 and good.max() > LOG_FACTOR * good.min():
            panel.set_yscale("log")
        for finding in marks:
            panel.axvline(finding.where.step, color="tab:red", linewidth=0.8, linestyle="--")
            panel.annotate(finding.cause, (finding.where.step, 1.0), xycoords=("data", "axes fraction"), rotation=90,
                           fontsize=7, va="top", color="tab:red")
        panel.set_title(_plain(run.label), fontsize=8)
        panel.set_xlabel("step")
        panel.set_ylabel(_plain(column.key))
    figure.savefig(target, format="png", dpi=120)


def _plain(text: str) -> str:
    """Text for matplotlib: no mathematics between dollar signs."""
    return printable(text).replace("$", r"\$")
