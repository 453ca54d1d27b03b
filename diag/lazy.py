"""A click group whose subcommands are imported only when they run, so that `--help` stays fast and light."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

#: command name -> ("module:attribute", one-line summary shown in help)
Table = Mapping[str, tuple[str, str]]


class LazyGroup(click.Group):
    """A group described by a table. Help is printed from the table's summaries: no subcommand module is imported."""

    def __init__(self, *args: Any, table: Table, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, attribute = self.table[cmd_name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest legal name offered for a misspelt one."""
        if args and not args[0].startswith("-") and args[0] not in self.table:
            import difflib

            near = difflib.get_close_matches(args[0], self.table, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"one of: {', '.join(self.table)}"
            ctx.fail(f"no such command '{args[0]}'; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])
