"""`python -m diag.docs`: write what documentation repeats from the code. A test compares; `make docs` runs it.

docs/causes.md whole; in docs/diag.md the blocks between `<!-- help: COMMAND -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from diag.causes import CAUSES, EXPLAINS
from diag.playbooks import for_cause

_WORDS = {
    "failed": "a run that ends of it",
    "degraded": "a run that goes on, worse",
    "unknown": "no verdict: something is wrong and nothing known explains it",
    "healthy": "nothing to report",
    "context": "never leads a report; says something about the inputs",
}
_HELP = re.compile(r"(<!-- help: ([a-z ]+) -->\n).*?(<!-- end -->)", re.S)


def causes_page() -> str:
    """docs/causes.md: the taxonomy by verdict, with playbooks, and the graph."""
    lines = ["# Causes", "", "<!-- Written by `make docs` from diag/causes.py; edit there. -->", "",
             "The value of a finding's `cause` in `pdtrain.report/1`. A slug names the fault, not what was observed,",
             "and keeps its meaning. `pdtrain playbook show CAUSE` prints what to do.", ""]
    for verdict, words in _WORDS.items():
        rows = [cause for cause in CAUSES.values() if cause.verdict == verdict]
        if not rows:
            continue
        lines += [f"## {verdict}: {words}", "", "| cause | meaning | explains | playbook |", "|---|---|---|---|"]
        for cause in rows:
            page = for_cause(cause.slug)
            links = ", ".join(f"`{name}`" for name in sorted({link.cause for link in EXPLAINS.get(cause.slug, ())}))
            meaning = cause.meaning.replace("|", "\\|")
            lines.append(f"| `{cause.slug}` | {meaning} | {links} | {page.id if page else ''} |")
        lines.append("")
    lines += ["## What explains what", "",
              "A finding explains another when its cause names the other's in the column above, it is not later, and",
              "both share what the link asks for (the rank, the host, the group or the job). Unknown never equals",
              "unknown. The root of a report is what nothing else explains.", ""]
    return "\n".join(lines)


def with_help(text: str) -> str:
    """`text` with every help block filled from the command line itself."""
    return _HELP.sub(lambda match: f"{match[1]}\n{_help(match[2])}\n{match[3]}", text)


def _help(command: str) -> str:
    import click

    from diag.commands import diag
    from diag.commands.playbook import playbook

    first, *rest = command.split()
    current: click.Command = {"diag": diag, "playbook": playbook}[first]
    settings: dict[str, Any] = {"terminal_width": 80, "max_content_width": 80, "help_option_names": ["-h", "--help"]}
    context = click.Context(current, info_name=f"pdtrain {first}", **settings)
    for name in rest:
        found = current.get_command(context, name) if isinstance(current, click.Group) else None
        if found is None:
            raise ValueError(f"{command}: no such command")
        current = found
        context = click.Context(found, parent=context, info_name=name, **settings)
    return "\n".join(f"    {line}".rstrip() for line in current.get_help(context).splitlines()) + "\n"


def pages(root: Path) -> dict[Path, str]:
    """Every page this module writes, with the text that it should have."""
    diag = root / "docs" / "diag.md"
    return {root / "docs" / "causes.md": causes_page(), diag: with_help(diag.read_text("utf-8"))}


def main(root: Path | None = None) -> None:
    """Write the pages that differ."""
    for path, text in pages(root or Path.cwd()).items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
