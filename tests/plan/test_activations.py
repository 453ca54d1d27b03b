"""What recomputation and fused kernels keep, by hand."""

from __future__ import annotations

import pytest

from pdtrain.config import load_run
from pdtrain.plan import activations, memory
from pdtrain.plan.communication import traffic
from pdtrain.plan.hardware import named
from pdtrain.plan.setup import Options, Setup, stages
from pdtrain.plan.timing import times

LLAMA = [
    "model.vocab_size=128256", "model.hidden=4096", "model.layers=32", "model.dense_layers=32", "model.heads=32",
    "model.kv_heads=8", "model.head_dim=128", "model.ffn_hidden=14336", "modules.attention.tensor=1",
    "modules.experts.expert=1", "train.sequence_length=8192", "train.micro_batch=2", "train.train_batch=none",
    "precision.all=bf16",
]  # fmt: skip


def llama(**options) -> Setup:
    return Setup(load_run(preset="tiny", overrides=LLAMA, world=8), Options(**options))


def test_per_operation_recomputation_keeps_every_second_product_and_attention():
    kept = activations.block(llama(recompute="op"), dense=True)
    # input; q, v, w1 and w2 of q, k, v, o, w1, w3, w2; attention's output; its log-sum-exp
    elements = 4096 + (4096 + 1024 + 14336 + 4096) + 4096
    assert kept.total == 16_384 * (2 * elements + 4 * 32)
    whole = activations.block(llama(recompute="none"), dense=True)
    assert kept.total + kept.again == pytest.approx(whole.total)


def test_every_second_block_costs_half_of_full_recomputation():
    peaks = {policy: memory.peak(llama(recompute=policy))[1].activations for policy in ("none", "alternate", "full")}
    assert peaks["full"] < peaks["alternate"] < peaks["none"]
    again = {policy: times(llama(recompute=policy), named("h100-sxm"))[0].recompute for policy in ("alternate", "full")}
    assert again["alternate"] == pytest.approx(again["full"] / 2)


def test_a_fused_loss_holds_one_copy_of_the_logits_and_their_gradient():
    setup = llama(kernels="fused")
    (stage,) = stages(setup)
    _, beside = activations.ends(setup, stage)
    assert beside == 16_384 * 128_256 * 2
    _, beside = activations.ends(llama(), stage)
    assert beside == 16_384 * 128_256 * 8  # two more in FP32


@pytest.mark.parametrize("groups, visited", [(1, 8 * (1 - (7 / 8) ** 8)), (8, 4)])
def test_rows_for_one_node_cross_once_and_ungrouped_routing_visits_most_nodes(groups, visited):
    """EP64 on nodes of 8: 8 experts lie on 5.3 of 8 nodes in the mean, or on at most 4 where routing is limited."""
    limit = min(groups, 4)
    run = load_run(
        preset="deepseek-v3", overrides=[f"model.moe.groups={groups}", f"model.moe.top_groups={limit}"]
    )  # fmt: skip
    share = {}
    for limited in (False, True):
        setup = Setup(run, Options(node_limited=limited))
        moved = traffic(setup, stages(setup)[5], named("h800"))
        share[limited] = next(item.across for item in moved if item.group == "EP")
    assert share[True] / share[False] == pytest.approx(visited / 8)
