"""Only the largest gradients travel: as many bytes as theory says, and what stays behind goes with the next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdtrain.pools.message import checksum
from pdtrain.pools.plan import gradient_bytes, kept_elements
from pdtrain.pools.wire import spread, thinned
from tests.pools.test_equality import LAYOUTS, same, with_pools


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [0.001, 0.1, 0.5])
def test_the_largest_arrive_and_the_rest_is_what_is_left(dtype: torch.dtype, top_k: float):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    payload, carried = thinned(values, top_k, dtype)
    assert payload.numel() == gradient_bytes(1000, dtype.itemsize, top_k) and checksum(payload)
    assert (spread(payload, 1000, dtype).view(dtype).float() == carried).all()
    kept = carried != 0
    assert kept.sum() == kept_elements(1000, top_k)
    assert values[kept].abs().min() >= values[~kept].abs().max()
    assert torch.allclose((values - carried)[kept], torch.zeros(()), atol=0.02)
    assert ((values - carried)[~kept] == values[~kept]).all()


@pytest.mark.slow
def test_a_twentieth_of_the_gradients_trains_and_costs_a_tenth(tmp_path: Path):
    """FP32 value and index: 8 bytes of each of 5 % of the elements, where 4 bytes of all would be."""
    settings = {"top_k": 0.05, "error_feedback": True}
    ours, events = with_pools("stream", LAYOUTS["2+1"], 20, tmp_path, pools=settings)
    parameters = sum(weight.numel() for weight in ours.weights.values())
    steps = [[event for event in each if event["event"] == "pool_step"] for each in events]
    for step in range(20):
        up = sum(each[step]["bytes_sent"] for each in steps[:2])
        assert up == pytest.approx(0.05 * 8 * parameters, rel=0.01)
        assert steps[2][step]["bytes_sent"] == 4 * parameters, "weights travel whole"
        assert not step or steps[2][step]["bytes_received"] == up  # the first weights come before the first step
    assert ours.losses[-1] < ours.losses[0]


@pytest.mark.slow
def test_a_share_of_one_is_the_dense_run_in_every_bit(tmp_path: Path):
    settings = {"top_k": 1.0, "error_feedback": True}
    ours, _ = with_pools("stream", LAYOUTS["2+1"], 10, tmp_path / "a", pools=settings)
    dense, _ = with_pools("stream", LAYOUTS["2+1"], 10, tmp_path / "b")
    same(ours, dense)
