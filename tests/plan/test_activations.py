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


MOONLIGHT = [
    "model.hidden=2048", "model.layers=3", "model.dense_layers=1", "model.heads=16", "model.kv_heads=16",
    "model.attention=mla", "model.mla.kv_lora_rank=512", "model.ffn_hidden=11264", "model.moe.experts=64",
    "model.moe.top_k=6", "model.moe.expert_hidden=1408", "model.moe.shared_experts=2", "modules.attention.tensor=2",
    "modules.experts.expert=8", "train.sequence_length=4096", "train.micro_batch=1", "train.train_batch=none",
    "precision.all=bf16",
]  # fmt: skip


def test_parts_of_a_block_that_are_computed_again_one_by_one():
    """Bytes per rank of one MoE block: half of 4,096 tokens at TP2, 6 rows of 2,048 tokens."""
    run = load_run(preset="tiny", overrides=MOONLIGHT, world=8)

    def kept(**options) -> activations.Kept:
        return activations.block(Setup(run, Options(kernels="fused", states="megatron", **options)), dense=False)

    whole, local = kept().total, 2048
    lost = {
        "norm": 2 * local * 2048 * 2,  # the inputs of attention and of router and dispatch
        "mla-up": 4096 * 8 * 2 * (2 * 192 + 256),  # q and k as they enter attention, and keys and values as projected
        "moe-act": local * 6 * 1408 * 2,
    }
    for name, size in lost.items():
        assert whole - kept(drop=(name,)).total == size
        assert kept(drop=(name,)).again > 0
    assert whole - kept(drop=tuple(lost)).total == sum(lost.values())
    assert whole - kept(early_weights=True).total == local * 6 * 2048 * 2
    slow = [times(Setup(run, Options(drop=drop)), named("h100-sxm"))[0].recompute for drop in ((), ("norm",), ("moe",))]
    assert slow[0] == 0 < slow[1] < slow[2]


def test_gradients_reduced_after_every_micro_batch_are_held_as_shards_and_sent_as_often():
    run = load_run(preset="tiny", overrides=[*LLAMA, "train.train_batch=64"], world=8)
    (_, once), (_, each) = (memory.peak(Setup(run, Options(reduce_each=each))) for each in (False, True))
    assert once.gradients == pytest.approx(4 * 8.03e9, rel=1e-3)
    assert each.gradients == pytest.approx(4 * 8.03e9 / 8, rel=1e-3)
    sent = [sum(item.bytes for item in traffic(Setup(run, Options(reduce_each=each)), stages(Setup(run))[0],
                                               named("h100-sxm"))) for each in (False, True)]  # fmt: skip
    assert sent[1] > sent[0]


def test_what_deepseek_v3_ran_with_fits_its_devices():
    """PP16, EP64, DualPipe on 80 GB (arXiv 2412.19437): with what the report says was recomputed and kept in FP8."""
    run = load_run(preset="deepseek-v3")
    stated = Options(schedule="dualpipe", drop=("norm", "mla-up"), fp8_activations=True, early_weights=True,
                     moment_bytes=2)  # fmt: skip
    (_, plainly), (_, found) = (memory.peak(Setup(run, options)) for options in (Options(schedule="dualpipe"), stated))
    assert plainly.total > 150e9
    assert 50e9 < found.total < memory.WATERMARK * 80e9


def test_inputs_of_products_in_fp8_by_hand():
    """Dense block: what goes into q, k, v, o, gate, up and down; q, k, v, norms and residuals stay as they are."""
    whole, fp8 = (activations.block(llama(kernels="fused", fp8_activations=on), dense=True) for on in (False, True))
    into = 4096 + 4096 + 4096  # attention, its output, feed forward
    bytes_saved = (2 - 1.03125) * (into + 2 * 14336) + 2 * 14336  # gate and up; their product is computed again
    assert whole.total - fp8.total == pytest.approx(16_384 * bytes_saved)
