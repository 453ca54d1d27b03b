"""The report as one self-contained HTML page: no script, no external resource, readable on a phone.

Every text goes through `esc`, and a content security policy forbids whatever might slip through all the same.
"""

from __future__ import annotations

import re
from html import escape

from diag.report import model, timeline
from diag.report.text import printable
from diag.schema import Evidence, Finding, Report

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#5d6873;--line:#d8dee4;--box:#f6f8fa;--failed:#c4232b;
--degraded:#9a6700;--healthy:#1a7f37;--unknown:#7d3fc1}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9199a3;--line:#30363d;--box:#161b22;
--failed:#ff7b72;--degraded:#e3b341;--healthy:#56d364;--unknown:#d2a8ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.35rem;line-height:1.3;margin:.2rem 0 1rem}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}
.verdict{display:inline-block;font-size:.8rem;font-weight:700;letter-spacing:.06em;padding:.15rem .6rem;
border-radius:1rem;border:2px solid;text-transform:uppercase}
.failed,.fatal,.error{color:var(--failed)}.degraded,.warning{color:var(--degraded)}.healthy{color:var(--healthy)}
.unknown{color:var(--unknown)}.dim,.info{color:var(--dim)}
dl{display:grid;grid-template-columns:minmax(5.5rem,max-content) 1fr;gap:.3rem 1rem;margin:0}
dt{color:var(--dim)}dd{margin:0;min-width:0}
code,pre{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
code{background:var(--box);padding:.1rem .3rem;border-radius:.3rem}
pre{background:var(--box);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem;margin:.2rem 0 .7rem;
white-space:pre-wrap}
.place{color:var(--dim);font-size:.85rem}
ol{padding-left:1.4rem}li{margin:.3rem 0}
.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.85rem;overflow-wrap:normal}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--dim);font-weight:600}td.n{text-align:right;font-variant-numeric:tabular-nums}
details,section.finding{border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem;margin:.6rem 0}
summary{cursor:pointer;font-weight:600}section.finding p{margin:.1rem 0 .4rem}
svg.timeline{display:block;width:100%;max-width:44rem;height:auto;font-size:13px}
svg text{fill:var(--dim)}svg text.guilty{fill:var(--failed);font-weight:700}svg line{stroke:var(--line)}
svg circle{fill:var(--dim)}svg circle.root{fill:var(--failed)}svg circle.symptom{fill:var(--degraded)}
""".strip()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: Report) -> str:
    """`report` as a complete HTML document."""
    root = model.leading(report)
    body = [f'<span class="verdict {report.verdict}">{report.verdict}</span>', f"<h1>{esc(report.headline)}</h1>"]
    if root is not None:
        body += _root(root)
    drawing = timeline.render(report)
    if drawing:
        body.append(f"<h2>Timeline</h2>\n<div class=scroll>{drawing}</div>")
    if root is not None:
        body += _explained(model.explained_by_root(report))
        body += _numbers(root, folded=True)
    rest = model.others(report)
    if rest:
        body.append(f"<h2>{'Also found' if root else 'Found'}</h2>")
        body += [_beside(finding) for finding in rest]
    body += _inputs(report)
    if report.not_checked:
        notes = "".join(f"<li>{esc(note)}</li>" for note in report.not_checked)
        count = len(report.not_checked)
        body.append(f"<h2>Not checked</h2>\n<ul>{notes}</ul>" if count <= model.MAX_NOTES else
                    f"<details><summary>Not checked: {count} notes</summary><ul>{notes}</ul></details>")
    content = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{esc(report.verdict)}: {esc(report.headline, 120)}</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def esc(text: str, limit: int | None = None) -> str:
    """`text` for HTML content and quoted attributes: control characters shown, markup escaped."""
    return escape(printable(text, limit), quote=True)


def _with_code(step: str) -> str:
    """A step of a playbook, in which `backticks` mark what is to be typed."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", esc(step))


