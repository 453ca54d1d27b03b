"""`pdtrain playbook`: symptom, locate, fix, verify: one page per failure."""

from __future__ import annotations

import json

import click

from diag.commands.output import colour, width


@click.group()
def playbook() -> None:
    """Symptom, locate, fix, verify: one page per failure."""


@playbook.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print ids, titles and causes as JSON.")
def list_pages(as_json: bool) -> int:
    """Every playbook with its title."""
    from diag.playbooks import playbooks
    from diag.report.playbook import listing

    pages = playbooks().values()
    if as_json:
        click.echo(json.dumps([{"id": p.id, "title": p.title, "causes": p.causes} for p in pages], indent=2))
    else:
        click.echo(listing(pages), nl=False)
    return 0


@playbook.command()
@click.argument("name", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print the playbook as JSON.")
def show(name: str, as_json: bool) -> int:
    """One playbook, by its id or by the name of a cause."""
    import msgspec

    from diag.playbooks import find
    from diag.report.playbook import show as render

    page = find(name)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(page), indent=2, ensure_ascii=False))
    else:
        click.echo(render(page, width=width(), colour=colour()), nl=False)
    return 0


@playbook.command()
def table() -> int:
    """The quick-reference table: symptom, first suspect, first command."""
    from diag.playbooks import playbooks
    from diag.report.playbook import table as render

    click.echo(render(playbooks().values(), width=width(), colour=colour()), nl=False)
    return 0
