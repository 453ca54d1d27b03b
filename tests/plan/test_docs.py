"""docs/plan.md shows what the commands print: every `$ pdtrain plan ...` block is run and compared."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pdtrain.cli import cli

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def blocks() -> list[tuple[str, list[str]]]:
    """(command, its output) of every block that begins with a prompt."""
    found = []
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        lines = [line[4:] for line in block.strip("\n").split("\n")]
        if lines[0].startswith("$ "):
            command = lines.pop(0)[2:]
            while command.endswith("\\"):
                command = command[:-1] + lines.pop(0)
            found.append((command, lines))
    return found


BLOCKS = [pytest.param(command, shown, id=command[:40], marks=[pytest.mark.slow] if "sweep" in command else [])
          for command, shown in blocks()]  # fmt: skip


@pytest.mark.parametrize("command, shown", BLOCKS)
def test_the_page_shows_what_is_printed(command: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name, *words = shlex.split(command)
    assert name == "pdtrain"
    assert cli.main(words, standalone_mode=False) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip("\n").split("\n")]
    assert printed == shown


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3
