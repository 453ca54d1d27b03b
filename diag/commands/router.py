"""`pdtrain diag router`: expert balance and router health of a run."""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@report_options
def router(paths: tuple[str, ...], output: Output) -> int:
    """Expert balance and router health of a run.

    PATH is a run directory, a metrics.jsonl, or any file with one JSON object per line that holds tokens per expert
    ({"step": 1, "layer": 3, "counts": [...]}). Gini, variation, MaxVio, entropy, dead experts and drop rate are judged
    by their excess over what uniform routing would show at the same number of tokens. Checkpoints among the inputs
    are searched for experts that are copies of each other.
    """
    from diag.diagnose import diagnose

    with output.progress() as progress:
        report = diagnose(paths, only="router", signatures=output.signatures, progress=progress)
    return output.emit(report)
