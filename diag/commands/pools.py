"""`pdtrain diag pools`: the two pools of a separated run."""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN...")
@report_options
def pools(paths: tuple[str, ...], output: Output) -> int:
    """Both pools of a separated run side by side, the link between them, and what is wrong with them.

    RUN is a run directory whose ranks recorded pools (docs/pools-diagnosis.md). Give the directory of a run of the
    same model and batch without pools beside it to see whether separation pays.
    """
    from diag.pools.report import pools_report

    with output.progress() as progress:
        report = pools_report(paths, signatures=output.signatures, progress=progress)
    return output.emit(report)
