"""The root command: light help, one line per mistake, and no traceback for a user even when we fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdtrain import cli


@pytest.mark.parametrize("arguments", [["--help"], ["diag", "--help"], ["playbook", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom pdtrain.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'rich', 'numpy', 'hyperscan'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout


def test_a_misspelt_command_is_one_line_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["trian"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() == "pdtrain: pdtrain: no such command 'trian'; did you mean 'train'?"


LEAVES = """
import atexit, sys, pdtrain.cli
class Late:
    def __del__(self): print('unwound')
late = Late()
atexit.register(print, 'closed')
sys.argv = ['pdtrain', 'trian']
pdtrain.cli.main()
"""


def test_a_rank_that_failed_leaves_at_once() -> None:
    """The end of the interpreter would unwind threads that wait in Gloo for a peer, and abort."""
    rank = os.environ | {"RANK": "1"}
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, env=rank)
    assert done.returncode == 2 and "did you mean 'train'" in done.stderr
    assert done.stdout == "closed\n"


def test_an_internal_error_is_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("we did it")

    monkeypatch.setattr(cli.cli, "main", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("PDTRAIN_STRICT", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 70
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    report = next(tmp_path.glob("pdtrain-crash-*.txt"))
    assert str(report) in error and "we did it" in report.read_text()
