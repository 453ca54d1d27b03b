"""`pdtrain diag hang`: who the others wait for, from flight-recorder dumps."""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options


@click.command()
@click.argument("dumps", nargs=-1, required=True, metavar="DUMPS...")
@report_options
def hang(dumps: tuple[str, ...], output: Output) -> int:
    """Name the ranks that the others wait for, from flight-recorder dumps.

    DUMPS are files or folders, one file per rank: the pickles or JSON that torch writes to TORCH_FR_DUMP_TEMP_FILE
    (TORCH_NCCL_DEBUG_INFO_TEMP_FILE before 2.9) when a collective times out. The last number in a file's name is the
    rank. Give the dumps of all ranks: a rank that left none is judged by that.
    """
    from diag.diagnose import diagnose

    with output.progress() as progress:
        report = diagnose(dumps, only="hang", signatures=output.signatures, progress=progress)
    return output.emit(report)