def _root(root: Finding) -> list[str]:
    facts = []
    where = model.where_words(root.where)
    if where:
        facts.append(("where", f"<strong>{esc(' · '.join(where))}</strong>"))
    known = root.role == "root"
    if known:
        facts.append(("cause", f"<code>{esc(root.cause)}</code> "
                               f"<span class=dim>confidence {root.confidence:.2f}</span>"))
    if root.playbook:
        facts.append(("playbook", f"<code>pdtrain playbook show {esc(root.playbook)}</code>"))
    parts = ["<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts) + "</dl>"]
    if root.evidence:
        parts.append(f"<h2>{'Evidence' if known else 'Look at'}</h2>")
        parts += _evidence(root.evidence, 2 * model.MAX_EVIDENCE)
    if root.fix:
        steps = "".join(f"<li>{_with_code(step)}</li>" for step in root.fix)
        parts.append(f"<h2>Do this</h2>\n<ol>{steps}</ol>")
    return parts


def _explained(victims: list[Finding]) -> list[str]:
    if not victims:
        return []
    items = []
    for finding in victims:
        where = model.where_words(finding.where)
        known = f" <span class=dim>({esc(', '.join(where))})</span>" if where else ""
        slug = f"<code>{esc(finding.cause)}</code>{known} " if model.cause_prefix(finding) else ""
        items.append(f"<li>{slug}{esc(finding.summary)}</li>")
    plural = "s" if len(victims) > 1 else ""
    return [f"<details><summary>Explained by it: {len(victims)} finding{plural}</summary><ul>{''.join(items)}</ul>"
            "</details>"]


def _beside(finding: Finding) -> str:
    where = model.where_words(finding.where)
    known = f" <span class=dim>({esc(' · '.join(where))})</span>" if where and finding.severity != "info" else ""
    parts = [f'<p><strong class="{finding.severity}">{finding.severity}</strong> {esc(finding.summary)}{known}</p>']
    if finding.severity != "info":
        parts += _evidence(finding.evidence, 2)
    parts += _numbers(finding)
    return f"<section class=finding>{''.join(parts)}</section>"


def _evidence(items: list[Evidence], limit: int) -> list[str]:
    parts = []
    groups = model.alike(items)
    for item, *others in groups[:limit]:
        extra = "".join(f" · {esc(text)}" for text in (
            f"rank {item.rank}" if item.rank is not None else "", item.time or "") if text)
        place = esc(model.place(item.path, item.line, item.offset))
        parts.append(f"<div class=place>{place}{extra}</div><pre>{esc(item.text, 4000)}</pre>")
        if others:
            parts.append(f"<p class=dim>{esc(model.like_it(others))}</p>")
    more = sum(map(len, groups[limit:]))
    if more:
        parts.append(f"<p class=dim>{more} more in the JSON report.</p>")
    return parts


def _numbers(finding: Finding, *, folded: bool = False) -> list[str]:
    parts = []
    scalars = model.scalars(finding)
    if scalars:
        facts = "".join(f"<dt>{esc(name.replace('_', ' '))}</dt><dd>{esc(text)}</dd>" for name, text in scalars)
        numbers = f"<dl>{facts}</dl>"
        parts.append(f"<details><summary>Numbers</summary>{numbers}</details>" if folded else numbers)
    for name, columns, rows in model.tables(finding):
        head = "".join(f"<th>{esc(column.replace('_', ' '))}</th>" for column in columns)
        lines = ["".join(f"<td{' class=n' if model.numeric(cell) else ''}>{esc(cell)}</td>" for cell in row)
                 for row in rows[: 8 * model.MAX_ROWS]]
        table = f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
        more = len(rows) - 8 * model.MAX_ROWS
        note = f"<p class=dim>{more} more {esc(name)} in the JSON report.</p>" if more > 0 else ""
        parts.append(f"<div class=scroll>{table}</div>{note}")
    return parts


def _inputs(report: Report) -> list[str]:
    if not report.inputs:
        return []
    rows = "".join(
        f"<tr><td>{esc(item.path)}</td><td>{esc(item.format)}</td><td class=n>{model.size(item.bytes)}</td>"
        f"<td>{esc(model.rank_list(item.ranks))}</td><td>{esc(item.problem or '')}</td></tr>"
        for item in report.inputs[:500])
    more = f"<p class=dim>{len(report.inputs) - 500} more in the JSON report.</p>" if len(report.inputs) > 500 else ""
    return [f"<details><summary>Read: {esc(model.inputs_line(report))}</summary><div class=scroll><table>"
            f"<tr><th>path</th><th>format</th><th>size</th><th>ranks</th><th>problem</th></tr>{rows}</table></div>"
            f"{more}</details>"]
