"""Experts that are copies of each other, from safetensors files; damage and other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.diag.helpers import pdtrain


def weights(path: Path, *, like: float, stacked: bool = False, experts: int = 8, layers: int = 3) -> Path:
    """A checkpoint whose experts share `like` of their variance."""
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(16, 32)).astype(np.float32)}
    for layer in range(layers):
        for matrix, shape in (("w1", (32, 48)), ("w2", (48, 32))):
            base = rng.normal(size=shape)
            made = [like**0.5 * base + (1 - like) ** 0.5 * rng.normal(size=shape) for _ in range(experts)]
            if stacked:
                tensors[f"model.layers.{layer}.mlp.experts.{matrix}"] = np.stack(made).astype(np.float32)
            else:
                for expert, values in enumerate(made):
                    name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                    tensors[name] = values.astype(np.float32)
    save_file(tensors, path)
    return path


def found(path: Path) -> dict:
    return pdtrain("diag", "router", path, "--json").json()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("like, words", [(0.999, "are near copies"), (0.5, "began as copies"), (0.0, None)])
def test_copies_are_told_apart(tmp_path: Path, stacked: bool, like: float, words: str | None) -> None:
    report = found(weights(tmp_path / "model.safetensors", like=like, stacked=stacked))
    sick = [f for f in report["findings"] if f["cause"] == "moe_identical_experts"]
    if words is None:
        assert sick == [] and report["verdict"] == "healthy"
        assert "Experts differ" in report["findings"][0]["summary"]
    else:
        assert words in sick[0]["summary"] and sick[0]["severity"] == "warning"
        assert sick[0]["numbers"]["layers"][0]["median_cosine"] == pytest.approx(like, abs=0.05)


def test_a_damaged_file_is_stated(tmp_path: Path) -> None:
    path = weights(tmp_path / "model.safetensors", like=0.999)
    path.write_bytes(path.read_bytes()[:-1000])
    done = pdtrain("diag", "router", path)
    assert done.status in (1, 2) and "Traceback" not in done.err and "model.safetensors" in done.out + done.err


def test_a_model_without_experts_is_no_input_of_the_router(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up.weight": np.ones((4, 4), np.float32)}, tmp_path / "dense.safetensors")
    report = found(tmp_path / "dense.safetensors")
    assert report["verdict"] == "unknown" and report["findings"][0]["cause"] == "input_unreadable"
