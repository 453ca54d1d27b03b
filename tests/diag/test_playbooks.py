"""Every cause has exactly one playbook, every playbook is whole, and every command line in one can be typed."""

from __future__ import annotations

import re
import shlex
from collections import Counter

import click
import pytest

from diag.causes import CAUSES
from diag.errors import UsageError
from diag.playbooks import Playbook, fill, find, for_cause, parse, playbooks
from diag.schema import Where
from pdtrain.cli import cli
from tests.diag.helpers import pdtrain

PAGES = playbooks()
#: Programs that a locate step may call, and what provides them. Anything else is probably a slip.
PROGRAMS = {"pdtrain", "grep", "nvidia-smi", "dmesg", "py-spy", "ls", "df", "du", "ss", "ip", "nc", "getent", "ibstat",
            "perfquery", "sudo", "find", "head", "python", "ps", "pgrep", "env", "cat", "systemctl", "sacct", "sinfo",
            "stat", "quota", "iostat", "ldconfig", "coredumpctl", "pip", "compute-sanitizer", "CUDA_LAUNCH_BLOCKING=1"}


def test_every_cause_has_exactly_one_playbook() -> None:
    claims = Counter(cause for page in PAGES.values() for cause in page.causes)
    assert {cause: claims[cause] for cause in CAUSES if claims[cause] != 1} == {}
    assert set(claims) <= set(CAUSES)
    assert all(cause in for_cause(cause).causes for cause in CAUSES)  # the quick look-up agrees with the YAML
    assert len(PAGES) >= 30


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.id)
def test_a_playbook_is_whole(page: Playbook) -> None:
    assert re.fullmatch(r"[a-z0-9-]{3,30}", page.id) and page.title[0].isupper() and not page.title.endswith(".")
    assert len(page.prose) > 80 and page.suspect and page.drill
    for step in page.locate:
        assert step.healthy and step.sick
        if step.command:
            assert shlex.split(step.command)[0] in PROGRAMS
    for text in (*page.fix, *page.verify):
        assert len(text) > 5 and not re.search(r"\{(?!ranks|hosts|gpus|step|module|group|file)", text)


def lines() -> list[str]:
    """Every `pdtrain ...` in any field or in the prose of any playbook."""
    found = set()
    for page in PAGES.values():
        found |= {step.command for step in page.locate if step.command and step.command.startswith("pdtrain ")}
        for text in (page.drill, page.prose, *page.fix, *page.verify):
            found |= {match[0].strip(" .`") for match in re.finditer(r"\bpdtrain [a-z][^,;`\n]*", text)}
    return sorted(found)


@pytest.mark.parametrize("line", lines())
def test_every_pdtrain_line_parses(line: str) -> None:
    if line.startswith("pdtrain train "):  # the keys must exist as well; FILE stands for any file
        done = pdtrain(*shlex.split(line.replace("EMPTY_FILE", "x.txt").replace("FILE", "x.txt"))[1:], "--print-config")
        assert done.status == 0, done.err
    command, arguments, context = cli, shlex.split(line)[1:], None
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context, info_name=command.name, **command.context_settings)
        name, resolved, arguments = command.resolve_command(context, arguments)
        assert resolved is not None and name is not None
        command = resolved
    command.make_context(command.name, list(arguments), parent=context)


@pytest.mark.parametrize("slug", [c for c in CAUSES if any(c in text for text in ("moe_router_collapse", "gpu_ecc"))])
def test_show_by_id_and_by_cause(slug: str) -> None:
    by_cause, by_id = pdtrain("playbook", "show", slug), pdtrain("playbook", "show", for_cause(slug).id)
    assert by_cause.status == 0 and by_cause.out == by_id.out
    order = [by_cause.out.index(word) for word in ("Symptoms", "First suspect", "Locate", "Fix", "Verify", "Drill")]
    assert order == sorted(order) and "{hosts}" not in by_cause.out


@pytest.mark.parametrize("width", [80, 200])
def test_list_and_table_show_every_page_within_the_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    listing, table = pdtrain("playbook", "list").out, pdtrain("playbook", "table").out
    assert [line.split()[0] for line in listing.splitlines()] == list(PAGES)
    assert all(f" {name}" in table for name in PAGES) and max(map(len, table.splitlines())) <= width
    assert max(len(line) for name in PAGES for line in pdtrain("playbook", "show", name).out.splitlines()) <= width


def test_json_forms() -> None:
    import json

    pages = json.loads(pdtrain("playbook", "list", "--json").out)
    assert [page["id"] for page in pages] == list(PAGES)
    assert json.loads(pdtrain("playbook", "show", "host_oom", "--json").out)["id"] == "host-oom"


def test_a_misspelt_name_offers_the_nearest() -> None:
    done = pdtrain("playbook", "show", "router-colapse")
    assert done.status == 2 and "router-collapse" in done.err
    with pytest.raises(UsageError, match="pdtrain playbook list"):
        find("zzzzzz")


def test_placeholders_are_filled_or_said_in_general() -> None:
    assert fill("Drain {hosts} now", Where(hosts=["n1", "n2"])) == "Drain n1, n2 now"
    assert fill("Drain {hosts}; rank {ranks}, {step}") == "Drain the host; rank the rank, the onset step"
    assert fill("{step}", Where(step=0)) == "0"


WHOLE = """---
id: x-y
title: X
causes: [loss_nan]
symptoms: [a]
suspect: b
locate: [{command: ls, healthy: a, sick: b}]
fix: [a]
verify: [a]
drill: a
---
Prose.
"""


@pytest.mark.parametrize("old, new, words", [
    ("suspect: b", "suspects: b", "suspects"), ("fix: [a]", "fix: []", "fix"),
    ("id: x-y", "id: other", "id is 'other'"),
    ("command: ls, ", "", "a command or a look"), ("command: ls", "command: ls, look: b", "a command or a look"),
    ("fix: [a]", "fix: [a: b]", "fix"), ("causes: [loss_nan]", "causes: [loss_nan", "expected"),
])
def test_a_malformed_page_names_file_and_key(old: str, new: str, words: str) -> None:
    assert parse("x-y.md", WHOLE).prose == "Prose."
    with pytest.raises(ValueError, match=r"playbooks/x-y\.md") as error:
        parse("x-y.md", WHOLE.replace(old, new))
    assert words in str(error.value)
