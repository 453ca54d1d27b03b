"""A playbook, their list and the quick-reference table, for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from diag.playbooks import Playbook, fill

if TYPE_CHECKING:
    from rich.console import Console

#: Prose wider than this is hard to read.
MAX_WIDTH = 100


def show(page: Playbook, *, width: int = 80, colour: bool = False) -> str:
    """One playbook: symptom, locate, fix, verify, drill, and the story behind."""
    from rich.markdown import Markdown
    from rich.padding import Padding
    from rich.text import Text

    console, stream = _console(min(width, MAX_WIDTH), colour)

    def section(name: str) -> None:
        console.print()
        console.print(Text(name, style="bold"))

    def item(lead: str, text: str, style: str = "", indent: int = 2) -> None:
        from rich.table import Table

        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(lead, style="dim"), Text(text, style=style))
        console.print(Padding(grid, (0, 0, 0, indent)))

    console.print(Text(page.title, style="bold"), Text(f"({page.id})", style="dim"))
    console.print(Text(f"causes: {', '.join(page.causes)}", style="dim"))
    section("Symptoms")
    for symptom in page.symptoms:
        item("-", symptom)
    section("First suspect")
    item("", page.suspect, indent=1)
    section("Locate")
    for number, step in enumerate(page.locate, 1):
        item(f"{number}.", step.words, "cyan" if step.command else "")
        item("healthy  ", step.healthy, indent=5)
        item("sick     ", step.sick, indent=5)
        if step.threshold:
            item("threshold", step.threshold, indent=5)
    section("Fix, in this order")
    for number, text in enumerate(page.fix, 1):
        item(f"{number}.", fill(text))
    section("Verify")
    for text in page.verify:
        item("-", text)
    section("Drill")
    item("", page.drill, indent=1)
    if page.prose:
        console.print()
        console.print(Markdown(page.prose, hyperlinks=False))
    return _text(stream)


def listing(pages: Iterable[Playbook], *, width: int = 80, colour: bool = False) -> str:
    """Id and title, one playbook a line."""
    rows = [(page.id, page.title) for page in pages]
    pad = max((len(name) for name, _ in rows), default=0)
    return "".join(f"{name:<{pad}}  {title}\n" for name, title in rows)


def table(pages: Iterable[Playbook], *, width: int = 80, colour: bool = False) -> str:
    """Symptom -> first suspect -> first command, one row per playbook."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console, stream = _console(width, colour)
    grid = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False, header_style="bold", expand=width <= 160)
    for name, ratio in (("symptom", 4), ("first suspect", 3), ("first command", 3), ("playbook", 2)):
        grid.add_column(name, ratio=None if name == "playbook" else ratio, overflow="fold", no_wrap=name == "playbook")
    for page in pages:
        grid.add_row(Text(page.symptoms[0]), Text(page.suspect), Text(page.locate[0].words, style="cyan"),
                     Text(page.id, style="dim"))
    console.print(grid)
    return _text(stream)


def _console(width: int, colour: bool) -> tuple[Console, io.StringIO]:
    from rich.console import Console

    stream = io.StringIO()
    return Console(file=stream, width=width, force_terminal=colour, no_color=not colour, highlight=False, markup=False,
                   emoji=False, color_system="standard" if colour else None, _environ={}), stream


def _text(stream: io.StringIO) -> str:
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
