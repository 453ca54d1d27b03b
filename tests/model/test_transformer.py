"""Shape, precision and initialisation of the whole model."""

from __future__ import annotations

import msgspec
import pytest
import torch

from pdtrain.config import load_run
from pdtrain.model import build_model
from pdtrain.model.build import build_on_meta
from pdtrain.model.loss import cross_entropy
from pdtrain.model.transformer import row_of
from pdtrain.plan.parameters import count
from tests.small_run import small_run


@pytest.mark.parametrize("preset", ["tiny", "sparrow", "moe-small", "deepseek-v3"])
def test_the_model_has_the_parameters_that_the_plan_counts(preset: str) -> None:
    run = load_run(None, preset=preset)
    model, planned = build_on_meta(run), count(run.model)
    by_row: dict[str, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        by_row[row_of(name)] = by_row.get(row_of(name), 0) + tensor.numel()
    assert by_row == {row: entry.total for row, entry in planned.rows.items() if entry.total}
    assert sum(by_row.values()) == planned.total


def test_golden_count_of_deepseek_v3() -> None:
    model = build_on_meta(load_run(None, preset="deepseek-v3"))
    weights = sum(p.numel() for p in model.parameters())
    bias = sum(b.numel() for b in model.buffers())
    assert (weights + bias, bias) == (671_026_419_200, 14_848)


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_a_token_sees_only_its_past(attention: str) -> None:
    model = build_model(small_run(model={"attention": attention})).eval()
    tokens = torch.randint(0, 64, (1, 24))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 64
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().sum(-1)[0]
    assert difference[:12].max() < 1e-5  # not 0: another grouping of rows rounds differently
    assert difference[12:].min() > 1e-4


def test_grouped_query_attention_equals_repeated_key_heads() -> None:
    """A model with 2 key heads equals one with 4 whose key and value weights are the 2 repeated."""
    run = small_run()
    grouped = build_model(run).eval()
    full = build_model(msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, kv_heads=4))).eval()
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("wk.weight", "wv.weight")):
            heads = state[name].unflatten(0, (2, 16))
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(full(tokens), grouped(tokens))


def test_router_norms_and_loss_are_fp32_when_everything_else_is_bf16() -> None:
    model = build_model(small_run(dtype="bf16"))
    seen: dict[str, torch.dtype] = {}

    def note(name: str):
        def hook(module: torch.nn.Module, args: tuple, out) -> None:
            seen[name] = getattr(out, "weights", out).dtype

        return hook

    for name, module in model.named_modules():
        if name.endswith(("norm", "router", "experts", "attention", "head", "embed")):
            module.register_forward_hook(note(name.split(".")[-1]))
    tokens = torch.randint(0, 64, (2, 17))
    loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    assert seen["attention_norm"] == seen["ffn_norm"] == seen["norm"] == seen["router"] == loss.dtype == torch.float32
    assert seen["experts"] == seen["attention"] == seen["head"] == seen["embed"] == torch.bfloat16
    loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_row_overrides_the_precision_of_all() -> None:
    run = small_run(dtype="bf16")
    policy = msgspec.structs.replace(run.modules.experts, dtype="fp32")
    run = msgspec.structs.replace(run, modules=msgspec.structs.replace(run.modules, experts=policy))
    model = build_model(run)
    moe = model.layers()[1].moe
    assert moe is not None and moe.experts.dtype == torch.float32
    assert model.layers()[0].attention.dtype == torch.bfloat16


def test_initialisation_depends_on_seed_and_name_only_and_no_two_experts_are_alike() -> None:
    first, again = build_model(small_run()), build_model(small_run())
    other = build_model(small_run(train={"seed": 1}))
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert name.endswith("norm.weight") or not torch.equal(a, c), name
    experts = first.layers()[1].moe.experts.w1  # type: ignore[union-attr]
    flat = torch.nn.functional.normalize(experts.detach().flatten(1), dim=1)
    similarity = (flat @ flat.T - torch.eye(len(flat))).abs().max()
    assert similarity < 0.1, "experts must not start from one seed"


def test_tied_embeddings_share_one_weight() -> None:
    model = build_model(small_run(model={"tie_embeddings": True}))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
