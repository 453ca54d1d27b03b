"""What the outside sees: public names, options, documents, and what is (not) imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest

import diag
from diag import docs
from diag.artefacts import Artefact, readers
from diag.causes import CAUSES, EXPLAINS
from diag.commands import diag as diag_group
from diag.detectors import detectors
from diag.schema import Evidence, Finding, Input, Report, Where

ROOT = Path(__file__).parents[2]

#: Changing these changes what others build on: do it on purpose, and say so in the changelog.
NAMES = ["ArtefactError", "Evidence", "Finding", "Input", "MissingExtra", "PdtrainError", "Report", "UsageError",
         "Where", "to_json"]
OPTIONS = ["--force", "--help", "--html", "--json", "--md", "--output", "--signatures", "-f", "-o"]
FIELDS = {
    Report: ["verdict", "headline", "inputs", "findings", "not_checked", "schema"],
    Finding: ["cause", "summary", "severity", "role", "confidence", "where", "evidence", "explains", "playbook", "fix",
              "numbers"],
    Where: ["ranks", "hosts", "gpus", "module", "step", "group", "file", "line", "time"],
    Evidence: ["path", "text", "line", "offset", "time", "rank"],
    Input: ["path", "format", "bytes", "ranks", "lines", "problem", "readable"],
}


def test_public_names() -> None:
    assert sorted(diag.__all__) == sorted(NAMES)
    assert all(getattr(diag, name).__doc__ for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        diag.nothing  # noqa: B018


@pytest.mark.parametrize("noun", FIELDS, ids=lambda noun: noun.__name__)
def test_keys_of_the_contract(noun: type[msgspec.Struct]) -> None:
    assert list(noun.__struct_fields__) == FIELDS[noun]
    page = (ROOT / "docs" / "report.md").read_text()
    assert all(f"`{key}`" in page for key in FIELDS[noun])


@pytest.mark.parametrize("name", ["hang", "router", "steps", "postmortem"])
def test_report_commands_share_their_options(name: str) -> None:
    command = diag_group.get_command(click.Context(diag_group), name)
    assert command is not None and command.help
    found = sorted(o for p in command.params if isinstance(p, click.Option) for o in p.opts) + ["--help"]
    assert set(OPTIONS) <= set(found)


IMPORTS = """
import json, sys
sys.argv = ["pdtrain", *{arguments!r}]
from pdtrain.cli import main
try:
    main()
except SystemExit:
    pass
heavy = ("torch", "rich", "numpy", "yaml", "hyperscan")
print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)
"""


def imported(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", IMPORTS.format(arguments=list(arguments))], capture_output=True,
                          text=True, cwd=ROOT)
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--help"], ["diag", "--help"], ["diag", "router", "--help"], ["--version"],
                                       ["playbook", "--help"], ["diag", "hang", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert imported(*arguments) == []


def test_a_diagnosis_never_imports_torch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {s}, "router/1/counts": [99, 101, 100, 100]}}\n' for s in range(1, 99)))
    assert "torch" not in imported("diag", "router", str(path))


def test_the_doctor_imports_nothing_of_the_trainer() -> None:
    """Every module of diag, imported without pdtrain and torch being importable at all."""
    script = (
        "import sys, pkgutil, importlib\n"
        "sys.modules['torch'] = sys.modules['pdtrain'] = None\n"
        "import diag\n"
        "names = [m.name for m in pkgutil.walk_packages(diag.__path__, 'diag.')]\n"
        "assert len(names) > 20\n"
        "for name in names: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_generated_documents_are_up_to_date() -> None:
    for path, text in docs.pages(ROOT).items():
        assert path.read_text("utf-8") == text, f"{path.name} is out of date: run `make docs`"


def test_the_registries_are_complete() -> None:
    assert all(reader.NAME and reader.__doc__ and issubclass(reader.ARTEFACT, Artefact) for reader in readers())
    assert len({reader.NAME for reader in readers()}) == len(readers())
    for entry in detectors():
        assert entry.subject and entry.needs and entry.run.__doc__, entry.name
    assert {d.topic for d in detectors("router")} == {"router"}
    known = set(CAUSES)
    assert set(EXPLAINS) <= known and {link.cause for links in EXPLAINS.values() for link in links} <= known
