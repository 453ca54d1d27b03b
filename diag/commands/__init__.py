"""The click commands of `pdtrain diag`: parse arguments, call the library, emit a report. No logic lives here."""

from __future__ import annotations

import click

from diag.lazy import LazyGroup

#: The lazy table; adding a command is one row here and one file beside it.
TABLE = {
    "postmortem": ("diag.commands.postmortem:postmortem", "Everything found in logs and dumps, root cause first."),
    "hang": ("diag.commands.hang:hang", "Name the ranks that the others wait for, from flight-recorder dumps."),
    "router": ("diag.commands.router:router", "Expert balance and router health of a run."),
}


@click.group(name="diag", cls=LazyGroup, table=TABLE)
def diag() -> None:
    """What broke first, where, and what to do: for this trainer's runs and for anyone's."""
