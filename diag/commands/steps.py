"""`pdtrain diag steps`: how long steps take, and why."""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@report_options
def steps(paths: tuple[str, ...], output: Output) -> int:
    """Slow ranks, slow-downs, stalls, and where the time of a step goes.

    PATH is a run directory, or metrics and console logs of any trainer (docs/series.md). The slow rank is found from
    each rank's own times in events/: what it needs for what it does alone, since all ranks of a synchronous job have
    the same step time.
    """
    from diag.diagnose import diagnose

    with output.progress() as progress:
        report = diagnose(paths, only="steps", signatures=output.signatures, progress=progress)
    return output.emit(report)
