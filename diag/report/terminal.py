"""The report for a terminal: headline, where, evidence, victims folded, what to do, what was not checked.

The last lines are read first, so the next command stands there. Nothing of an artefact is ever markup: every text
goes through `printable` into a rich `Text`, and highlighting is off.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from diag.report import model
from diag.report.text import printable
from diag.schema import Evidence, Finding, Report

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

LABEL = 11
#: Prose is not wider than this, however wide the terminal; tables and evidence lines are.
PROSE_WIDTH = 120
#: Characters of one evidence line; a traceback's last line and an NCCL line fit, a dumped tensor does not.
EVIDENCE_CHARS = 400
EVIDENCE_LINES = 3
STYLES = {"failed": "bold red", "degraded": "bold yellow", "healthy": "bold green", "unknown": "bold magenta"}
SEVERITIES = {"fatal": "bold red", "error": "red", "warning": "yellow", "info": "dim"}


def render(report: Report, *, width: int = 80, colour: bool = False, wrap: bool = False) -> str:
    """`report` as text for `width` columns, without escape codes unless `colour`.

    With `wrap` evidence lines are folded to the width (a terminal); without, one evidence line stays one line (a pipe).
    """
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=colour, no_color=not colour, highlight=False,
                      markup=False, emoji=False, color_system="standard" if colour else None, legacy_windows=False,
                      _environ={})
    _Page(console, wrap=wrap).write(report)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


class _Page:
    """One rendering: a console and the helpers that print labelled, hanging paragraphs on it."""

    def __init__(self, console: Console, *, wrap: bool) -> None:
        self.console, self.wrap = console, wrap

    def write(self, report: Report) -> None:
        self.paragraph(report.verdict.upper(), report.headline, STYLES[report.verdict], "bold")
        root = model.leading(report)
        if root is not None:
            self.gap()
            self.details(root, known=root.role == "root")
            self.folded(model.explained_by_root(report))
            self.advice(root)
            self.numbers(root)
        rest = model.others(report)
        for finding in rest[: 2 * model.MAX_FOLDED]:
            self.gap()
            self.beside(finding)
        if len(rest) > 2 * model.MAX_FOLDED:
            self.field("", f"{len(rest) - 2 * model.MAX_FOLDED} more findings in --json")
        self.gap()
        self.closing(report, root)

    def details(self, finding: Finding, *, known: bool) -> None:
        """Where, cause and evidence of the finding that leads; the lines to look at when the cause is not known."""
        where = model.where_words(finding.where)
        if where:
            self.field("where", " · ".join(where), "bold")
        if known:
            self.field("cause", f"{finding.cause}  (confidence {finding.confidence:.2f})")
        self.evidence(finding.evidence, "evidence" if known else "look at", 1 if known else 2)

    def evidence(self, items: list[Evidence], label: str, factor: int) -> None:
        """Place and text of each item; further lines of the same file as `:line  text`, lines alike as one."""
        path = None
        groups = model.alike(items)
        for index, (item, *others) in enumerate(groups[: factor * model.MAX_EVIDENCE]):
            if item.path == path and item.line is not None:
                self.line(f":{item.line}  {item.text}")
            else:
                path = item.path
                place = printable(model.place(item.path, item.line, item.offset))
                self.place(label if not index else "", place, item.rank)
                self.line(item.text)
            if others:
                self.line(model.like_it(others), "dim")
        more = sum(map(len, groups[factor * model.MAX_EVIDENCE :]))
        if more:
            self.field("", f"{more} more line{'s' if more > 1 else ''} in --json", "dim")

    def numbers(self, finding: Finding) -> None:
        scalars = model.scalars(finding)
        if scalars:
            self.gap()
            self.field("numbers", " · ".join(f"{_head(name)} {text}" for name, text in scalars))
        for name, columns, rows in model.tables(finding):
            self.table(name, columns, rows)

    def folded(self, victims: list[Finding]) -> None:
        """One line per cause: what the root accounts for."""
        groups: dict[str, list[Finding]] = {}
        for finding in victims:
            groups.setdefault(finding.cause, []).append(finding)
        for index, members in enumerate(groups.values()):
            if index == model.MAX_FOLDED:
                self.field("", f"{len(groups) - index} more kinds in --json", "dim")
                break
            ranks = sorted({rank for member in members for rank in member.where.ranks})
            who = f" (rank{'s' if len(ranks) > 1 else ''} {model.rank_list(ranks)})" if ranks else ""
            times = f" ×{len(members)}" if len(members) > 1 else ""
            slug = model.cause_prefix(members[0])
            lead = f"{slug}{times}{who}: " if slug else ""
            self.field("explains" if not index else "", f"{lead}{members[0].summary}", "dim")

    def advice(self, finding: Finding) -> None:
        if finding.fix:
            self.gap()
        for number, step in enumerate(finding.fix, 1):
            self.field("do this" if number == 1 else "", f"{number}. {step}", hang=3)

    def beside(self, finding: Finding) -> None:
        """A finding that is neither root nor folded: what, where, first evidence, numbers."""
        style = SEVERITIES[finding.severity]
        where = model.where_words(finding.where)
        known = f"  ({' · '.join(where)})" if where and finding.severity != "info" else ""
        self.field(finding.severity, f"{finding.summary}{known}", label_style=style)
        if finding.severity != "info" or finding.cause != "healthy":
            for item in finding.evidence[:2]:
                place = printable(model.place(item.path, item.line, item.offset))
                self.line(f"{place}  {item.text}", "dim")
        for name, columns, rows in model.tables(finding):
            self.table(name, columns, rows)

    def closing(self, report: Report, root: Finding | None) -> None:
        if report.inputs:
            self.field("read", model.inputs_line(report), "dim")
        for index, note in enumerate(model.not_checked(report)):
            self.field("not checked" if not index else "", note, "dim")
        playbook = root.playbook if root else next((f.playbook for f in report.findings if f.severity != "info"), None)
        if playbook:
            self.field("playbook", f"pdtrain playbook show {playbook}", "bold")

    # Layout -----------------------------------------------------------------------------------------------------

    def gap(self) -> None:
        self.console.print()

    def paragraph(self, label: str, text: str, label_style: str, style: str) -> None:
        from rich.text import Text

        self._hanging(Text(label, style=label_style), Text(printable(text), style=style), len(label) + 2, 0)

    def field(self, label: str, text: str, style: str = "", *, label_style: str = "dim", hang: int = 0) -> None:
        from rich.text import Text

        body = printable(text)
        self._hanging(Text(label, style=label_style), Text(body, style=style), LABEL + 2, hang)

    def place(self, label: str, place: str, rank: int | None) -> None:
        """A path with its line, never broken: it is there to be copied."""
        from rich.text import Text

        extra = f"  rank {rank}" if rank is not None else ""
        text = Text.assemble((f"{label:<{LABEL + 2}}", "dim"), (place, "cyan"), (extra, "dim"))
        self.console.print(text, soft_wrap=True)

    def line(self, text: str, style: str = "") -> None:
        """An evidence line, indented under its place."""
        from rich.padding import Padding
        from rich.text import Text

        room = max(self.console.width - LABEL - 4, 20)
        limit = min(EVIDENCE_CHARS, EVIDENCE_LINES * room) if self.wrap else EVIDENCE_CHARS
        body = Text(printable(text, limit), style=style, overflow="fold")
        if self.wrap:
            self.console.print(Padding(body, (0, 0, 0, LABEL + 4)))
        else:
            self.console.print(Text(" " * (LABEL + 4)) + body, soft_wrap=True)

    def _hanging(self, label: Text, body: Text, indent: int, hang: int) -> None:
        """`label`, then `body` wrapped in the column beside it, continuation lines hung by `hang`."""
        body.overflow = "fold"
        room = max(min(self.console.width, PROSE_WIDTH) - indent, 20)
        lines = body.wrap(self.console, room)
        if hang and len(lines) > 1:
            rest = body[len(lines[0]) :]
            rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
            lines = [lines[0], *rest.wrap(self.console, room - hang)]  # type: ignore[assignment,list-item]
        for index, part in enumerate(lines):
            part.rstrip()
            lead = label.copy() if not index else label.blank_copy()
            lead.pad_right(indent - lead.cell_len if not index else indent + hang)
            self.console.print(lead + part, soft_wrap=True)

    def table(self, name: str, columns: list[str], rows: list[list[str]]) -> None:
        """A compact table; columns that do not fit are left to --json, and so are rows beyond the limit."""
        from rich import box
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        shown = [[printable(cell, 80) for cell in row] for row in rows[: model.MAX_ROWS]]
        keep: list[int] = []
        widths: dict[int, int] = {}
        room = self.console.width - 2
        for index, column in enumerate(columns):
            cells = max(len(row[index]) for row in shown)
            wordy = any(" " in row[index] for row in shown)
            widths[index] = max(*map(len, _head(column).split()), min(cells, 24) if wordy else cells)
            room -= widths[index] + (3 if keep else 0)
            if room < 0:
                break
            keep.append(index)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
        for index in keep:
            numeric = all(model.numeric(row[index]) for row in shown)
            wordy = any(" " in row[index] for row in shown)
            table.add_column(Text(_head(columns[index])), justify="right" if numeric else "left", overflow="fold",
                             width=None if wordy else widths[index], min_width=widths[index])
        for row in shown:
            table.add_row(*(Text(row[index]) for index in keep))
        self.gap()
        body: RenderableType = Padding(table, (0, 0, 0, 2))
        self.console.print(body)
        left = [_head(columns[i]) for i in range(len(columns)) if i not in keep]
        if len(rows) > model.MAX_ROWS:
            left.insert(0, f"{len(rows) - model.MAX_ROWS} more {name}")
        if left:
            self._hanging(Text("  "), Text(f"in --json also: {', '.join(left)}", style="dim"), 2, 0)


def _head(column: str) -> str:
    return column.replace("_", " ")
