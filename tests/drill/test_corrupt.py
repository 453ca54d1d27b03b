"""`pdtrain drill corrupt`: the original stays as it was, a copy is there whole or not at all. (What the doctor says
of each kind is tests/diag/checkpoints/test_defects.py.)"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diag.errors import UsageError
from pdtrain.cli import main
from pdtrain.drill import corrupt as drills
from tests.diag.checkpoints import sound


def drill(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["drill", "corrupt", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_copy_is_damaged_and_the_original_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound.make("sharded", tmp_path / "model")
    before = contents(path)
    status, out, err = drill(capsys, path, "--kind", "cut-tail")
    copy = Path(out.strip())
    assert (status, copy) == (0, tmp_path / "model.corrupt-cut-tail")
    assert contents(path) == before
    hit = [name for name, data in contents(copy).items() if before[name] != data]
    assert len(hit) == 1 and hit[0] in err and "verify --deep" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.corrupt-cut-tail"]


def test_without_a_kind_all_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = drill(capsys, tmp_path)
    assert status == 0 and all(len(line) <= 120 for line in out.splitlines())
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")] == sorted(drills.KINDS)


@pytest.mark.parametrize("arguments, complaint", [
    (["model", "--kind", "rust"], "choose one of"),
    (["nowhere", "--kind", "nan"], "no such file"),
    (["model/model-00001-of-00003.safetensors", "--kind", "nan"], "name the checkpoint's folder"),
    (["model", "--kind", "nan", "--out", "model"], "exists; choose another"),
    (["model", "--kind", "nan", "--out", "model/inside"], "lies inside what is copied"),
    (["model", "--kind", "missing-loader"], "cannot have this defect"),
    (["model", "--kind", "nan", "--out", "/proc/copy"], "/proc/copy: cannot be written"),
    (["empty", "--kind", "nan"], "no checkpoint that is known here"),
])
def test_a_refusal_leaves_nothing(arguments: list[str], complaint: str, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sound.make("sharded", tmp_path / "model")
    Path("empty").mkdir()
    status, out, err = drill(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1) and complaint in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "model"]
    assert not (tmp_path / "model" / "inside").exists()


def test_a_write_protected_checkpoint_can_be_drilled(tmp_path: Path) -> None:
    path = sound.make("sharded", tmp_path / "model")
    for place in (*path.iterdir(), path):
        place.chmod(0o555 if place.is_dir() else 0o444)
    try:
        copy, damage = drills.corrupt(path, "flip-payload")
    finally:
        path.chmod(0o755)
    assert (copy.stat().st_mode & 0o700, (copy / damage.file).stat().st_mode & 0o200) == (0o700, 0o200)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_drill_leaves_no_copy_that_looks_finished(number: int, tmp_path: Path) -> None:
    path = sound.make("sharded", tmp_path / "model")
    waits = ("import time; from pdtrain.drill import corrupt as d; from pathlib import Path\n"
             "d.KINDS['wait'] = lambda copy: time.sleep(60)\n"
             f"d.corrupt(Path({str(path)!r}), 'wait')")
    child = subprocess.Popen([sys.executable, "-c", waits], stderr=subprocess.DEVNULL)
    scratch = tmp_path / ".model.corrupt-wait.part"
    try:
        deadline = time.monotonic() + 30
        while not (scratch / "model-00003-of-00003.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        child.send_signal(number)
        child.wait(30)
    assert not (tmp_path / "model.corrupt-wait").exists()
    assert scratch.exists() == (number == signal.SIGKILL)
    drills.KINDS["wait"] = lambda copy: None
    try:
        with pytest.raises(UsageError):  # what a kill left is cleared by the next drill
            drills.corrupt(path, "wait")
    finally:
        del drills.KINDS["wait"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    shutil.rmtree(path)
