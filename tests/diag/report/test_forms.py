"""Every form shows the golden report as its snapshot says, and no text of an artefact acts on its reader.

After a deliberate change: PDTRAIN_UPDATE_GOLDEN=1 pytest tests/diag/report, then read the diff.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diag.report import html, markdown, model, terminal, timeline
from diag.report.text import printable
from diag.schema import Evidence, Finding, Report, Where, to_json
from tests.diag.report.golden import HOSTILE, report

SNAPSHOTS = Path(__file__).parent / "snapshots"
FORMS = {
    "report.80.txt": lambda r: terminal.render(r, width=80, wrap=True),
    "report.200.txt": lambda r: terminal.render(r, width=200, wrap=True),
    "report.piped.txt": lambda r: terminal.render(r, width=100),
    "report.colour.txt": lambda r: terminal.render(r, width=80, colour=True, wrap=True),
    "report.md": markdown.render,
    "report.html": html.render,
    "report.json": to_json,
}


@pytest.mark.parametrize("name", FORMS)
def test_golden(name: str) -> None:
    text = FORMS[name](report())
    path = SNAPSHOTS / name
    if os.environ.get("PDTRAIN_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} changed; see this module's docstring"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_terminal_lines_fit_the_width_and_say_the_same(width: int) -> None:
    text = terminal.render(report(), width=width, wrap=True)
    assert max(map(len, text.splitlines())) <= width
    for word in ("FAILED", "peer_exception", "rank 3", "stderr.log:1211", "do this", "not checked", "playbook show"):
        assert word.replace(" ", "") in "".join(text.split())
    assert "".join(text.split()).endswith("pdtrainplaybookshowpeer-exception")  # the last line is read first


def test_a_path_is_never_broken() -> None:
    path = "/scratch/" + "deep/" * 30 + "stderr.log"
    finding = Finding(cause="cuda_oom", role="root", severity="fatal", summary="x",
                      evidence=[Evidence(path=path, line=7, text="x")])
    assert f"{path}:7" in terminal.render(Report(verdict="failed", headline="x", findings=[finding]), wrap=True)


def test_colour_changes_no_word() -> None:
    coloured = terminal.render(report(), width=80, colour=True, wrap=True)
    assert "\x1b[" in coloured
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == terminal.render(report(), width=80, wrap=True).splitlines()


def test_piped_evidence_stays_on_one_line() -> None:
    long = Report(verdict="failed", headline="x", findings=[
        Finding(cause="cuda_oom", role="root", severity="fatal", summary="x",
                evidence=[Evidence(path="a.log", line=1, text="word " * 60)])])
    assert "word " * 59 in terminal.render(long, width=80)


@pytest.mark.parametrize("name", [name for name in FORMS if name.endswith("txt") and "colour" not in name])
def test_a_terminal_obeys_no_text_of_a_log(name: str) -> None:
    text = FORMS[name](report())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "[red]boom[/red]" in text and "[rank3]: FileNotFoundError" in text and r"\x1b[31mESC\x07" in text


class Tags(HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs


def everywhere(text: str) -> Report:
    """A report with `text` in every field that a file can fill."""
    where = Where(ranks=[1], hosts=[text], gpus=[text], module=text, group=text, file=text, line=1, time=text, step=1)
    evidence = [Evidence(path=text, line=1, text=text, time=text, rank=1)]
    numbers = {text: text, "rows": [{text: text, "n": 1}]}
    finding = Finding(cause=text, summary=text, severity="error", role="root", where=where, evidence=evidence,
                      playbook=text, fix=[text], numbers=numbers, explains=[1])
    victim = Finding(cause=text, summary=text, severity="error", role="victim", where=where, evidence=evidence)
    dated = Finding(cause=text, summary=text, severity="error", where=Where(ranks=[2], time="2024-05-01T00:00:00"))
    other = Finding(cause=text, summary=text, severity="error", where=Where(ranks=[3], time="2024-05-01T00:00:09"))
    base = report()
    base.inputs[0].path = base.inputs[0].format = base.inputs[0].problem = text
    return Report(verdict="failed", headline=text, inputs=base.inputs, findings=[finding, victim, dated, other],
                  not_checked=[text])


@pytest.mark.parametrize("text", [
    HOSTILE, '"><img src=x onerror=alert(1)>', "'><svg/onload=alert(1)>", "</style><script>", "]]><!--",
    "&lt;script&gt;", "javascript:alert(1)", "\x00\ud800"])
def test_html_holds_no_element_of_a_log(text: str) -> None:
    page = html.render(everywhere(text))
    tags = Tags()
    tags.feed(page)
    plain = Tags()
    plain.feed(html.render(everywhere("plain")))
    assert tags.names == plain.names
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in tags.attributes)
    assert "default-src 'none'" in page
    page.encode("utf-8")


def test_html_needs_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|@import|url\(|<script|<link|<iframe", html.render(report()))


def test_markdown_escapes_outside_of_code() -> None:
    text = markdown.render(everywhere("*a* [b](c) <i>d</i> `e` @team #1 |"))
    assert "<i>" not in re.sub(r"(`+).*?\1", "", text, flags=re.S)
    assert markdown.code("a `b` ``c``") == "```a `b` ``c`````" or markdown.code("a `b` ``c``").startswith("```")
    assert markdown.escape("1. x") == r"1\. x" and markdown.escape("snake_case 0.5") == "snake_case 0.5"


def test_printable_shows_controls_and_keeps_letters() -> None:
    assert printable("a\x1b[0mb\r\n\tc\u202ed") == r"a\x1b[0mb\x0d\x0a c\u202ed"
    assert printable("Größe 训练 ✓") == "Größe 训练 ✓"
    assert printable("x" * 10, 4) == "xxx…"


def test_json_keeps_the_contract() -> None:
    document = json.loads(to_json(report()))
    assert list(document) == ["schema", "verdict", "headline", "inputs", "findings", "not_checked"]
    assert document["schema"] == "pdtrain.report/1"
    promised = {"cause", "role", "severity", "confidence", "summary", "where", "evidence", "explains", "playbook",
                "fix", "numbers"}
    assert all(promised <= finding.keys() for finding in document["findings"])
    assert document["findings"][2]["where"] == {"ranks": [4, 5]}  # what is not known is absent
    assert document["findings"][0]["evidence"][1]["text"] == HOSTILE
    assert "problem" not in document["inputs"][0] and document["inputs"][8]["readable"] is False


def test_timeline_orders_ranks_in_time_or_steps_or_is_absent() -> None:
    drawing = timeline.render(report())
    assert drawing.index("rank 3") < drawing.index("rank 0")  # the guilty rank on top
    assert "2024-05-01 12:00:03" in drawing and "+10 min" in drawing
    findings = [Finding(cause="loss_spike", summary="x", severity="warning", where=Where(step=s)) for s in (10, 90)]
    stepped = timeline.render(Report(verdict="degraded", headline="x", findings=findings))
    assert "step 10" in stepped and "every rank" in stepped
    assert timeline.render(Report(verdict="degraded", headline="x", findings=findings[:1])) == ""


@pytest.mark.parametrize("ranks, words", [
    ([], ""), ([5], "5"), ([0, 1], "0, 1"), ([0, 1, 2, 4], "0-2, 4"),
    (list(range(0, 60, 2)), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, … (30 in all)")])
def test_rank_lists_fold(ranks: list[int], words: str) -> None:
    assert model.rank_list(ranks) == words


@pytest.mark.chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_sideways_scrolling(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    script = "<script>document.title = document.documentElement.scrollWidth</script>"
    page.write_text(html.render(everywhere("x" * 300)).replace("default-src 'none'", "script-src 'unsafe-inline'")
                    .replace("</body>", f"{script}</body>"), encoding="utf-8")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
         f"--window-size={width},844", "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60)
    title = re.search(r"<title>(\d+)</title>", done.stdout)
    assert title, done.stderr[-500:]
    assert int(title[1]) <= max(width, 500)  # headless Chromium has a least window width of 500


def timed_out(rank: int, line: int, size: int = 4160) -> Evidence:
    return Evidence(path="a.log", line=line, rank=rank,
                    text=f"[rank{rank}]: all_reduce of {size} timed out, ran for {60_000 + rank} milliseconds")


@pytest.mark.parametrize("form", [terminal.render, markdown.render, html.render])
def test_a_line_that_every_rank_prints_is_shown_once(form) -> None:
    root = Finding(cause="hang_all_waiting", role="root", severity="fatal", summary="x",
                   evidence=[timed_out(rank, 10 + rank) for rank in range(64)])
    text = form(Report(verdict="failed", headline="x", findings=[root]))
    assert text.count("of 4160 timed out") == 1
    assert ":11, :12" in text and "alike (ranks 1-63)" in text


def test_lines_that_differ_in_a_size_are_not_alike() -> None:
    groups = model.alike([timed_out(0, 1), timed_out(1, 2), timed_out(3, 4, size=4161)])
    assert [[e.rank for e in group] for group in groups] == [[0, 1], [3]]


def test_a_person_is_spared_the_bookkeeping_and_names_of_the_unknown() -> None:
    root = Finding(cause="cuda_oom", role="root", severity="fatal", summary="x", explains=[1],
                   numbers={"lines": 3, "signatures": ["cuda-oom"], "requested_bytes": 77})
    end = Finding(cause="unexplained_end", role="victim", severity="error", summary="a peer closed its connection")
    report = Report(verdict="failed", headline="x", findings=[root, end])
    for form in (terminal.render, markdown.render, html.render):
        text = form(report)
        assert "a peer closed its connection" in text and "77" in text
        assert "unexplained_end" not in text and "signatures" not in text
    assert "unexplained_end" in to_json(report) and "signatures" in to_json(report)


@pytest.mark.parametrize("group", ["1", "group 1"])
def test_a_group_is_called_a_group_once(group: str) -> None:
    assert model.where_words(Where(group=group)) == ["group 1"]


UNKNOWN = Finding(cause="unexplained_end", severity="error", summary="Nothing known explains the end.",
                  fix=["Collect the logs of every node."],
                  evidence=[Evidence(path="a.log", line=n, text=f"odd line {n}") for n in range(1, 9)])


@pytest.mark.parametrize("form", [terminal.render, markdown.render, html.render])
def test_an_unknown_verdict_shows_all_lines_to_look_at_and_says_its_sentence_once(form) -> None:
    text = form(Report(verdict="unknown", headline=UNKNOWN.summary, findings=[UNKNOWN]))
    body = re.sub(r"<title>.*?</title>", "", text)
    assert body.count("Nothing known explains the end.") == 1
    assert all(f"odd line {n}" in text for n in range(1, 9)) and "Collect the logs of every node." in text
    assert "unexplained_end" not in text


def test_many_reasons_why_nothing_was_checked_become_one_line() -> None:
    notes = ["hang: no dumps", "loss: no norms", "router: no values", "hang, router: no weights",
             "3 files not used: a, b, c"]
    few, many = (Report(verdict="healthy", headline="x", not_checked=notes[:n]) for n in (3, 5))
    assert model.not_checked(few) == notes[:3]
    first, second = model.not_checked(many)
    assert first.startswith("hang, loss, router: ") and "--json" in first and second == notes[-1]
    assert all(note in to_json(many) and note in markdown.render(many) for note in notes)


def test_of_one_topic_the_first_reasons_stand_there() -> None:
    notes = [f"comm: all_reduce {n} KiB and above: would exceed the time budget" for n in (1, 4, 16, 64, 256)]
    report = Report(verdict="healthy", headline="x", not_checked=notes)
    assert model.not_checked(report) == [*notes[:3], "and 2 more in --json"]



def test_the_timeline_does_not_accuse_witnesses() -> None:
    """The lines of waiting ranks prove that another never came."""
    def seen(rank: int, second: int) -> Evidence:
        return Evidence(path=f"fr_{rank}", text="x", rank=rank, time=f"2024-05-01T12:00:0{second}")

    root = Finding(cause="collective_missing_rank", role="root", severity="fatal", summary="x",
                   where=Where(ranks=[3]), evidence=[seen(3, 1), seen(0, 2), seen(1, 2)])
    drawing = timeline.render(Report(verdict="failed", headline="x", findings=[root]))
    assert re.findall(r"class=guilty>rank (\d)", drawing) == ["3"]
    assert drawing.count('class="root"') == 1 and drawing.count('class="symptom"') == 2


def test_what_is_to_be_typed_is_code_and_still_escaped() -> None:
    root = Finding(cause="host_oom", role="root", severity="fatal", summary="x",
                   fix=["run `py-spy dump <pid>` on <host>"])
    page = html.render(Report(verdict="failed", headline="x", findings=[root]))
    assert "<code>py-spy dump &lt;pid&gt;</code> on &lt;host&gt;" in page
