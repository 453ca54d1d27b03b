"""Step time against memory of every layout that fits, as a picture."""

from __future__ import annotations

from pathlib import Path

from diag.errors import MissingExtra, UsageError
from pdtrain.plan.setup import layout_text
from pdtrain.plan.sweep import Sweep


def pareto(found: Sweep, path: Path) -> None:
    """Write a scatter plot with the Pareto front to `path` (PNG, SVG or PDF by its ending).

    Raises:
        MissingExtra: no matplotlib. UsageError: the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("pdtrain plan sweep --plot", "plot", "matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    axes.scatter([c.worst / 1e9 for c in found.candidates], [c.step for c in found.candidates], s=8, color="0.6")
    front = [c for c in found.candidates if c.pareto]
    axes.plot([c.worst / 1e9 for c in front], [c.step for c in front], "o-", color="tab:blue", markersize=4)
    for item in front[:6]:
        axes.annotate(layout_text(item.setup), (item.worst / 1e9, item.step), fontsize=6)
    axes.set(xlabel="fullest rank [GB]", ylabel="step [s]", title=f"layouts of {found.devices:,} devices")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
