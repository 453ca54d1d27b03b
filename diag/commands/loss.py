"""`pdtrain diag loss`: what a run's loss, gradient norm and loss scale show."""

from __future__ import annotations

import sys

import click

from diag.commands.output import Output, report_options


def _columns(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for value in values:
        name, _, key = value.partition("=")
        if not name.strip() or not key.strip():
            raise click.BadParameter(f"{value!r}: write NAME=COLUMN, as in loss=my_loss")
        found.append((name.strip(), key.strip()))
    return tuple(found)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--column", "columns", multiple=True, metavar="NAME=COLUMN", callback=_columns,
              help="Which column of the input is the loss, lr, grad_norm, ... (loss=my_loss; repeatable).")
@click.option("--png", metavar="FILE", help="Also draw the loss with its anomalies marked (needs matplotlib).")
@click.option("--plot/--no-plot", "plot", default=None, help="Plot in the terminal (default: when there is one).")
@report_options
def loss(paths: tuple[str, ...], columns: tuple[tuple[str, str], ...], png: str | None, plot: bool | None,
         output: Output) -> int:
    """Spikes, divergence, NaN, jumps at a resume, loss-scale collapse: what kind, since when, what moved first.

    PATH is a run directory, a metrics.jsonl, TensorBoard events, trainer_state.json, a CSV, a .wandb file, or the
    console log of Megatron-LM, DeepSpeed, torchtitan, OLMo, HF Trainer, nanoGPT and most home-made loops.
    """
    from diag.artefacts import Artefacts
    from diag.commands.output import width
    from diag.diagnose import diagnose
    from diag.report.plot import draw_png, draw_terminal, require_png

    if png is not None:
        require_png(png, force=output.force)
    read: list[Artefacts] = []
    with output.progress() as progress:
        report = diagnose(paths, only="loss", signatures=output.signatures, progress=progress, columns=columns,
                          inspect=read.append)
    status = output.emit(report)
    if png is not None:
        draw_png(read[0], report, png)
    if output.to_terminal() and (plot if plot is not None else sys.stdout.isatty()):
        sys.stdout.write("\n" + draw_terminal(read[0], report, width=width()))
    return status
