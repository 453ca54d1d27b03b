"""`pdtrain diag postmortem`: everything that a run left behind, reduced to the one thing that broke first."""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@report_options
def postmortem(paths: tuple[str, ...], output: Output) -> int:
    """Find what broke first in the logs and dumps under PATH: root cause, rank or host, victims, fix.

    PATH is files, folders, quoted globs, .gz and .zst, or - for standard input.
    """
    from diag.diagnose import diagnose

    with output.progress() as progress:
        report = diagnose(paths, signatures=output.signatures, progress=progress)
    return output.emit(report)
