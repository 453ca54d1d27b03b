"""`pdtrain diag watch`: a run while it goes."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from diag.commands.loss import _columns
from diag.commands.output import colour


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="RUN_OR_LOGS...")
@click.option("--json-lines", is_flag=True, help="Print one JSON object per alarm raised or cleared, nothing else.")
@click.option("--exec", "commands", multiple=True, metavar="CMD",
              help="Start CMD (no shell) for each alarm raised or cleared, its JSON on standard input; repeatable.")
@click.option("--webhook", "urls", multiple=True, metavar="URL",
              help="POST the JSON of each alarm raised or cleared to URL; repeatable.")
@click.option("--once", is_flag=True, help="Judge what is there now, print, and end.")
@click.option("--forever", is_flag=True, help="Go on when the run says that it has finished.")
@click.option("--wait", is_flag=True, help="Wait for paths that do not exist yet.")
@click.option("--interval", type=click.FloatRange(min=0.1, max=3600), default=1.0, show_default=True, metavar="SECONDS",
              help="Time between two looks at the files.")
@click.option("--silence", type=click.FloatRange(min=1), metavar="SECONDS",
              help="Alarm after so long without progress (default: learned from the run, at least 60).")
@click.option("--column", "columns", multiple=True, metavar="NAME=COLUMN", callback=_columns,
              help="Which column of the input is the loss, lr, grad_norm, ... (loss=my_loss; repeatable).")
@click.option("--signatures", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
              help="Your own log signatures (*.yaml), used beside the built-in ones.")
def watch(paths: tuple[str, ...], json_lines: bool, commands: tuple[str, ...], urls: tuple[str, ...], once: bool,
          forever: bool, wait: bool, interval: float, silence: float | None, columns: tuple[tuple[str, str], ...],
          signatures: Path | None) -> int:
    """Follow a run and raise alarms: what broke, where, and the first thing to do.

    RUN_OR_LOGS is a run directory, or growing files of any trainer: metrics, console logs, TensorBoard events, CSV.
    On a terminal there is a live screen, in a pipe one line per alarm. Ends with Ctrl-C, or when the run says that it
    has finished; the exit status is 1 while an alarm stands, else 0.
    """
    from diag.artefacts import ReadOptions
    from diag.errors import UsageError
    from diag.watch.hooks import Hooks, checked_url, command_of
    from diag.watch.live import Watch
    from diag.watch.messages import unread_of
    from diag.watch.session import JsonLines, Lines, Screen, View, run

    if once and (forever or wait):
        raise UsageError("--once ends at once: it goes with neither --forever nor --wait")
    told = [command_of(text) for text in commands], [checked_url(url) for url in urls]
    followed = Watch(paths, options=ReadOptions(signatures=signatures, columns=columns), wait=wait,
                     silence_seconds=silence)
    view: View
    if json_lines:
        view = JsonLines()
    elif sys.stdout.isatty():
        view = Screen(" ".join(paths), colour=colour())
    else:
        view = Lines()
    status = run(followed, view, Hooks(*told, complain=view.say), interval=interval, once=once, forever=forever)
    unread = followed.follower.unread() if once else {}
    if once and not followed.follower.tails:
        why = f" ({unread_of(unread)})" if unread else ""
        raise UsageError(f"{', '.join(paths[:5])}: nothing in it that can be watched{why}")
    if unread:
        view.say(f"not read: {unread_of(unread)}")
    elif once and followed.run is None and not followed.findings:
        view.say(f"{', '.join(paths[:5])}: no metrics, no progress and no known message in it")
    return status
