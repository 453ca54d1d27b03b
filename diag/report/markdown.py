"""The report as GitHub-flavoured Markdown, for an issue or a hand-over note.

Texts of artefacts are shown in code fences longer than any run of backticks in them, or escaped, so that nothing of
a log is read as markup, a link, a mention or HTML.
"""

from __future__ import annotations

import re

from diag.report import model
from diag.report.text import printable
from diag.schema import Evidence, Finding, Report

#: What Markdown acts on anywhere in a line (an underscore inside a word is literal), and at its start.
_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
_START = re.compile(r"^(\d+)([.)])(?=\s|$)|^([#+=-])")


def render(report: Report) -> str:
    """`report` as one Markdown document."""
    parts = [f"# {report.verdict.upper()}: {escape(report.headline)}"]
    root = model.leading(report)
    if root is not None:
        parts += _root(root)
        parts += _explained(model.explained_by_root(report))
    rest = model.others(report)
    if rest:
        parts.append("## Also found" if root else "## Found")
        parts += [block for finding in rest for block in _beside(finding)]
    parts += _inputs(report)
    if report.not_checked:
        parts.append("## Not checked")
        parts.append("\n".join(f"- {escape(note)}" for note in report.not_checked))
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """`text` on one line, with every character that Markdown or HTML could act on escaped."""
    text = _SPECIAL.sub(r"\\\g<0>", printable(text))
    text = _START.sub(lambda match: f"{match[1]}\\{match[2]}" if match[1] else f"\\{match[3]}", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    text = re.sub(r"^>", "&gt;", text)
    return re.sub(r"@(?=\w)", "@<!-- -->", text)  # no mention, and nothing to be seen


def code(text: str) -> str:
    """`text` as an inline code span that no backtick inside it can close."""
    shown = printable(text)
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def _root(root: Finding) -> list[str]:
    facts = [f"- **Cause:** {code(root.cause)}, confidence {root.confidence:.2f}"] if root.role == "root" else []
    where = model.where_words(root.where)
    if where:
        facts.insert(0, f"- **Where:** {escape(' · '.join(where))}")
    if root.playbook:
        facts.append(f"- **Playbook:** {code(f'pdtrain playbook show {root.playbook}')}")
    parts = ["\n".join(facts)] if facts else []
    parts += _evidence(root.evidence)
    if root.fix:
        parts.append("## Do this")
        parts.append("\n".join(f"{number}. {escape(step)}" for number, step in enumerate(root.fix, 1)))
    return parts + _numbers(root)


def _explained(victims: list[Finding]) -> list[str]:
    if not victims:
        return []
    lines = []
    for finding in victims:
        where = model.where_words(finding.where)
        known = f" ({escape(', '.join(where))})" if where else ""
        slug = f"{code(finding.cause)}{known}: " if model.cause_prefix(finding) else ""
        lines.append(f"- {slug}{escape(finding.summary)}")
    folded = "\n".join(lines)
    return [f"<details><summary>Explained by it: {len(victims)} finding{'s' if len(victims) > 1 else ''}</summary>",
            folded, "</details>"]


def _beside(finding: Finding) -> list[str]:
    where = model.where_words(finding.where)
    known = f" ({escape(' · '.join(where))})" if where and finding.severity != "info" else ""
    parts = [f"**{finding.severity}** {code(finding.cause)}: {escape(finding.summary)}{known}"]
    if finding.severity != "info":
        parts += _evidence(finding.evidence[:2])
    return parts + _numbers(finding)


def _evidence(items: list[Evidence]) -> list[str]:
    if not items:
        return []
    lines = []
    for first, *others in model.alike(items)[: 2 * model.MAX_EVIDENCE]:
        lines.append(f"{printable(model.place(first.path, first.line, first.offset))}: {printable(first.text)}")
        if others:
            lines.append(f"    {printable(model.like_it(others))}")
    body = "\n".join(lines)
    fence = "`" * max(3, max((len(run) for run in re.findall(r"`+", body)), default=0) + 1)
    return [f"{fence}text\n{body}\n{fence}"]


def _numbers(finding: Finding) -> list[str]:
    parts = []
    scalars = model.scalars(finding)
    if scalars:
        parts.append("\n".join(f"- {escape(name.replace('_', ' '))}: {escape(text)}" for name, text in scalars))
    for name, columns, rows in model.tables(finding):
        lines = ["| " + " | ".join(escape(column.replace("_", " ")) for column in columns) + " |",
                 "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows[: 4 * model.MAX_ROWS]]
        parts.append("\n".join(lines))
        if len(rows) > 4 * model.MAX_ROWS:
            parts.append(f"{len(rows) - 4 * model.MAX_ROWS} more {escape(name)} in the JSON report.")
    return parts


def _inputs(report: Report) -> list[str]:
    if not report.inputs:
        return []
    parts = ["## Read", escape(model.inputs_line(report))]
    broken = [item for item in report.inputs if item.problem]
    if broken:
        parts.append("\n".join(f"- {code(item.path)}: {escape(item.problem or '')}" for item in broken))
    return parts
