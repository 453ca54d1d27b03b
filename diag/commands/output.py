"""The options and the last step that all report commands share: where a Report goes, in which form, and the status.

    @click.command()
    @click.argument("paths", nargs=-1, required=True)
    @report_options
    def router(paths: tuple[str, ...], output: Output) -> int:
        with output.progress() as progress:
            report = diagnose(paths, only="router", signatures=output.signatures, progress=progress)
        return output.emit(report)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from diag.artefacts import Progress
from diag.errors import PdtrainError, UsageError
from diag.schema import Report, to_json
from diag.whole_file import write_whole

#: Where output is neither a terminal nor COLUMNS is set; evidence lines are never wrapped there.
PIPED_WIDTH = 100

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the user asked for, and `emit`, which does it."""

    json: bool = False
    markdown: str | None = None
    html: str | None = None
    file: str | None = None
    force: bool = False
    signatures: Path | None = None

    def check(self) -> None:
        """Refuse before any work what could not be written after it. Raises `UsageError`."""
        targets = [t for t in (self.markdown, self.html, self.file) if t is not None and t != "-"]
        if len(set(targets)) < len(targets):
            raise UsageError("two outputs have the same file name")
        to_stdout = [self.markdown == "-", self.html == "-", self.json and self.file in (None, "-")]
        if sum(to_stdout) > 1:
            raise UsageError("only one of --json, --md - and --html - can go to standard output")
        for target in targets:
            path = Path(target)
            if path.is_dir():
                raise UsageError(f"{target}: is a directory; give a file name")
            if not path.absolute().parent.is_dir():
                raise UsageError(f"{target}: there is no directory {path.absolute().parent}")
            if path.is_file() and not self.force:
                raise UsageError(f"{target}: exists; choose another name, or overwrite it with --force")

    @contextmanager
    def progress(self) -> Iterator[Progress | None]:
        """A `progress(done, total)` in bytes that draws a bar on stderr, or None when stderr is no terminal."""
        if not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    def to_terminal(self) -> bool:
        """Whether standard output carries the report as text for people."""
        return not self.json and "-" not in (self.markdown, self.html) and self.file in (None, "-")

    def emit(self, report: Report, *, page: Callable[[Report], str] | None = None,
             more: dict[str, Any] | None = None) -> int:
        """Write `report` in every form asked for and return the exit status of the command.

        `page` makes the HTML instead of `diag.report.html`, for commands that have a picture to add; `more` are keys
        of the JSON beside the report's own.
        """
        if self.markdown is not None:
            from diag.report.markdown import render as render_markdown

            self._write(self.markdown, render_markdown(report))
        if self.html is not None:
            from diag.report.html import render as render_html

            self._write(self.html, (page or render_html)(report))
        if self.json:
            self._write(self.file or "-", to_json(report, more=more) + "\n")
        elif report.nothing_read():
            raise UsageError("; ".join(f"{i.path}: {i.problem}" for i in report.inputs[:5]))
        elif "-" not in (self.markdown, self.html):
            from diag.report.terminal import render

            if self.file not in (None, "-"):
                self._write(str(self.file), render(report, width=PIPED_WIDTH))
            else:
                self._write("-", render(report, width=width(), colour=colour(), wrap=sys.stdout.isatty()))
        return report.exit_status()

    def _write(self, target: str, text: str) -> None:
        if target == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            write_whole(Path(target), text.encode())
        except OSError as error:
            raise UsageError(f"{target}: cannot be written: {error.strerror or error}") from error


def report_options(command: _F) -> Callable[..., int]:
    """Add --json --md --html -o -f --signatures to a command, which gets them as one keyword `output: Output`.

    Under --json an error that ends the command still prints a Report (verdict "unknown") to stdout; the error itself
    goes on to `main`, which prints its line to stderr and decides the exit status.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (schema pdtrain.report/1).")
    @click.option("--md", "markdown", metavar="FILE", help="Also write the report as Markdown ('-': to stdout).")
    @click.option("--html", metavar="FILE", help="Also write the report as one self-contained HTML page.")
    @click.option("-o", "--output", "file", metavar="FILE", help="Write to FILE instead of standard output.")
    @click.option("-f", "--force", is_flag=True, help="Overwrite files that exist.")
    @click.option("--signatures", type=click.Path(path_type=Path, exists=True, file_okay=False),
                  metavar="DIR", help="Your own log signatures (*.yaml), used beside the built-in ones.")
    @wraps(command)
    def wrapper(*args: Any, as_json: bool, markdown: str | None, html: str | None, file: str | None, force: bool,
                signatures: Path | None, **kwargs: Any) -> int:
        output = Output(json=as_json, markdown=markdown, html=html, file=file, force=force, signatures=signatures)
        try:
            output.check()
            try:
                return int(command(*args, output=output, **kwargs))
            except PermissionError as error:
                raise UsageError(f"{error.filename or 'an input'}: {error.strerror or error}") from None
        except PdtrainError as error:
            if as_json:
                sys.stdout.write(to_json(Report(verdict="unknown", headline=str(error))) + "\n")
            raise

    return wrapper


def width() -> int:
    """Columns of standard output: the terminal's, COLUMNS, or `PIPED_WIDTH` in a pipe."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        import shutil

        return max(shutil.get_terminal_size((80, 24)).columns, 40)
    return PIPED_WIDTH


def colour() -> bool:
    """Whether standard output may carry colour: a terminal, unless NO_COLOR or TERM=dumb; FORCE_COLOR insists."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")
