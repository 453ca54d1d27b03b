"""What the readers give back: values bit for bit, geometry, quirks of real files."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from diag.checkpoints import open_checkpoint
from diag.checkpoints.answer import verified
from diag.checkpoints.dtypes import DTYPES, non_finite, to_float32
from tests.diag.checkpoints import sound


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Transposed, strided, BF16, FP8, scalars and empty tensors through DCP, plain files and safetensors."""
    base = torch.randn(6, 8)
    held = {"plain": base, "transposed": base.t(), "strided": base[:, ::2], "shared": base[2:4],
            "bf16": base.bfloat16(), "fp8": base.to(torch.float8_e5m2), "scalar": torch.tensor(3),
            "empty": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    dcp.save(dict(held), checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(held, tmp_path / "all.pt")
    save_file({k: v.contiguous().clone() for k, v in held.items()}, tmp_path / "all.safetensors")
    for path in (tmp_path / "dcp", tmp_path / "all.pt", tmp_path / "all.safetensors"):
        checkpoint = open_checkpoint(path)
        assert not checkpoint.problems
        for name, value in held.items():
            tensor = checkpoint.tensors[name]
            assert tensor.dtype == str(value.dtype).removeprefix("torch.") and tensor.shape == tuple(value.shape)
            assert np.ascontiguousarray(checkpoint.read(tensor)).tobytes() == _bits(value), (path.name, name)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_flat_partitions_give_whole_parameters(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sound.make(name, tmp_path))
    masters = {t.fqn: t for t in checkpoint.tensors.values() if t.role == "master"}
    if name == "zero2":
        truth = {k: v.float() for k, v in sound.weights(torch.bfloat16).items() if "experts" not in k}
    else:
        torch.manual_seed(5)
        truth = {"a.weight": torch.randn(33, 5), "b.weight": torch.randn(7, 3), "b.bias": torch.randn(3)}
    assert masters.keys() == truth.keys()
    for fqn, value in truth.items():
        assert np.array_equal(checkpoint.read(masters[fqn]), value.numpy())
    assert any(len(t.chunks) == 2 for t in masters.values())


def test_megatron_ranks_make_whole_weights(tmp_path: Path) -> None:
    """Columns put together, gate and up halves apart, experts renumbered over the expert ranks."""
    checkpoint = open_checkpoint(sound.make("legacy", tmp_path))
    torch.manual_seed(7)
    whole = [torch.randn(96, sound.HIDDEN) for _ in range(2)]
    for _ in range(2):
        torch.randn(sound.EXPERTS, sound.HIDDEN)
    experts = [torch.randn(2 * sound.FFN, sound.HIDDEN) for _ in range(2 * sound.EXPERTS)]
    qkv = checkpoint.tensors["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert np.array_equal(checkpoint.read(qkv), whole[1].numpy())
    assert len(qkv.copies) == 2  # the other expert rank's
    third = checkpoint.tensors["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert np.array_equal(checkpoint.read(third), experts[3].numpy())
    assert third.expert == 3


def test_a_box_of_a_tensor_across_chunks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sound.make("zero2", tmp_path))
    tensor = next(t for t in checkpoint.tensors.values() if t.role == "master" and len(t.chunks) == 2)
    whole = checkpoint.read(tensor)
    assert np.array_equal(checkpoint.read(tensor, (1, 3), (5, 7)), whole[1:6, 3:10])


def test_float_formats_agree_with_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        truth = codes.view(getattr(torch, name)).float().numpy()
        ours = to_float32(codes.numpy(), DTYPES[name])
        assert np.array_equal(ours, truth, equal_nan=True)
        assert non_finite(codes.numpy(), DTYPES[name]) == int((~np.isfinite(truth)).sum())
    half = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    truth = half.view(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(half.numpy(), DTYPES["bfloat16"]), truth, equal_nan=True)
    assert non_finite(half.numpy(), DTYPES["bfloat16"]) == int((~np.isfinite(truth)).sum())


def test_quirks_of_real_indexes(tmp_path: Path) -> None:
    """An absurd total_size is said, glued documents are an error, an odd name and no total_size are neither."""
    path = sound.make("sharded", tmp_path / "a")
    (path / "integrity.json").unlink()
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    odd = path / "weights-part-b.safetensors"
    (path / "model-00002-of-00003.safetensors").rename(odd)
    weight_map = {k: odd.name if v.startswith("model-00002") else v for k, v in good["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert [f.summary for f in verified(str(path), deep=True).findings if f.severity != "info"] == [
        "model-00002-of-00003.safetensors is missing"]
    odd.rename(path / "model-00002-of-00003.safetensors")
    index.write_text(json.dumps(good | {"metadata": {"total_size": 10**71}}))
    report = verified(str(path))
    assert report.exit_status() == 1 and report.findings[0].severity == "warning" and "1e+71" in report.headline
    index.write_text(json.dumps(good) + json.dumps(good))
    report = verified(str(path))
    assert report.findings[0].severity == "error" and "not one JSON document" in report.headline


def test_a_config_is_held_to_the_names_and_shapes(tmp_path: Path) -> None:
    held = {"model.embed_tokens.weight": torch.randn(32, 16)}
    for n in range(3):
        held[f"model.layers.{n}.self_attn.q_proj.weight"] = torch.randn(16, 16)
        for e in range(2):
            held[f"model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight"] = torch.randn(24, 16)
    save_file(held, tmp_path / "model.safetensors")
    config = {"model_type": "mixtral", "hidden_size": 16, "vocab_size": 32, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 24, "num_local_experts": 2}

    def said(**changes: object) -> str:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config | changes))
        report = verified(str(tmp_path / "model.safetensors"), against=str(file))
        return " ".join(f.summary for f in report.findings if f.severity != "info")

    assert said() == ""
    assert "[24, 16], the model's is [48, 16]" in said(intermediate_size=48)
    assert "layers 3 of 4" in said(num_hidden_layers=4)
    assert "lacks experts 2-3" in said(num_local_experts=4) or "lacks experts 2, 3" in said(num_local_experts=4)
    assert "[32, 16], the model's is [40, 16]" in said(vocab_size=40)


def test_lfs_pointers_and_old_files_are_named(tmp_path: Path) -> None:
    path = sound.make("bins", tmp_path / "a")
    file = path / "pytorch_model-00001-of-00002.bin"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n")
    report = verified(str(path))
    assert report.findings[0].cause == "ckpt_missing_shard" and "git lfs pull" in report.headline
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    report = verified(str(tmp_path / "old.pt"))
    assert "before 1.6" in report.headline


def test_a_metadata_of_ten_thousand_shards_is_quick(tmp_path: Path) -> None:
    """Ten thousand files, forty thousand chunks: read in a child process, the same answer as for a small one."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    shards = 10_000
    tensors, places = {}, {}
    for n in range(4):
        chunks = [ChunkStorageMetadata(torch.Size((rank * 8, 0)), torch.Size((8, 16))) for rank in range(shards)]
        tensors[f"layers.{n}.weight"] = TensorStorageMetadata(TensorProperties(dtype=torch.float32),
                                                              torch.Size((shards * 8, 16)), chunks)
        places |= {MetadataIndex(f"layers.{n}.weight", c.offsets, i): _StorageInfo(f"__{i}_0.distcp", n * 1000, 1000)
                   for i, c in enumerate(chunks)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, places)))
    started = time.monotonic()
    report = verified(str(tmp_path))
    print(f"{time.monotonic() - started:.1f} s")
    assert "none of the 10,000 files with tensors is here" in report.headline and "__0_0.distcp" in report.headline
    assert not any(f.numbers.get("check") == "chunks tile" for f in report.findings)
    tensors["layers.0.weight"].chunks.pop(5)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, places)))
    assert any("describes no such chunk" in f.summary for f in verified(str(tmp_path)).findings)
