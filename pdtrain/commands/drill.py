"""`pdtrain drill`: break things on purpose, on copies."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from diag.lazy import LazyGroup

TABLE = {"corrupt": ("pdtrain.commands.drill:corrupt", "Put one defect into a copy of a checkpoint.")}


@click.group(cls=LazyGroup, table=TABLE)
def drill() -> None:
    """Break things on purpose, to see that the doctor names what was broken."""


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--kind", "name", metavar="KIND", help="The defect; without it, all are listed.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the damaged copy goes; default: beside PATH.")
def corrupt(path: Path, name: str | None, out: Path | None) -> int:
    """Copy the checkpoint at PATH and put one defect into the copy; PATH itself is not touched.

    Prints the copy's path, and what `pdtrain diag ckpt verify --deep` should say about it.
    """
    from pdtrain.drill import content, layout  # noqa: F401 - they register their kinds
    from pdtrain.drill import corrupt as drills

    if name is None:
        rows = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, 120))
        rows.write_dl([(kind, (function.__doc__ or "").strip()) for kind, function in sorted(drills.KINDS.items())])
        click.echo(rows.getvalue(), nl=False)
        return 0
    where, damage = drills.corrupt(path, name, out)
    click.echo(str(where))
    hit = ", ".join(part for part in (damage.file, damage.tensor) if part)
    click.echo(f"{name}: {hit or 'the metadata'}; now: pdtrain diag ckpt verify --deep {where}", err=True)
    return 0
