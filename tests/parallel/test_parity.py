"""Every layout trains the same model: losses, gradients and norms agree with one rank.

All use the same number of micro-batches per step, because balance statistics cover one micro-step.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
import pytest

from tests.distributed import run_distributed
from tests.small_run import Trained, small_run, train_steps

STEPS = 20
#: name -> ranks, TP, EP; the last is the layout of the preset `sparrow`
LAYOUTS = {
    "tp2": (2, 2, 1),
    "ep2": (2, 1, 2),
    "ep4": (4, 1, 4),
    "fsdp4": (4, 1, 1),
    "tp2_ep2": (4, 2, 2),
    "sparrow_tp2_ep4": (8, 2, 4),
}


@lru_cache
def one_rank(attention: str, dtype: str, folder: Path) -> Trained:
    run = small_run(model={"attention": attention}, dtype=dtype)
    return run_distributed(train_steps, 1, folder, run, STEPS)[0]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("one_rank")
    return lambda attention="gqa", dtype="fp32": one_rank(attention, dtype, folder)


def layout_cases() -> list:
    cases = []
    for name in LAYOUTS:
        for attention in ("gqa", "mla"):
            slow = attention == "mla" and name != "tp2_ep2"
            marks = [pytest.mark.slow] if slow else []
            cases.append(pytest.param(name, attention, marks=marks, id=f"{name}-{attention}"))
    return cases


@pytest.mark.parametrize("layout, attention", layout_cases())
def test_fp32_parity(layout: str, attention: str, tmp_path: Path, reference) -> None:
    """Losses within 1e-6 at step 1 and 1e-4 later, each gradient of step 1 within 1e-5 of its norm, norms alike."""
    ranks, tensor, expert = LAYOUTS[layout]
    run = small_run(ranks=ranks, tensor=tensor, expert=expert, model={"attention": attention})
    results = run_distributed(train_steps, ranks, tmp_path, run, STEPS)
    ours, theirs = results[0], reference(attention)
    assert all(result.losses == ours.losses for result in results), "ranks report different losses"
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    for name, gradient in theirs.gradients.items():
        error = (ours.gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"gradient of {name} differs by {error:.1e} of its norm"
    for row, norm in theirs.norms[0].items():
        assert ours.norms[0][row] == pytest.approx(norm, rel=1e-5), f"norm of {row}: copies counted twice?"


@pytest.mark.parametrize("layout", ["tp2_ep2", pytest.param("sparrow_tp2_ep4", marks=pytest.mark.slow)])
def test_bf16_stays_in_band(layout: str, tmp_path: Path, reference) -> None:
    """BF16 compute on any layout follows the FP32 curve of one rank within 2 %."""
    ranks, tensor, expert = LAYOUTS[layout]
    run = small_run(ranks=ranks, tensor=tensor, expert=expert, dtype="bf16")
    ours = run_distributed(train_steps, ranks, tmp_path, run, STEPS)[0]
    assert ours.losses == pytest.approx(reference().losses, rel=0.02)


def test_replicated_instead_of_sharded(tmp_path: Path, reference) -> None:
    """parallel.fsdp = false keeps whole copies and still trains the same model."""
    run = small_run(ranks=4, tensor=2, expert=2, parallel={"fsdp": False})
    ours = run_distributed(train_steps, 4, tmp_path, run, 5)[0]
    assert ours.losses == pytest.approx(reference().losses[:5], rel=1e-5)


def test_recomputation_changes_nothing(tmp_path: Path) -> None:
    """Full recomputation of attention and experts: the same bits, routing counted once."""
    plain = small_run(ranks=2, tensor=2, expert=2)
    policies = {
        row: msgspec.structs.replace(getattr(plain.modules, row), recompute="full")
        for row in ("attention", "experts", "dense_ffn", "shared_expert")
    }
    recomputed = msgspec.structs.replace(plain, modules=msgspec.structs.replace(plain.modules, **policies))
    first = run_distributed(train_steps, 2, tmp_path, plain, 3)[0]
    second = run_distributed(train_steps, 2, tmp_path, recomputed, 3)[0]
    assert first.losses == second.losses


def test_tied_embeddings_train_alike(tmp_path: Path) -> None:
    """One weight in two places, split over TP and sharded over DP, gets the sum of both gradients."""
    tied = {"model": {"tie_embeddings": True}}
    alone = run_distributed(train_steps, 1, tmp_path, small_run(**tied), 5)[0]
    split = run_distributed(train_steps, 4, tmp_path, small_run(ranks=4, tensor=2, expert=2, **tied), 5)[0]
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
