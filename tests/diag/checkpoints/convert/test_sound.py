"""A damaged source is refused: fresh checksums would make its copy look sound. Ours carries the trainer's digests."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diag.checkpoints import open_checkpoint
from diag.checkpoints.convert.reshard import Done, Wish, reshard
from diag.checkpoints.convert.source import SparingFolder
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.verify import Options as VerifyOptions
from diag.checkpoints.verify import verify
from diag.errors import ArtefactError
from tests.diag.checkpoints.convert.samples import EXPERTS, HEAD_DIM, HEADS, KV_HEADS, mixtral, write_hf


def convert(source: Path, target: Path, to: str, names: str | None = None, **layout: Any) -> Done:
    return reshard(Wish(source=source, destination=target, options=Options(to=to, **layout), names=names))


def flip(checkpoint: Path, tensor: str) -> str:
    """Flip one bit in the middle of a tensor; the file it is in."""
    found = open_checkpoint(checkpoint)
    held = found.tensors[tensor]
    chunk = held.chunks[0]
    found.locate(held, chunk)
    path = found.folder.path(chunk.file)
    data = bytearray(path.read_bytes())
    data[chunk.begin + chunk.nbytes // 2] ^= 1
    path.write_bytes(data)
    return chunk.file


@pytest.mark.parametrize("to, layout", [("dcp", {"ranks": 3}), ("universal", {}), ("zero2", {"dp": 2}),
                                        ("megatron", {"tp": 2}), ("megatron-legacy", {"tp": 2})])
def test_a_flipped_bit_of_a_tensor_is_not_handed_on(to: str, layout: dict[str, Any], tmp_path: Path) -> None:
    there = tmp_path / "there"
    convert(write_hf(tmp_path / "hf", mixtral(1)), there, to, **layout)
    tensor = next(t.name for t in open_checkpoint(there).tensors.values() if "moe.experts" in t.name
                  or "mlp.experts" in t.name)
    file = flip(there, tensor)
    with pytest.raises(ArtefactError, match="is damaged .CRC32.") as said:
        convert(there, tmp_path / "out", "hf", names="mixtral")
    assert file in str(said.value) and "do not have the CRC32" in str(said.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("list_name", ["integrity.json", "SHA256SUMS"])
def test_promised_digests_of_safetensors_are_held_to(list_name: str, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", mixtral(1), optimizer=False)
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    (source / list_name).write_text(
        f"{digest}  model.safetensors\n" if list_name == "SHA256SUMS" else
        json.dumps({"algorithm": "sha256", "files": {"model.safetensors": digest}}))
    convert(source, tmp_path / "whole", "dcp")
    flip(source, "model.norm.weight")
    with pytest.raises(ArtefactError, match="model.safetensors is not what was saved"):
        convert(source, tmp_path / "out", "dcp")
    assert not list(tmp_path.glob("out*"))


def test_ranks_that_disagree_about_what_they_share_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'train' is not installed")
    there = tmp_path / "there"
    convert(write_hf(tmp_path / "hf", mixtral(1)), there, "megatron-legacy", tp=2)
    path = sorted(there.rglob("mp_rank_01*/model_optim_rng.pt"))[0]
    with torch.serialization.safe_globals([argparse.Namespace]):
        value = torch.load(path, weights_only=True)
    next(v for k, v in value["model"].items() if k.endswith("final_layernorm.weight"))[0] += 1
    torch.save(value, path)
    with pytest.raises(ArtefactError, match="final_layernorm.weight is replicated, and mp_rank_01.* other values"):
        convert(there, tmp_path / "out", "hf", names="mixtral")


def test_not_a_number_goes_over_with_its_payload(tmp_path: Path) -> None:
    weights = mixtral(1)
    odd = np.array([0x7FC12345, 0xFFC00001, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    weights["model.norm.weight"][:4] = odd
    convert(write_hf(tmp_path / "hf", weights, optimizer=False), tmp_path / "there", "megatron", tp=2)
    convert(tmp_path / "there", tmp_path / "back", "hf", names="mixtral")
    back = open_checkpoint(tmp_path / "back")
    assert back.read(back.tensors["model.norm.weight"]).tobytes()[:16] == odd.tobytes()


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A DCP of this trainer, made from a Hugging Face model whose record holds the trainer's manifest."""
    source = write_hf(tmp_path / "hf", mixtral(2))
    model = {"layers": 2, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "experts": EXPERTS}
    manifest = {"step": 7, "consumed": 56, "rows": {"model": "step_00000007"}, "world": 8, "layout": {"tp": 2},
                "model": model, "data_fingerprint": "f", "seed": 1, "time": 2.0, "format": "pdtrain.checkpoint/1",
                "files": {"old.distcp": {"sha256": "0"}}, "checksum": "0"}
    (source / "pdtrain_reshard.json").write_text(json.dumps(
        {"format": "pdtrain.reshard/1", "step": 7, "consumed": 56, "manifest": manifest}))
    done = convert(source, tmp_path / "run", "dcp", names="pdtrain", ranks=3)
    assert done.plan.total == sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
    return tmp_path / "run" / "step_00000007"


