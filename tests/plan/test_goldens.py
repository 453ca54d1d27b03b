"""The figures that a plan must not get wrong: published, or exact arithmetic on a published shape."""

from __future__ import annotations

import pytest

from pdtrain.config import load_run
from pdtrain.plan import states
from pdtrain.plan.estimate import as_json, estimate
from pdtrain.plan.flops import per_token
from pdtrain.plan.hardware import named
from pdtrain.plan.published import first_stage
from pdtrain.plan.reliability import days, training_flop
from pdtrain.plan.setup import Options, Setup, stages

GIB = 2**30
#: Figure 1 of arXiv 2205.05198, GiB: heads, hidden, layers, stages, chunks, micro-batch; all saved / selective + SP.
FIGURE_1 = {
    "22B": (64, 6144, 48, 1, 1, 4, 59.25, 9.5625),
    "175B": (96, 12288, 96, 8, 3, 1, 66.84375, 12.3515625),
    "530B": (128, 20480, 105, 35, 3, 1, 114.0234375, 23.076171875),
    "1T": (160, 25600, 128, 64, 1, 1, 131.25, 26.5625),
}


@pytest.fixture(scope="module")
def deepseek():
    return load_run(preset="deepseek-v3")


@pytest.mark.parametrize("name", FIGURE_1)
def test_published_activation_memory_exactly(name):
    a, h, layers, p, m, b, plain, selective = FIGURE_1[name]
    for value, split, recompute in ((plain, False, "none"), (selective, True, "selective")):
        found = first_stage(layers, 2048, b, h, a, 8, p=p, m=m, sequence_parallel=split, recompute=recompute)
        assert found / GIB == value


def test_full_recomputation_keeps_one_input_per_block():
    kept = first_stage(48, 2048, 4, 6144, 64, 8, sequence_parallel=False, recompute="full")
    assert kept == 48 * 2 * 2048 * 4 * 6144


@pytest.mark.parametrize("gradient_bytes, gib", [(None, 13.21), (2, 10.03)])
def test_states_of_the_published_layout(deepseek, gradient_bytes, gib):
    """PP16 / EP64 / ZeRO-1 on 2,048 devices, mean over stages; FP32 or BF16 main gradients."""
    setup = Setup(deepseek, Options(gradient_bytes=gradient_bytes))
    assert (setup.pp, setup.ep, setup.ranks, setup.sharding) == (16, 64, 2048, "zero1")
    assert round(states.mean_over_stages(setup).total / GIB, 2) == gib


def test_flop_per_token_in_both_conventions(deepseek):
    assert round(per_token(deepseek.model, 4096) / 1e9, 2) == 250.45
    assert round(per_token(deepseek.model, 4096, causal=False) / 1e9, 2) == 281.15


def test_five_trillion_tokens_take_64_days_not_three_weeks():
    flop = training_flop(37e9, 5e12)
    assert f"{flop:.3g}" == "1.11e+24"
    assert round(days(flop, 1000, 500e12, 0.4)) == 64


def test_the_json_contract(deepseek):
    found = as_json(estimate(Setup(deepseek), named("h800"), 80e9))
    assert found["parameters"]["total"] == 671_026_419_200
    assert found["parameters"]["activated"] == 36_625_618_432
    assert "embedding lookup excluded" in found["parameters"]["activated_convention"]
    assert found["states_bytes"] == 16 * 671_026_419_200  # 10.7 TB
    assert round(found["flops_per_token"] / 1e9, 2) == 250.45
    kinds = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
    for rank in ("per_rank", "worst_rank"):
        assert sum(found[rank][kind] for kind in kinds) == pytest.approx(found[rank]["total_bytes"])
    assert round(sum(found["per_rank"][kind] for kind in kinds[:3]) / GIB, 2) == 13.21
    assert found["fits"] is False  # without recomputation 16 micro-batches in flight do not fit into 80 GB
    assert 0 < found["mfu"] < 1 and "causal" in found["mfu_convention"]
    steps = found["tokens"] / found["tokens_per_step"]
    assert found["days"] == pytest.approx(steps * found["step_seconds"] / 86_400)
    assert found["days_with_overhead"] > found["days"]
    assert any("deepseek" in line.lower() or "causal" in line for line in found["conventions"])


def test_the_sum_of_all_ranks_is_the_model(deepseek):
    """Replicated states counted once per stage and expert group give back every parameter."""
    setup = Setup(deepseek, Options(sharding="none"))
    total = 0
    for stage in stages(setup):
        for tensor, count in states.stage_tensors(setup, stage):
            total += count * states.entries(states.local_shape(tensor, setup)) * setup.split(tensor.row)
    assert total == 671_026_419_200
