"""Acceptance: this trainer's checkpoint around through other formats, and training goes on as if nothing had been.

    TP2/EP4/DP2 (8 ranks) -> Hugging Face -> Megatron torch_dist TP1/EP2 -> DeepSpeed universal -> DCP of 8 ranks
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra 'train' is not installed")

from diag.checkpoints import open_checkpoint
from diag.checkpoints.convert.reshard import Options, Wish, reshard
from tests.distributed import run_distributed
from tests.small_run import NumberedSequences, small_run, train_steps


def convert(source: Path, target: Path, to: str, names: str | None = None, **layout: int) -> None:
    reshard(Wish(source=source, destination=target, options=Options(to=to, **layout), names=names))


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.problems
    return {t.name: (t.dtype, t.shape, checkpoint.read(t).tobytes()) for t in checkpoint.tensors.values()}


def around(source: Path, folder: Path) -> Path:
    convert(source, folder / "hf", "hf")
    convert(folder / "hf", folder / "megatron", "megatron", tp=1, ep=2)
    convert(folder / "megatron", folder / "universal", "universal")
    convert(folder / "universal", folder / "back", "dcp", names="pdtrain", ranks=8)
    return folder / "back"


def continued(run, ranks: int, folder: Path, root: Path, steps: int = 3):
    return run_distributed(train_steps, ranks, folder, run, steps, root, True)[0]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_training_continues_bit_for_bit_after_four_formats(attention: str, tmp_path: Path) -> None:
    run = small_run(ranks=8, tensor=2, expert=4, model={"attention": attention})
    run_distributed(train_steps, 8, tmp_path, run, 3, tmp_path / "ckpt", False, True)
    back = around(tmp_path / "ckpt", tmp_path)
    assert tensors(back) == tensors(tmp_path / "ckpt")
    straight = continued(run, 8, tmp_path, tmp_path / "ckpt")
    resumed = continued(run, 8, tmp_path, back)
    assert resumed.restored.step == 3 and resumed.restored.consumed == straight.restored.consumed
    assert resumed.losses == straight.losses and len(resumed.losses) == 3
    for name, weight in straight.weights.items():
        assert (resumed.weights[name] == weight).all(), f"{name} differs after three more steps"


@pytest.mark.slow
def test_another_layout_resumes_the_converted_checkpoint(tmp_path: Path) -> None:
    run = small_run(ranks=4, tensor=2, expert=2)
    run_distributed(train_steps, 4, tmp_path, run, 3, tmp_path / "ckpt", False, True)
    convert(tmp_path / "ckpt", tmp_path / "out", "dcp", ranks=3)
    one = small_run(ranks=1)
    straight = continued(one, 1, tmp_path, tmp_path / "ckpt")
    assert continued(one, 1, tmp_path, tmp_path / "out").losses == straight.losses


def test_one_process_around_and_one_step_on(tmp_path: Path) -> None:
    run = small_run(model={"layers": 2})
    run_distributed(train_steps, 1, tmp_path, run, 2, tmp_path / "ckpt", False, True)
    back = around(tmp_path / "ckpt", tmp_path)
    assert tensors(back) == tensors(tmp_path / "ckpt")
    manifest = json.loads((back / "step_00000002" / "manifest.json").read_text())
    assert manifest["data_fingerprint"] == NumberedSequences.fingerprint and manifest["consumed"] == 32
    assert (back / "latest").read_text() == "step_00000002\n"
    straight = continued(run, 1, tmp_path, tmp_path / "ckpt", 1)
    assert continued(run, 1, tmp_path, back, 1).losses == straight.losses
