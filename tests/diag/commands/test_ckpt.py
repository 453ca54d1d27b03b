"""`pdtrain diag ckpt` as its user meets it: exit statuses, one line for what cannot be, names that attack terminals."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from diag.checkpoints.answer import verified
from pdtrain.cli import main
from tests.diag.checkpoints import sound

EVIL = "a\x1b[31m[red]x[/red]\n\u202e"
#: Root reads what it likes, unless it gives that up.
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
needs_permissions = pytest.mark.skipif(bool(UNPRIVILEGED) and shutil.which("setpriv") is None,
                                       reason="root, and no setpriv to give its privileges up")


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["diag", "ckpt", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    rng = np.random.default_rng(0)
    save_file({EVIL: rng.standard_normal((8, 8), np.float32), "a..b": np.ones(3, np.float32),
               "n" * 5000: np.arange(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def test_the_exit_status_is_the_answer(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt(capsys, "verify", weights)[0] == 0
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    status, out, _ = ckpt(capsys, "verify", weights, "--json")
    report = json.loads(out)
    found = report["findings"][0]
    assert (status, report["verdict"], found["where"]["file"]) == (1, "failed", "model.safetensors")
    assert found["numbers"]["tensor"] and found["numbers"]["byte_range"][1] > file.stat().st_size


@pytest.mark.parametrize("arguments, complaint", [
    (["verify", "nowhere"], "nowhere: no such file or directory"),
    (["verify", "empty"], "empty: no checkpoint that is known here"),
    (["ls", "empty"], "empty: no checkpoint that is known here"),
    (["diff", "empty", "weights"], "empty: no checkpoint that is known here"),
    (["verify", "note.txt"], "note.txt: no checkpoint that is known here"),
    (["verify", ""], "the path of the checkpoint is empty"),
    (["verify", "pipe"], "pipe: is neither a file nor a folder"),
    (["verify", "/dev/zero"], "/dev/zero: is neither a file nor a folder"),
    (["verify", "loop"], "loop: no such file or directory"),
    (["verify", "x" * 300], "File name too long"),
    (["verify", "gone\x1b[31m"], r"gone\x1b[31m: no such file"),
    (["verify", "weights", "--against", "/dev/zero"], "--against /dev/zero: cannot be read"),
    (["verify", "weights", "--against", "note.txt"], "--against note.txt"),
    (["verify", "steps", "--seal"], "name one step to be sealed"),
    (["verify", "weights", "--threads", "0"], "0 is not in the range"),
])
def test_what_cannot_be_is_one_line(arguments: list[str], complaint: str, weights: Path,
                                    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(weights.parent)
    for folder in ("empty", "steps/step_1"):
        Path(folder).mkdir(parents=True)
    Path("note.txt").write_text("not a checkpoint\n")
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    status, out, err = ckpt(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pdtrain: ") and complaint in err
    assert not arguments[1] or err.count(arguments[1]) <= 1  # the path is said once


def test_a_tracker_stands_for_the_steps_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound.make("zero2", tmp_path / "run")
    status, out, _ = ckpt(capsys, "verify", path / "latest")
    assert status == 0 and "Resume from global_step100" in out


def test_a_seal_that_cannot_be_written_leaves_nothing(weights: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted just before the rename, and killed there: no half list, and the next seal goes through."""
    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    before = sorted(p.name for p in weights.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        assert ckpt(capsys, "verify", weights, "--seal")[0] == 130
    assert sorted(p.name for p in weights.iterdir()) == before
    (weights / "integrity.json.tmp").write_text("{")
    status, out, _ = ckpt(capsys, "verify", weights, "--seal")
    assert status == 0 and "Sealed" in out
    assert sorted(p.name for p in weights.iterdir()) == sorted([*before, "integrity.json"])


def test_names_neither_colour_nor_break_lines(weights: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # wide enough for the folder's name before that of the tensor
    for arguments in (["ls", weights, "--depth", 0], ["ls", weights], ["verify", weights], ["diff", weights, weights]):
        status, out, _ = ckpt(capsys, *arguments)
        assert status == 0
        assert "\x1b" not in out and "\u202e" not in out
    assert r"a\x1b[31m[red]x[/red]\x0a\u202e" in ckpt(capsys, "diff", weights, weights)[1]
    assert "(no name)" in ckpt(capsys, "ls", weights)[1]


def test_a_folder_whose_name_is_no_text(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path(os.fsdecode(os.fsencode(weights.parent) + b"/\xff"))
    try:
        weights.rename(odd)
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    status, out, _ = ckpt(capsys, "verify", odd, "--json")
    assert (status, json.loads(out)["inputs"][0]["path"][-6:]) == (0, "\\udcff")
    assert ckpt(capsys, "verify", odd)[0] == 0


def test_numbers_beyond_any_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products and byte ranges of such numbers fit neither into JSON nor into a printed line."""
    huge = "9" * 4000
    for entry in (f'"shape":[{huge},{huge}],"data_offsets":[0,4]', f'"shape":[1],"data_offsets":[0,{huge}]'):
        header = ('{"w":{"dtype":"F32",' + entry + "}}").encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        status, out, _ = ckpt(capsys, "verify", tmp_path, "--json")
        assert (status, json.loads(out)["findings"][0]["numbers"]["tensor"]) == (1, "w")


def test_nan_is_a_difference_unless_both_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, *values: float) -> Path:
        (tmp_path / name).mkdir()
        save_file({"w": np.array(values, np.float32)}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    finite, hurt, other = saved("a", 1.0, 2.0), saved("b", math.nan, 2.0), saved("c", math.nan, 3.0)
    status, out, _ = ckpt(capsys, "diff", finite, hurt)
    assert status == 0 and "NaN or infinite in one of them only" in " ".join(out.split()) and " inf " in out
    status, out, _ = ckpt(capsys, "diff", hurt, other, "--json")
    row = json.loads(out)["findings"][0]["numbers"]["modules"][0]
    assert (status, row["max |Δ|"], row["relative norm"]) == (0, 1.0, 0.5)


def test_a_diff_does_not_judge_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound.make("stacked", tmp_path / "one")
    copy = tmp_path / "two"
    shutil.copytree(path, copy)
    os.truncate(copy / "__0_1.distcp", 100)
    status, out, _ = ckpt(capsys, "diff", path, copy)
    assert status == 1 and "could not be read" in out.splitlines()[0]
    assert "Not the same weights" not in out and "The same weights" not in out


def test_one_file_is_answered_for_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound.make("plain", tmp_path / "p") / "last.pt"
    assert f"{path} (step 1) is whole" in json.loads(ckpt(capsys, "verify", path, "--json")[1])["headline"]


def trainer(folder: Path) -> Path:
    """What the Hugging Face Trainer leaves: safetensors, and training state as files of torch.save."""
    folder.mkdir(parents=True)
    save_file({"model.w": np.ones((4, 4), np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    adam.step()
    torch.save(adam.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 100}, folder / "scheduler.pt")
    for rank in range(2):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text('{"global_step": 100}')
    return folder


def test_the_training_state_beside_safetensors_is_checked(tmp_path: Path) -> None:
    folder = trainer(tmp_path / "checkpoint-100")
    report = verified(str(folder), deep=True)
    assert report.verdict == "healthy" and report.findings[0].where.step == 100
    assert any("optimizer.pt numbers its states" in note for note in report.not_checked)

    def flip(name: str) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    damages: dict[str, Any] = {
        "optimizer.pt": lambda: os.truncate(folder / "optimizer.pt", 500),
        "scheduler.pt": lambda: (folder / "scheduler.pt").write_bytes(b""),
        "rng_state_1.pth": lambda: flip("rng_state_1.pth"),
        "trainer_state.json": lambda: (folder / "trainer_state.json").write_text('{"global_step": 1'),
    }
    for name, damage in damages.items():
        kept = (folder / name).read_bytes()
        damage()
        report = verified(str(folder), deep=True)
        assert [f.where.file for f in report.findings if f.severity == "error"] == [name]
        (folder / name).write_bytes(kept)


def run(*arguments: object, before: list[str] | None = None, stdout: Any = subprocess.PIPE) -> tuple[int, str]:
    command = [*(before or []), sys.executable, "-c", "from pdtrain.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@needs_permissions
def test_what_may_not_be_read_is_not_called_damaged(weights: Path) -> None:
    file = weights / "model.safetensors"
    file.chmod(0)
    try:
        status, err = run("diag", "ckpt", "verify", weights, before=UNPRIVILEGED)
    finally:
        file.chmod(0o644)
    assert (status, err.count("\n")) == (2, 1)
    assert "model.safetensors: cannot be read: Permission denied" in err


@needs_permissions
def test_a_seal_needs_a_place(weights: Path) -> None:
    weights.chmod(0o555)
    try:
        status, err = run("diag", "ckpt", "verify", weights, "--seal", before=UNPRIVILEGED)
    finally:
        weights.chmod(0o755)
    assert status == 2 and "integrity.json: Permission denied" in err
    assert [p.name for p in weights.iterdir()] == ["model.safetensors"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(weights: Path) -> None:
    with Path("/dev/full").open("w") as full:
        status, err = run("diag", "ckpt", "verify", weights, stdout=full)
    assert (status, err) == (2, "pdtrain: standard output: cannot be written: No space left on device\n")


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    folder = sound.titan(tmp_path / "run")
    shard = sorted(folder.rglob("*.distcp"))[0]
    shard.unlink()
    os.mkfifo(shard)
    command = [sys.executable, "-c", "from pdtrain.cli import main; main()", "diag", "ckpt", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2) and shard.name in done.stdout + done.stderr


def test_a_sound_archive_of_something_else_is_no_checkpoint(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save("hello", tmp_path / "greeting.pt")
    status, out, _ = ckpt(capsys, "verify", tmp_path / "greeting.pt")
    assert status == 1 and "without any tensor" in out and "HEALTHY" not in out
