"""`sync` and `stream` with FP32 payload are the unseparated run, bit for bit; what differs elsewhere is told apart."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.pools.pooled import pooled_run, pooled_steps
from tests.small_run import Trained, small_run, train_steps

#: name -> compute ranks, update ranks, TP, EP
LAYOUTS = {"2+1": (2, 1, 1, 1), "4+2_ep2": (4, 2, 1, 2), "4+2_tp2_ep2": (4, 2, 2, 2)}
STEPS = 50


@lru_cache
def _unseparated(compute: int, tensor: int, expert: int, steps: int, folder: Path, model: str = "{}") -> Trained:
    run = small_run(ranks=compute, tensor=tensor, expert=expert, model=json.loads(model))
    return run_distributed(train_steps, compute, folder, run, steps, timeout=300)[0]


@pytest.fixture(scope="session")
def unseparated(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("unseparated")
    return lambda layout, steps: _unseparated(layout[0], *layout[2:], steps, folder)


def same(ours: Trained, theirs: Trained) -> None:
    """Losses, gradient norms and weights agree in every bit."""
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert ours.weights is not None and theirs.weights is not None
    for name, weight in theirs.weights.items():
        assert (ours.weights[name] == weight).all(), f"{name} differs"


def _parameters(trained: Trained) -> int:
    assert trained.weights is not None  # a tied weight is in there once
    return sum(weight.numel() for weight in trained.weights.values())


def with_pools(mode: str, layout: tuple[int, int, int, int], steps: int, folder: Path, **changes: Any) -> tuple:
    compute, update, tensor, expert = layout
    run = pooled_run(mode, compute=compute, update=update, tensor=tensor, expert=expert, **changes)
    results = run_distributed(pooled_steps, compute + update, folder, run, steps, folder / "run", timeout=300)
    return results[0][0], [events for _, events in results]


def test_stream_on_two_compute_ranks_and_one_update_rank(tmp_path: Path, unseparated) -> None:
    """The fast one of the matrix below; and what it sends is what theory says, to the byte."""
    ours, events = with_pools("stream", LAYOUTS["2+1"], 8, tmp_path)
    same(ours, unseparated(LAYOUTS["2+1"], 8))
    steps = [[event for event in each if event["event"] == "pool_step"] for each in events]
    assert [len(each) for each in steps] == [8, 8, 8]
    parameters = sum(weight.numel() for weight in ours.weights.values())
    for step in range(8):
        assert sum(each[step]["bytes_sent"] for each in steps[:2]) == 4 * parameters, "gradients of one step"
        assert steps[2][step]["bytes_sent"] == 4 * parameters, "weights of one step"
    assert steps[2][3]["state_bytes"] == 12 * parameters and steps[0][3]["state_bytes"] == 0
    assert all(step["resends"] == step["checksum_errors"] == step["staleness"] == 0 for each in steps for step in each)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_steps_are_the_same_in_every_bit(mode: str, layout: str, tmp_path: Path, unseparated) -> None:
    ours, _ = with_pools(mode, LAYOUTS[layout], STEPS, tmp_path)
    same(ours, unseparated(LAYOUTS[layout], STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"parallel": {"fsdp": False}}, {"model": {"tie_embeddings": True}}])
def test_replicas_and_tied_weights(changes: dict, tmp_path: Path) -> None:
    """What several ranks hold is exchanged by one of them, and is the same on all."""
    run = small_run(ranks=2, **changes)
    theirs = run_distributed(train_steps, 2, tmp_path, run, 10)[0]
    ours, events = with_pools("stream", LAYOUTS["2+1"], 10, tmp_path, **changes)
    same(ours, theirs)
    update = [event for event in events[2] if event["event"] == "pool_step"]
    assert update[4]["bytes_sent"] == 4 * _parameters(ours), "replicas are sent more than once"


def _reducing_each_micro_batch(rank: int, run: Any, steps: int) -> Trained:
    """The unseparated run, with the one thing changed that differs: the order of summation."""
    from pdtrain.step import TrainStep

    TrainStep._synchronise_gradients = lambda self, last: self.model.set_requires_gradient_sync(True)  # type: ignore
    return train_steps(rank, run, steps)


@pytest.mark.slow
def test_micro_batches_that_leave_at_once_differ_in_the_order_of_summation_alone(tmp_path: Path, unseparated) -> None:
    """Reduced, then added up: bit for bit the unseparated run that does the same."""
    ours, _ = with_pools("stream", LAYOUTS["2+1"], 20, tmp_path, pools={"granularity": "micro_batch"})
    same(ours, run_distributed(_reducing_each_micro_batch, 2, tmp_path, small_run(ranks=2), 20)[0])
    other = unseparated(LAYOUTS["2+1"], 20)
    assert ours.losses == pytest.approx(other.losses, rel=1e-5)


@pytest.mark.slow
def test_bf16_payload_stays_in_band_and_halves_the_traffic(tmp_path: Path, unseparated) -> None:
    ours, events = with_pools("stream", LAYOUTS["2+1"], STEPS, tmp_path, pools={"payload": "bf16"})
    assert ours.losses == pytest.approx(unseparated(LAYOUTS["2+1"], STEPS).losses, rel=0.02)
    parameters = sum(weight.numel() for weight in ours.weights.values())
    sent = [event["bytes_sent"] for event in events[2] if event["event"] == "pool_step"]
    assert set(sent) == {2 * parameters}


@pytest.mark.slow
def test_async_computes_with_weights_of_the_step_before_and_can_be_repeated(tmp_path: Path) -> None:
    first, events = with_pools("async", LAYOUTS["2+1"], 20, tmp_path / "a")
    again, _ = with_pools("async", LAYOUTS["2+1"], 20, tmp_path / "b")
    assert first.losses == again.losses
    assert first.losses[0] == first.losses[0] and first.losses[-1] < first.losses[0]
    for rank in (0, 1, 2):
        steps = [event for event in events[rank] if event["event"] == "pool_step"]
        assert [step["staleness"] for step in steps] == [0] + [1] * 19


@pytest.mark.slow
def test_state_in_files_is_the_same_in_every_bit_and_leaves_no_file(tmp_path: Path, unseparated) -> None:
    folder = tmp_path / "nvme"
    ours, _ = with_pools("stream", LAYOUTS["2+1"], 20, tmp_path, pools={"offload": str(folder)})
    same(ours, unseparated(LAYOUTS["2+1"], 20))
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_error_feedback_brings_a_rounded_payload_closer(tmp_path: Path) -> None:
    """The first update differs by rounding as without it; what was lost is not lost for good."""
    settings = {"payload": "bf16", "error_feedback": True}
    ours, _ = with_pools("stream", LAYOUTS["2+1"], 20, tmp_path / "a", pools=settings)
    plain, _ = with_pools("stream", LAYOUTS["2+1"], 20, tmp_path / "b", pools={"payload": "bf16"})
    assert ours.losses[:2] == plain.losses[:2] and ours.losses[2:] != plain.losses[2:]
    assert ours.losses[-1] == pytest.approx(plain.losses[-1], rel=0.02)
