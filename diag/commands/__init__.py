"""The click commands of `pdtrain diag`: parse arguments, call the library, emit a report. No logic lives here."""

from __future__ import annotations

import gc

import click

from diag.lazy import LazyGroup

#: A diagnosis keeps nearly all that it makes until it ends: looking for garbage every 700 objects is a tenth of its
#: time.
GC_THRESHOLD = 100_000

#: The lazy table; adding a command is one row here and one file beside it.
TABLE = {
    "postmortem": ("diag.commands.postmortem:postmortem", "Everything found in logs and dumps, root cause first."),
    "hang": ("diag.commands.hang:hang", "Name the ranks that the others wait for, from flight-recorder dumps."),
    "loss": ("diag.commands.loss:loss", "Spikes, divergence, NaN: what kind, since when, what moved first."),
    "router": ("diag.commands.router:router", "Expert balance and router health of a run."),
    "steps": ("diag.commands.steps:steps", "Slow ranks, slow-downs, stalls, and where the time of a step goes."),
    "pools": ("diag.commands.pools:pools", "Both pools of a separated run: balance, exchange, versions."),
    "watch": ("diag.commands.watch:watch", "Follow a run while it goes: a live screen, alarms, hooks."),
    "memory": ("diag.commands.memory:memory", "Where GPU memory went: peak, owners, fragmentation, leaks, ranks."),
    "comm": ("diag.commands.comm:comm", "Measure collectives and links; name a bad link, host or rank."),
    "env": ("diag.commands.env:env", "Is this machine, and are all hosts of a job, fit to train?"),
    "ckpt": ("diag.commands.ckpt:ckpt", "Prove checkpoints whole, list them, compare them."),
    "reshard": ("diag.commands.reshard:reshard", "Move a checkpoint to another format, layout or family of names."),
}


class ReportGroup(LazyGroup):
    """As its base; under --json, wrong usage prints a report too, so that a caller may always parse stdout."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["diag.json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        gc.set_threshold(GC_THRESHOLD)
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if ctx.meta["diag.json"]:
                from diag.schema import Report, to_json

                click.echo(to_json(Report(verdict="unknown", headline=error.format_message())))
            raise


@click.group(name="diag", cls=ReportGroup, table=TABLE)
def diag() -> None:
    """What broke first, where, and what to do: for this trainer's runs and for anyone's."""
