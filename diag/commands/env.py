"""`pdtrain diag env`: is this machine fit to train, and are all hosts of the job alike?"""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--path", "checkpoint", metavar="CKPT_DIR", help="Measure free space, write and fsync rate of this path.")
@click.option("--save", "save", metavar="FILE", help="Also save the facts of this host (JSON), to be compared later.")
@click.option("--nproc", type=click.IntRange(1, 64), metavar="N", help="The ranks that this host is to carry.")
@report_options
def env(paths: tuple[str, ...], checkpoint: str | None, save: str | None, nproc: int | None, output: Output) -> int:
    """Judge this machine: GPUs, drivers, links, network, limits, storage, libraries, variables.

    Under torchrun, one process per host or per rank, the facts of all hosts are gathered and compared; rank 0 prints.
    With PATHs nothing is measured: saved outputs are judged instead. They are files of --save, nvidia-smi (-q, topo -m,
    --query-gpu csv), ibstat, kernel logs, nccl-tests (table, JSON) and NCCL RAS (JSON, text).
    """
    from diag.errors import UsageError
    from diag.probes.host_report import live, saved

    if paths and (checkpoint or save or nproc):
        raise UsageError("--path, --save and --nproc belong to the live machine; leave out the PATHs")
    if paths:
        with output.progress() as progress:
            return output.emit(saved(paths, signatures=output.signatures, progress=progress))
    report = live(checkpoint, save=save, ranks=nproc, force=output.force)
    return 0 if report is None else output.emit(report)
