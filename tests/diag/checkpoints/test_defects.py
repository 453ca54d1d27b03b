"""Every defect in every format where it can exist: caught, file and tensor named; sound ones stay silent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from diag.checkpoints import open_checkpoint
from diag.checkpoints.answer import verified
from diag.errors import UsageError
from pdtrain.drill import content, layout  # noqa: F401 - they register their kinds
from pdtrain.drill.corrupt import KINDS, corrupt
from tests.diag.checkpoints import sound

#: What leaves no trace: safetensors carry no checksums of their own. After `verify --seal` it is caught as well.
UNSEEN_UNSEALED = {("single", "flip-payload"), ("fp8", "flip-payload")}
#: What each format of the matrix cannot have; a kind that silently stops applying is a hole in the matrix.
APPLICABLE = {"titan": 20, "stacked": 16, "single": 10, "sharded": 15, "fp8": 8, "plain": 11, "bins": 16, "zero2": 15,
              "zero3": 13, "universal": 14, "legacy": 16, "olmo": 19, "pdtrain": 20}


@pytest.mark.parametrize("name", sound.FORMATS)
def test_a_sound_checkpoint_is_silent(name: str, tmp_path: Path) -> None:
    path = sound.make(name, tmp_path / name)
    for deep in (False, True):
        report = verified(str(path), deep=deep)
        assert (report.verdict, [f.summary for f in report.findings if f.severity != "info"]) == ("healthy", [])
        assert report.exit_status() == 0


@pytest.mark.parametrize("name", sound.FORMATS)
def test_every_defect_is_named(name: str, tmp_path: Path) -> None:
    path = sound.make(name, tmp_path / name)
    wrong, applied = [], 0
    for kind in sorted(KINDS):
        try:
            copy, damage = corrupt(path, kind, tmp_path / kind)
        except UsageError as error:
            assert "cannot have this defect" in str(error)
            continue
        applied += 1
        report = verified(str(copy), deep=True)
        bad = [f for f in report.findings if f.severity != "info"]
        said = " ".join(f"{f.where.file} {f.summary} {f.numbers.get('tensor')}" for f in bad)
        by_digest = any(f.numbers.get("check") == "digests" for f in bad)
        file = not damage.file or damage.file in said or (damage.text and damage.text in said)
        tensor = not damage.tensor or damage.tensor in said or by_digest
        silent = (name, kind) in UNSEEN_UNSEALED
        if silent != (not bad) or (bad and not (file and tensor)) or (bad and report.exit_status() != 1):
            wrong.append((kind, damage, said[:200]))
        shutil.rmtree(copy)
    assert not wrong
    assert applied >= APPLICABLE[name]


@pytest.mark.parametrize(("name", "kind"), sorted(UNSEEN_UNSEALED))
def test_a_sealed_checkpoint_hides_nothing(name: str, kind: str, tmp_path: Path) -> None:
    path = sound.make(name, tmp_path / name)
    step = open_checkpoint(path).folder.root
    assert "Sealed" in verified(str(step), seal=True).headline
    copy, damage = corrupt(path, kind, tmp_path / "copy")
    report = verified(str(copy), deep=True)
    assert report.exit_status() == 1
    assert any(damage.file in str(f.where.file) for f in report.findings)


def test_a_hostile_pickle_never_runs(tmp_path: Path) -> None:
    """In the metadata, in a slice of a shard, in a rank's file, in an optimizer file: refused by name, nothing run."""
    ran = tmp_path / "ran"
    bomb = (b"\x80\x02cposix\nsystem\nX" + len(command := f"touch {ran}".encode()).to_bytes(4, "little") + command
            + b"\x85R.")
    import io
    import zipfile

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as made:
        made.writestr("archive/data.pkl", bomb)
    tried = 0
    for name in ("titan", "plain", "bins", "zero2", "zero3", "universal", "legacy", "olmo", "pdtrain"):
        path = sound.make(name, tmp_path / name)
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.suffix in (".pt", ".bin", ".distcp")]
        for file in [*files, *path.rglob(".metadata")][-6:]:
            kept = file.read_bytes()
            file.write_bytes(bomb if file.name == ".metadata" else archive.getvalue())
            tried += 1
            report = verified(str(path), deep=True)
            assert report.exit_status() != 0, file
            if file.suffix in (".pt", ".bin") or file.name == ".metadata":
                assert any("posix.system" in f.summary for f in report.findings), (name, file)
            file.write_bytes(kept)
    assert tried > 25
    assert not ran.exists()


def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("titan", "sharded", "olmo", "pdtrain"):
        copy, _ = corrupt(sound.make(name, tmp_path / name), "escaping-path", tmp_path / f"{name}-copy")
        said = " ".join(f.summary for f in verified(str(copy)).findings)
        assert "outside of the checkpoint" in said
    tracker = sound.make("zero2", tmp_path / "z")
    (tracker / "latest").write_text("../../etc")
    assert any(f.cause == "ckpt_hostile" for f in verified(str(tracker)).findings)


def test_the_newest_safe_step_is_the_answer(tmp_path: Path) -> None:
    """Three steps, the newest damaged: the answer is the one before it, and says why not the newest."""
    path = sound.make("pdtrain", tmp_path / "run")
    shard = next((path / "step_00000100").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    report = verified(str(path))
    assert report.headline.startswith("Resume from step_00000050") and "step_00000100" in report.headline
    assert report.exit_status() == 1
    root = report.findings[0]
    assert root.role == "root" and root.where.file == f"step_00000100/{shard.name}" and root.where.step == 100


def test_older_rows_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    """The experts lie in the older folder: they are read, and their loss is that of the newer checkpoint too."""
    path = sound.make("pdtrain", tmp_path / "run")
    checkpoint = open_checkpoint(path / "step_00000100")
    assert checkpoint.meta.rows == {"attention": 100, "experts": 50}
    experts = [t for t in checkpoint.tensors.values() if ".experts." in t.name]
    assert {t.chunks[0].file.split("/")[0] for t in experts} == {"step_00000050"}
    shutil.rmtree(path / "step_00000050")
    report = verified(str(path))
    assert report.headline.startswith("No step") and "step_00000050" in report.headline
