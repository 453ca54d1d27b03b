"""The MoE layer against a token-by-token reading of the formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pdtrain.config.schema import MODULES, Model, Moe
from pdtrain.model.moe import MoeLayer, make_plan
from pdtrain.model.router import Router, Routing

FP32 = dict.fromkeys(MODULES, torch.float32)
NO_RECOMPUTE = dict.fromkeys(FP32, False)


def layer(**moe: object) -> MoeLayer:
    torch.manual_seed(0)
    model = Model(hidden=16, moe=Moe(**({"experts": 8, "top_k": 2, "expert_hidden": 8} | moe)))
    made = MoeLayer(model, FP32, NO_RECOMPUTE)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def swiglu(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ w1) * (x @ w3)) @ w2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_dropless_layer_is_the_weighted_sum_of_the_chosen_experts(score: str, normalize: bool) -> None:
    moe = layer(score=score, normalize_top_k=normalize, route_scale=2.5, shared_experts=2)
    x = torch.randn(2, 5, 16)
    out = moe(x)
    for token, got in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        logits = token @ moe.router.weight.T
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        best = scores.topk(2)
        weights = best.values / best.values.sum() if normalize else best.values
        want = sum(
            2.5 * weight * swiglu(token, moe.experts.w1[e], moe.experts.w3[e], moe.experts.w2[e])
            for weight, e in zip(weights, best.indices, strict=True)
        )
        shared = moe.shared_expert
        want = want + swiglu(token, shared.w1.weight.T, shared.w3.weight.T, shared.w2.weight.T)
        torch.testing.assert_close(got, want)


def test_gradients_of_the_grouped_experts_match_a_loop_even_when_an_expert_is_idle() -> None:
    moe = layer()
    with torch.no_grad():
        moe.router.weight[3] = -10 * moe.router.weight[3].abs()  # expert 3 gets nothing from positive tokens
    x = torch.rand(1, 12, 16)
    moe(x).square().sum().backward()
    grouped = {name: parameter.grad.clone() for name, parameter in moe.experts.named_parameters()}
    moe.zero_grad()
    routing = moe.router(x[0])
    out = torch.zeros(12, 16)
    for k in range(2):
        rows = [
            swiglu(x[0, t], moe.experts.w1[e], moe.experts.w3[e], moe.experts.w2[e])
            for t, e in enumerate(routing.experts[:, k])
        ]
        out = out + routing.weights[:, k, None] * torch.stack(rows)
    out.square().sum().backward()
    assert routing.counts[3] == 0
    for name, gradient in grouped.items():
        torch.testing.assert_close(gradient, getattr(moe.experts, name).grad)


def test_capacity_drops_the_latest_tokens_and_counts_them() -> None:
    experts = torch.tensor([[0], [0], [0], [1], [0], [1]])
    counts = torch.bincount(experts.flatten(), minlength=4)
    routing = Routing(experts, torch.ones(6, 1), counts)
    plan = make_plan(routing, Moe(experts=4, top_k=1, capacity_factor=1.0, min_capacity=1))
    room = math.ceil(6 / 4)
    assert plan.order.tolist() == [0, 1, 3, 5]  # the two earliest of expert 0, both of expert 1
    assert plan.counts.tolist() == [room, 2, 0, 0]
    assert plan.dropped == 2


def test_min_capacity_is_a_floor() -> None:
    experts = torch.zeros(6, 1, dtype=torch.int64)
    routing = Routing(experts, torch.ones(6, 1), torch.tensor([6, 0, 0, 0]))
    plan = make_plan(routing, Moe(experts=4, top_k=1, capacity_factor=1.0, min_capacity=5))
    assert plan.counts[0] == 5


def test_a_dropped_token_contributes_nothing_and_is_recorded() -> None:
    moe = layer(top_k=1, capacity_factor=1e-6, min_capacity=1)
    x = torch.randn(1, 40, 16)
    out = moe(x)[0]
    idle = int((out.abs().sum(-1) == 0).sum())
    statistics = dict(zip(moe.router.statistics.SCALARS, moe.router.statistics.scalars.tolist(), strict=True))
    assert idle == statistics["dropped"] == 40 - int((moe.router.statistics.counts > 0).sum())


def test_group_limited_routing_stays_inside_the_best_groups() -> None:
    moe = layer(experts=8, groups=4, top_groups=1, top_k=2, score="sigmoid")
    routing = moe.router(torch.randn(64, 16))
    groups = routing.experts // 2
    assert (groups[:, 0] == groups[:, 1]).all(), "two experts of one token lie in different groups"
    assert groups.unique().numel() > 1


def test_the_balancing_bias_changes_the_choice_but_not_the_weights() -> None:
    moe = layer(bias_update_speed=0.01, score="sigmoid", normalize_top_k=False, top_k=1)
    x = torch.randn(50, 16)
    plain = moe.router(x)
    with torch.no_grad():
        moe.router.bias[5] = 100.0
    pushed = moe.router(x)
    assert (pushed.experts == 5).all() and not (plain.experts == 5).all()
    scores = (x @ moe.router.weight.T).sigmoid()
    torch.testing.assert_close(pushed.weights[:, 0], scores[:, 5])


def test_bias_update_lifts_the_underloaded_and_stays_centred() -> None:
    moe = layer(bias_update_speed=0.01)
    moe.router.update_bias(torch.tensor([80.0, 0, 10, 10, 10, 10, 0, 0]))
    bias = moe.router.bias
    assert bias[0] < 0 < bias[1]
    assert bias.mean().abs() < 1e-8


def test_balance_loss_is_one_when_balanced_and_grows_when_skewed() -> None:
    router = Router(Model(hidden=4, moe=Moe(experts=4, top_k=1, aux_loss=1.0)), torch.float32)
    torch.nn.init.eye_(router.weight)
    aux = router.statistics.SCALARS.index("aux_loss")
    tokens = router.statistics.SCALARS.index("tokens")
    router(torch.eye(4).repeat(8, 1))
    balanced = router.statistics.scalars[aux] / router.statistics.scalars[tokens]
    router.statistics.take(torch.device("cpu"))
    router(torch.eye(4)[:1].repeat(32, 1) * 5)
    skewed = router.statistics.scalars[aux] / router.statistics.scalars[tokens]
    assert balanced == pytest.approx(1.0)
    assert skewed > 3


def test_balance_and_z_loss_reach_the_router_through_its_weight() -> None:
    """The auxiliary losses have the gradient that autograd gives the formulas themselves."""
    moe = Moe(experts=4, top_k=2, aux_loss=0.3, z_loss=0.2)
    router = Router(Model(hidden=6, moe=moe), torch.float32)
    torch.manual_seed(1)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(20, 6)
    (router(x).weights.sum() * 0).backward()
    got = router.weight.grad.clone()
    router.weight.grad = None
    logits = x @ router.weight.T
    probabilities = logits.softmax(-1)
    share = torch.bincount(probabilities.topk(2).indices.flatten(), minlength=4) / 40
    loss = 0.3 * 4 * (share * probabilities.mean(0)).sum() + 0.2 * logits.logsumexp(-1).square().mean()
    loss.backward()
    torch.testing.assert_close(got, router.weight.grad)
