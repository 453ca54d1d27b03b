"""Contents of another file, rank or step: what weights beside masters, archives' names and a hub's download prove."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra 'train' is not installed")

import torch

from diag.checkpoints import open_checkpoint
from diag.checkpoints.answer import verified
from pdtrain.drill import edit
from tests.diag.checkpoints import sound


def said(path: Path, *, deep: bool = True) -> list[tuple[str, str]]:
    return [(f.severity, f.summary) for f in verified(str(path), deep=deep).findings if f.severity != "info"]


@pytest.mark.parametrize("deep", [False, True])
def test_partitions_of_two_ranks_exchanged_in_place(deep: bool, tmp_path: Path) -> None:
    """Right names, right checksums, the wrong rank's numbers: only the weights in the model file tell."""
    path = sound.make("zero2", tmp_path / "run")
    checkpoint = open_checkpoint(path)
    chunks = [c for t in checkpoint.tensors.values() if t.role == "master" for c in t.chunks]
    spans = {}
    for rank in (0, 1):
        own = [c for c in chunks if c.rank == rank]
        spans[rank] = own[0], min(c.begin for c in own), max(c.begin + c.nbytes for c in own)
    data = {rank: checkpoint.folder.path(c.file).read_bytes()[a:b] for rank, (c, a, b) in spans.items()}
    for rank, (chunk, begin, _) in spans.items():
        edit.write_at(checkpoint.folder.path(chunk.file), begin, data[1 - rank])
        edit.reseal(checkpoint.folder.path(chunk.file), chunk.container)
    found = said(path, deep=deep)
    assert {severity for severity, _ in found} == {"error"}
    assert any("optimizer.state.embed.weight.fp32 in bf16_zero_pp_rank_0" in text
               and "holds other values than the weights in mp_rank_00_model_states.pt" in text for _, text in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["down", "up", "either"])
def test_weights_that_were_rounded_in_any_way_are_silent(dtype: torch.dtype, rounding: str, tmp_path: Path) -> None:
    """Stochastic rounding, truncation with the remainder kept elsewhere; values of every size, subnormal ones too."""
    torch.manual_seed(0)
    master = torch.randn(64, 512) * torch.logspace(-8, 1, 512)
    nearest = master.to(dtype)
    other = torch.where(nearest.float() > master, torch.nextafter(nearest, torch.full_like(nearest, -1e4)),
                        torch.nextafter(nearest, torch.full_like(nearest, 1e4)))
    low, high = torch.minimum(nearest, other), torch.maximum(nearest, other)
    weight = {"down": low, "up": high, "either": torch.where(torch.rand_like(master) < 0.5, low, high)}[rounding]
    _saved(tmp_path / "m.pt", weight, master)
    assert said(tmp_path / "m.pt") == []


@pytest.mark.parametrize(("change", "severity"), [(1.0, []), (1.05, ["warning"]), (-1.0, ["error"])])
def test_a_master_of_another_step_is_a_warning_one_of_another_run_an_error(
        change: float, severity: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    master = torch.randn(64, 64)
    _saved(tmp_path / "m.pt", master.bfloat16(), master * change)
    assert [s for s, _ in said(tmp_path / "m.pt")] == severity


def _saved(path: Path, weight: torch.Tensor, master: torch.Tensor) -> None:
    torch.save({"model": {"a.weight": weight}, "optimizer": {"state": {"a.weight": {"fp32": master}}}}, path)
    held = open_checkpoint(path)
    assert sorted(t.role for t in held.tensors.values()) == ["master", "parameter"]


def test_moments_of_two_parameters_exchanged_are_seen_only_when_sealed(tmp_path: Path) -> None:
    """The limit that docs/ckpt.md states: of moments there is no second copy that could tell."""
    path = sound.make("universal", tmp_path / "run")
    step = path / "global_step100_universal"

    def exchange() -> None:
        a, b = (step / "zero" / f"layers.{n}.attn.wq.weight" / "exp_avg.pt" for n in (0, 1))
        kept = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(kept)

    exchange()
    assert said(path) == []
    exchange()
    assert "Sealed" in verified(str(step), seal=True).headline
    exchange()
    assert any("layers.0.attn.wq.weight/exp_avg.pt is not what was saved" in text for _, text in said(path))


def test_a_copy_under_another_name_is_no_exchange(tmp_path: Path) -> None:
    """`epoch_2.pt` may be a copy of `epoch_1.pt`: files of one folder belong together only where a format says so."""
    torch.save({"a.weight": torch.randn(4, 4)}, tmp_path / "epoch_1.pt")
    shutil.copy(tmp_path / "epoch_1.pt", tmp_path / "epoch_2.pt")
    assert said(tmp_path) == []


def test_a_rank_file_that_was_copied_over_its_neighbour(tmp_path: Path) -> None:
    path = sound.make("zero3", tmp_path / "run")
    first, second = sorted((path / "global_step100").glob("*optim_states.pt"))
    shutil.copy(first, second)
    found = said(path, deep=False)
    assert any(second.name in text and f"was saved as {first.name}" in text for _, text in found)


@pytest.mark.parametrize("form", ["cache", "local dir"])
def test_a_download_is_held_to_what_the_hub_promised(form: str, tmp_path: Path) -> None:
    path = sound.make("single", tmp_path / "snapshots" / "abc")
    file = path / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if form == "cache":
        (tmp_path / "blobs").mkdir()
        file.rename(tmp_path / "blobs" / digest)
        file.symlink_to(f"../../blobs/{digest}")
    else:
        note = path / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
        note.parent.mkdir(parents=True)
        note.write_text(f"{'0' * 40}\n{digest}\n{file.stat().st_mtime + 0.5}\n")
    assert said(path) == []
    before = file.stat()
    raw = np.fromfile(file, np.uint8)
    raw[-1] ^= 1
    raw.tofile(file)
    if form == "local dir":
        os.utime(file, (before.st_atime, before.st_mtime + 60))
        assert said(path) == []  # changed on purpose, later than the note
        os.utime(file, (before.st_atime, before.st_mtime))
    assert [s for s, _ in said(path)] == ["error"]
