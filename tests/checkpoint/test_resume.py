"""Resuming is exact on the same layout, continues the curve on any other, and mixes of steps are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from diag.errors import UsageError
from tests.distributed import run_distributed
from tests.small_run import changed, small_run, train_steps


@pytest.mark.parametrize("ranks, tensor, expert", [(1, 1, 1), (4, 2, 2), pytest.param(8, 2, 4, marks=pytest.mark.slow)])
def test_ten_and_ten_steps_equal_twenty_bit_for_bit(ranks: int, tensor: int, expert: int, tmp_path: Path) -> None:
    run = small_run(ranks=ranks, tensor=tensor, expert=expert, model={"attention": "gqa"})
    straight = run_distributed(train_steps, ranks, tmp_path, run, 20)[0]
    first = run_distributed(train_steps, ranks, tmp_path, run, 10, tmp_path / "ckpt", False, True)[0]
    second = run_distributed(train_steps, ranks, tmp_path, run, 10, tmp_path / "ckpt", True)[0]
    assert first.losses + second.losses == straight.losses
    for name, weight in straight.weights.items():
        assert (second.weights[name] == weight).all(), f"{name} differs after the resumed run"


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param((8, 2, 4), (2, 1, 2), id="ep4_tp2-to-ep2_tp1"),
        pytest.param((2, 1, 2), (4, 2, 1), id="ep2-to-tp2_edp4", marks=pytest.mark.slow),
        pytest.param((1, 1, 1), (4, 2, 4), id="one-to-tp2_ep4", marks=pytest.mark.slow),
        pytest.param((4, 2, 2), (1, 1, 1), id="tp2_ep2-to-one", marks=pytest.mark.slow),
    ],
)
def test_resume_in_another_layout_continues_the_curve(before: tuple, after: tuple, tmp_path: Path) -> None:
    make = lambda layout: small_run(ranks=layout[0], tensor=layout[1], expert=layout[2])  # noqa: E731
    straight = run_distributed(train_steps, before[0], tmp_path, make(before), 20)[0]
    run_distributed(train_steps, before[0], tmp_path, make(before), 10, tmp_path / "ckpt", False, True)
    resumed = run_distributed(train_steps, after[0], tmp_path, make(after), 10, tmp_path / "ckpt", True)[0]
    assert resumed.losses == pytest.approx(straight.losses[10:], rel=1e-4)


def test_rows_with_their_own_cadence_are_restored_from_where_they_are(tmp_path: Path) -> None:
    """Experts saved at step 4 only, the rest also at 6: restored together, and the difference is reported."""
    run = small_run(checkpoint={"keep": 1})
    rest = ["attention", "shared_expert", "router", "dense_ffn", "norm", "embed_head"]
    everything = [*rest, "experts"]
    root = tmp_path / "ckpt"
    run_distributed(train_steps, 1, tmp_path, run, 7, root, False, False, {4: everything, 6: rest})
    kept = sorted(path.name for path in root.glob("step_*"))
    assert kept == ["step_00000004", "step_00000006"], "keep = 1 must not delete the folder that holds the experts"
    resumed = run_distributed(train_steps, 1, tmp_path, run, 1, root, True)[0]
    assert resumed.restored.step == 6
    assert resumed.restored.mixed == {"experts": 4}


def test_keep_and_latest(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    every = ["attention", "shared_expert", "router", "dense_ffn", "norm", "embed_head", "experts"]
    run = small_run(checkpoint={"keep": 2})
    run_distributed(train_steps, 1, tmp_path, run, 4, root, False, False, {1: every, 2: every, 3: every, 4: every})
    assert sorted(path.name for path in root.glob("step_*")) == ["step_00000003", "step_00000004"]
    assert (root / "latest").read_text().strip() == "step_00000004"


def test_a_rewind_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    run = small_run()
    every = ["attention", "shared_expert", "router", "dense_ffn", "norm", "embed_head", "experts"]
    run_distributed(train_steps, 1, tmp_path, run, 4, root, False, False, {2: every, 4: every})
    shutil.move(root / "step_00000004", root / "hidden")  # the user resumes from step 2 …
    shutil.move(root / "hidden", root / "step_00000004")
    result = run_distributed(_resume_from, 1, tmp_path, run, root / "step_00000002")[0]
    assert result == 2
    assert (root / "step_00000004.abandoned").is_dir() and not (root / "step_00000004").exists()


def test_a_damaged_newest_checkpoint_is_passed_over_and_told(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    run = small_run()
    every = ["attention", "shared_expert", "router", "dense_ffn", "norm", "embed_head", "experts"]
    run_distributed(train_steps, 1, tmp_path, run, 2, root, False, False, {1: every, 2: every})
    (root / "step_00000002" / ".metadata").unlink()
    resumed = run_distributed(train_steps, 1, tmp_path, run, 1, root, True)[0]
    assert resumed.restored.step == 1
    assert len(resumed.restored.passed_over) == 1 and "step_00000002" in resumed.restored.passed_over[0]


def _resume_from(rank: int, run, folder: Path) -> int:
    import torch

    from pdtrain.checkpoint import Checkpointer
    from pdtrain.optim import build_optimizer
    from pdtrain.parallel.gradients import rows_of
    from pdtrain.parallel.parallelize import build_parallel_model

    model = build_parallel_model(run, None, torch.device("cpu"))
    rows = rows_of(model, None)
    checkpointer = Checkpointer(folder.parent, run, model, build_optimizer(run, rows), rows, "numbered")
    restored = checkpointer.restore(folder)
    checkpointer.tidy(restored.step)
    return restored.step


def test_what_cannot_be_resumed_is_refused_in_one_line(tmp_path: Path) -> None:
    run = small_run()
    root = tmp_path / "ckpt"
    with pytest.raises(UsageError, match="no complete checkpoint"):
        _resume_from(0, run, tmp_path / "nothing")
    run_distributed(train_steps, 1, tmp_path, run, 1, root, False, True)
    folder = root / "step_00000001"
    with pytest.raises(UsageError, match=r"model\.hidden: 64 in the checkpoint, 32 now"):
        _resume_from(0, changed(run, "model", hidden=32), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"data_fingerprint": "other"}))
    with pytest.raises(UsageError, match="other data"):
        _resume_from(0, run, folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        _resume_from(0, run, folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(UsageError, match="cannot be loaded, a file of it is damaged"):
        _resume_from(0, run, folder)