def outcome(folder: Path, check: str) -> tuple[str, str]:
    found = next(o for o in verify(open_checkpoint(folder), VerifyOptions()) if o.check == check)
    return found.status, " ".join((found.note, *(p.text for p in found.problems)))


def test_a_converted_checkpoint_of_this_trainer_carries_its_digests(trainer: Path) -> None:
    from diag.checkpoints.formats.pdtrain_run import manifest_checksum

    manifest = json.loads((trainer / "manifest.json").read_bytes())
    assert manifest["files"].keys() == {".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
    assert manifest["files"][".metadata"] == {
        "sha256": hashlib.sha256((trainer / ".metadata").read_bytes()).hexdigest()}
    assert manifest["checksum"] == manifest_checksum(manifest)
    assert outcome(trainer, "digests") == ("PASS", "4 files")


def test_its_digests_are_those_that_the_trainer_writes(trainer: Path) -> None:
    pytest.importorskip("torch", reason="the extra 'train' is not installed")
    from pdtrain.checkpoint.manifest import file_digests

    assert json.loads((trainer / "manifest.json").read_bytes())["files"] == file_digests(trainer)


def test_verify_holds_the_converted_files_to_them(trainer: Path, tmp_path: Path) -> None:
    convert(write_hf(tmp_path / "hf2", mixtral(2, seed=1)), tmp_path / "other", "dcp", names="pdtrain", ranks=3)
    sound = (trainer / "__1_0.distcp").read_bytes()
    (trainer / "__1_0.distcp").write_bytes((tmp_path / "other" / "__1_0.distcp").read_bytes())  # sound, and another's
    status, said = outcome(trainer, "digests")
    assert status == "FAIL" and "__1_0.distcp is not what was saved" in said
    (trainer / "__1_0.distcp").write_bytes(sound)
    (trainer / "manifest.json").write_bytes((trainer / "manifest.json").read_bytes().replace(b": 56", b": 57"))
    status, said = outcome(trainer, "digests")
    assert status == "FAIL" and "manifest.json does not have the checksum" in said
    with pytest.raises(ArtefactError, match="checksum that it carries"):
        convert(trainer, tmp_path / "again", "hf")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_looking_at_every_header_of_a_file_does_not_keep_the_file_in_memory(tmp_path: Path) -> None:
    def resident() -> int:
        status = Path("/proc/self/status").read_text("ascii")
        return int(re.search(r"RssFile:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    size = 64 << 20
    (tmp_path / "shard").write_bytes(bytes(size))
    folder, before = SparingFolder(tmp_path), resident()
    for at in range(0, size, 64 << 10):
        assert folder.map("shard")[at] == 0
    assert resident() - before < size // 2


@pytest.mark.parametrize("form", ["plain", "legacy"])
def test_optimizer_states_by_position_stay_behind_and_the_weights_go_over(form: str, tmp_path: Path) -> None:
    """torch.optim numbers its parameters: an ordinary .pt of model and optimizer is no reason to refuse the model."""
    pytest.importorskip("torch")
    from diag.checkpoints.convert.contents import load
    from tests.diag.checkpoints import sound

    source = sound.make(form, tmp_path / form)
    assert any("kept by position" in text for text in load(source).dropped)
    convert(source, tmp_path / "out", "hf")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    weights = {t.fqn: before.read(t).tobytes() for t in before.tensors.values() if t.role == "parameter"}
    assert weights and {t.fqn: after.read(t).tobytes() for t in after.tensors.values()} == weights
