"""A save that cannot be finished says so in one line and leaves the earlier checkpoint as it was."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra 'train' is not installed")

import torch
import torch.distributed.checkpoint as dcp

from pdtrain.checkpoint import Checkpointer, manifest
from pdtrain.optim import build_optimizer
from pdtrain.parallel.gradients import rows_of
from pdtrain.parallel.parallelize import build_parallel_model
from tests.small_run import small_run


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    """One process, with a good checkpoint of step 1."""
    run = small_run()
    model = build_parallel_model(run, None, torch.device("cpu"))
    rows = rows_of(model, None)
    made = Checkpointer(tmp_path / "checkpoints", run, model, build_optimizer(run, rows), rows, "numbered")
    assert made.save(1, 8)
    return made


def after_writing(monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object]) -> None:
    """Something happens to the files between the writing and the commit."""
    write = dcp.save

    def save(state: object, *, checkpoint_id: Path, **options: object) -> None:
        write(state, checkpoint_id=checkpoint_id, **options)
        harm(checkpoint_id)

    monkeypatch.setattr(dcp, "save", save)


@pytest.mark.parametrize("harm, said", [
    (lambda folder: next(folder.glob("*.distcp")).unlink(), ".distcp is missing, cut or damaged"),
    (lambda folder: (shard := next(folder.glob("*.distcp"))).write_bytes(shard.read_bytes()[:-100]), "cut or damaged"),
    (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x02."), ".metadata"),
], ids=["shard gone", "shard cut", "metadata gone", "metadata damaged"])
def test_files_that_changed_before_the_commit(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch,
                                              caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object],
                                              said: str) -> None:
    after_writing(monkeypatch, harm)
    with caplog.at_level(logging.ERROR):
        assert not checkpointer.save(2, 16)
    assert said in checkpointer.problem and "\n" not in checkpointer.problem
    said_once = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert said_once == [f"checkpoint at step 2 was not written: {checkpointer.problem}"]
    assert _left(checkpointer.root) == ["latest", "step_00000001"]
    monkeypatch.undo()
    assert checkpointer.save(2, 16) and checkpointer.restore("latest").step == 2


def test_a_full_disk(checkpointer: Checkpointer) -> None:
    """A limit on the size of files stands for the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(f.stat().st_size for f in checkpointer.root.glob("step_*/*.distcp"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, hard))
        assert not checkpointer.save(2, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert checkpointer.problem and "\n" not in checkpointer.problem
    assert _left(checkpointer.root) == ["latest", "step_00000001"]
    assert checkpointer.restore("latest").step == 1


@pytest.mark.parametrize("name", ["manifest.json", "latest.tmp"])
def test_no_room_for_the_last_small_files(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch,
                                          name: str) -> None:
    """The tensors just fitted: a checkpoint must not become visible, nor `latest` stay on the one before."""
    write = manifest._write_synced

    def full(path: Path, content: bytes) -> None:
        if path.name == name:
            path.write_bytes(content[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(manifest, "_write_synced", full)
    assert not checkpointer.save(2, 16)
    assert "No space left on device" in checkpointer.problem
    assert _left(checkpointer.root) == ["latest", "step_00000001"]
    monkeypatch.undo()
    assert checkpointer.save(2, 16) and (checkpointer.root / "latest").read_text() == "step_00000002\n"


def _left(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())
