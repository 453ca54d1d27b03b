"""The timelines as a PNG, with matplotlib."""

from __future__ import annotations

from diag.artefacts import Artefacts
from diag.artefacts.memory_snapshot import MemorySnapshot
from diag.errors import UsageError
from diag.report.text import printable

MAX_DEVICES = 16
#: What nobody's line of code stands for is grey, so that no owner shares a colour with it.
QUIET = {"allocated before the window": "0.8", "all others": "0.6"}


def draw(artefacts: Artefacts, target: str) -> None:
    """Write the stacked course of each device to `target`. Raises `UsageError` when nothing was recorded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(s, d) for s in artefacts.of(MemorySnapshot) for d in s.devices
             if d.timeline and len(d.timeline.index) > 1][:MAX_DEVICES]  # fmt: skip
    if not shown:
        raise UsageError(f"{target}: not drawn, no snapshot has a history of events")
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(12, 4 * len(shown)), squeeze=False)
    for axis, (snapshot, device) in zip(axes[:, 0], shown):
        line = device.timeline
        assert line is not None
        gib = [[v / 2**30 for v in layer] for layer in line.values]
        palette = matplotlib.colormaps["tab20"]
        colours = [QUIET.get(name) or palette(place % 20) for place, name in enumerate(line.layers)]
        axis.stackplot(line.index, gib, labels=[_label(name) for name in line.layers], colors=colours, step="post",
                       linewidth=0)
        axis.step(line.index, [v / 2**30 for v in line.reserved], where="post", color="black", linewidth=0.8,
                  label="reserved")
        for place, what in line.marks:
            if what == "out of memory":
                axis.axvline(place, color="red", linewidth=1)
        who = f"rank {snapshot.rank}, " if snapshot.rank is not None else ""
        axis.set_title(_label(f"{who}GPU {device.device} · {snapshot.path}"), fontsize=10)
        axis.set_xlabel("event")
        axis.set_ylabel("GiB")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
    figure.tight_layout()
    try:
        figure.savefig(target, dpi=110, format="png")
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _label(text: str) -> str:
    # "$" begins mathematics, a leading "_" hides a label
    return printable(text, 70).replace("$", r"\$").lstrip("_")
