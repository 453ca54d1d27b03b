"""Checkpoints beside logs: the post-mortem says which step a resume may take, cheaply, and never against its reader."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra 'train' is not installed")

from diag.checkpoints import beside, open_checkpoint
from diag.diagnose import diagnose
from diag.errors import UsageError
from pdtrain.drill import edit
from tests.diag.checkpoints import sound

OOM = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
       "GiB of which 1.00 GiB is free.\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound.make("pdtrain", tmp_path_factory.mktemp("saved") / "checkpoints")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run's folder: two good checkpoints and a quiet log."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    (tmp_path / "log.txt").write_text("step 100 loss 2.0\n" * 20)
    return tmp_path


def cut(run: Path, step: str = "step_00000100") -> None:
    shard = next((run / "checkpoints" / step).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])


def test_a_cut_newest_step_is_told_with_the_one_to_resume_from(run: Path) -> None:
    cut(run)
    report = diagnose([run])
    root = report.findings[0]
    assert (report.verdict, root.cause, root.role, root.severity) == ("degraded", "ckpt_incomplete", "root", "warning")
    assert "step_00000100, is not safe to resume from" in report.headline and "the file is cut" in report.headline
    assert root.fix == [f"Resume from {run}/checkpoints/step_00000050",
                        f"pdtrain diag ckpt verify {run}/checkpoints --deep"]


def test_what_broke_the_run_stays_the_root(run: Path) -> None:
    cut(run)
    (run / "log.txt").write_text(OOM)
    report = diagnose([run])
    assert report.findings[0].cause == "cuda_oom" and report.findings[0].role == "root"
    assert [f.role for f in report.findings if f.cause == "ckpt_incomplete"] == ["context"]


def test_no_step_is_whole(run: Path) -> None:
    cut(run)
    cut(run, "step_00000050")
    assert "nor is the one before it" in diagnose([run]).headline


def test_whole_checkpoints_are_a_note_with_the_command(run: Path) -> None:
    report = diagnose([run])
    assert report.verdict == "healthy" and report.exit_status() == 0
    assert any(f"pdtrain diag ckpt verify {run}/checkpoints --deep" in note for note in report.not_checked)


def test_a_copy_without_the_large_files_is_not_blamed(run: Path) -> None:
    """Logs, manifests and metadata were copied from the cluster, the tensors were not."""
    for shard in run.rglob("*.distcp"):
        shard.unlink()
    report = diagnose([run])
    assert report.verdict == "healthy"
    assert any("tensors are not here" in note for note in report.not_checked)


def test_a_step_that_is_being_written_is_not_blamed(run: Path) -> None:
    """No commit mark and files of this minute: a running job. An hour later it is what a crash left."""
    step = run / "checkpoints" / "step_00000100"
    (step / "manifest.json").unlink()
    report = diagnose([run])
    assert report.verdict == "healthy"
    assert any("step_00000100, which is being written" in note for note in report.not_checked)
    for file in step.iterdir():
        os.utime(file, (0, 0))
    assert "step_00000100, is not safe to resume from" in diagnose([run]).headline


def test_no_tensor_is_read_and_the_work_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(run / "checkpoints" / "step_00000100")
    tensor = checkpoint.tensors["model.embed.weight"]
    chunk = checkpoint.locate(tensor, tensor.chunks[0])
    edit.flip(checkpoint.folder.path(chunk.file), chunk.begin + 5)  # a flipped bit is --deep's to find
    assert diagnose([run]).verdict == "healthy"
    monkeypatch.setattr(beside, "FILES", 1)
    cut(run)
    report = diagnose([run])
    assert report.verdict == "healthy"
    assert any("pdtrain diag ckpt verify" in note for note in report.not_checked)


def test_folders_that_are_only_named_like_steps(tmp_path: Path) -> None:
    for name in ("epoch_1", "step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text("step 1 loss 2.0\n" * 20)
    report = diagnose([tmp_path])
    assert report.verdict == "healthy" and not any("ckpt" in note for note in report.not_checked)


def test_checkpoints_alone_name_their_own_command(run: Path) -> None:
    (run / "log.txt").unlink()
    (run / "checkpoints" / "latest").unlink()
    for manifest in run.rglob("manifest.json"):
        manifest.unlink()
    for metadata in run.rglob(".metadata"):
        metadata.write_bytes(b"\x80\x02}.")
    with pytest.raises(UsageError, match="pdtrain diag ckpt verify"):
        diagnose([run])


def test_the_names_are_looked_at_below_what_was_given_only(tmp_path: Path) -> None:
    inside = tmp_path / "step_1" / "run" / "checkpoints" / "step_7" / "a.pt"
    given = tmp_path / "step_1" / "run"
    assert beside.step_directories([str(inside)], [str(given)]) == [given / "checkpoints"]
    assert beside.step_directories([str(given / "log.txt")], [str(given)]) == []
