"""`pdtrain diag memory`: where the memory of the GPUs went, from snapshots."""

from __future__ import annotations

import os
import re

import click

from diag.commands.output import Output, report_options

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?i?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _bytes(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    found = _SIZE.fullmatch(value.strip())
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{value!r}: write a size, as in 80GB or 79.1GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _is_log(path: str) -> bool:
    """Whether `path` is one file, and a log. What cannot be opened is the diagnosis's to say."""
    from diag.artefacts import Source, recognise
    from diag.discover import open_file
    from diag.errors import PdtrainError

    if not os.path.isfile(path):  # noqa: PTH113 - "-" and odd names are no error here
        return False
    try:
        source = open_file(path)
    except (OSError, PdtrainError):
        return False
    reader = recognise(source) if isinstance(source, Source) else None
    return reader is not None and reader.NAME == "log"


@click.command()
@click.argument("snapshots", nargs=-1, required=True, metavar="SNAPSHOT...")
@click.option("--device-memory", metavar="SIZE", callback=_bytes,
              help="Memory of one GPU, as in 79.1GiB: a snapshot does not say it. Then what is not PyTorch's is told.")
@click.option("--png", metavar="FILE", help="Also draw the timeline (needs matplotlib).")
@click.option("--tree/--no-tree", "tree", default=True, help="Show who held the peak, and the timeline, as text.")
@report_options
def memory(snapshots: tuple[str, ...], device_memory: int | None, png: str | None, tree: bool,
           output: Output) -> int:
    """Who held the memory at the peak, why it ran out, what stays behind after each step, which rank differs.

    SNAPSHOT is a pickle of torch.cuda.memory._dump_snapshot() (any version, .gz too), a folder of them, one per rank,
    or a module-peak file that pdtrain records on CPU. A log is read for its out-of-memory sentence. --html draws a
    timeline that can be zoomed.
    """
    from diag.artefacts import Artefacts
    from diag.commands.output import colour, width
    from diag.diagnose import diagnose
    from diag.schema import Report

    if png is not None:
        from diag.report.plot import require_png

        require_png(png, force=output.force)
    read: list[Artefacts] = []
    with output.progress() as progress:
        topics = ("memory", "logs") if any(map(_is_log, snapshots)) else "memory"
        report = diagnose(snapshots, only=topics, signatures=output.signatures, progress=progress,
                          inspect=read.append, device_memory=device_memory)

    def page(report: Report) -> str:
        from diag.memory.page import render

        return render(report, read[0])

    status = output.emit(report, page=page)
    if png is not None:
        from diag.memory.picture import draw

        draw(read[0], png)
    if tree and output.to_terminal() and output.file in (None, "-"):
        from diag.memory.tree import render

        click.echo(render(read[0], width=width(), colour=colour()), nl=False, color=True)
    return status
