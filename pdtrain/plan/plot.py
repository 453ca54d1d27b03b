"""Step time against memory of every layout that fits, as a picture."""

from __future__ import annotations

from pathlib import Path

from diag.errors import MissingExtra, UsageError
from pdtrain.plan.setup import layout_text
from pdtrain.plan.sweep import Sweep

#: Points of the front that are numbered and explained.
MOST_NUMBERED = 16


def pareto(found: Sweep, path: Path) -> None:
    """Write a scatter plot with the Pareto front to `path` (PNG, SVG or PDF by its ending).

    The front's points are numbered, the key beside the picture says which layout each is.

    Raises:
        MissingExtra: no matplotlib. UsageError: nothing fits, or the file cannot be written.
    """
    if not found.candidates:
        raise UsageError(f"--plot {path}: no layout fits, so there is no picture; without --plot the reasons are shown")
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("pdtrain plan sweep --plot", "plot", "matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5.5), layout="constrained")
    axes.scatter([c.worst / 1e9 for c in found.candidates], [c.step for c in found.candidates], s=8, color="0.6")
    front = [c for c in found.candidates if c.pareto]
    axes.plot([c.worst / 1e9 for c in front], [c.step for c in front], "o-", color="tab:blue", markersize=4)
    lines = []
    for number, item in enumerate(front[:MOST_NUMBERED], 1):
        axes.annotate(str(number), (item.worst / 1e9, item.step), xytext=(0, -11), textcoords="offset points",
                      ha="center", fontsize=7)  # fmt: skip
        recompute = f", recompute {item.setup.options.recompute}" if item.setup.options.recompute else ""
        batch = item.setup.run.train.micro_batch
        lines.append(f"{number:>2}  {layout_text(item.setup)}\n      micro-batch {batch}{recompute}")
    if len(front) > MOST_NUMBERED:
        lines.append(f"and {len(front) - MOST_NUMBERED} more")
    axes.text(1.02, 1.0, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7)
    axes.set_yscale("log" if max(c.step for c in found.candidates) > 20 * front[0].step else "linear")
    axes.margins(y=0.08)
    axes.set(xlabel="fullest rank [GB]", ylabel="step [s]", title=f"layouts of {found.devices:,} devices")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
