"""Parameter counts: exact for the published shape, and consistent for any other."""

from __future__ import annotations

import msgspec

from pdtrain.config import load_run
from pdtrain.config.schema import MODULES, Mla, Model, Moe
from pdtrain.plan.parameters import count


def test_deepseek_v3_counts_are_the_golden_ones():
    found = count(load_run(preset="deepseek-v3").model)
    assert found.total == 671_026_419_200
    assert (found.trained, found.routing_bias) == (671_026_404_352, 14_848)
    assert found.activated == 36_625_618_432
    assert found.activated_with_embedding == 37_552_297_472
    assert "embedding lookup excluded" in found.convention


def test_deepseek_v3_rows_are_the_published_parts():
    rows = count(load_run(preset="deepseek-v3").model).rows
    assert list(rows) == list(MODULES)
    assert rows["experts"].total == 653_908_770_816
    assert rows["shared_expert"].total == 2_554_331_136
    assert rows["dense_ffn"].total == 1_189_085_184
    assert rows["router"].total == 106_430_464 + 14_848
    assert rows["embed_head"].total == 1_853_358_080
    # attention and its latent norms are 11,413,547,008 together; layer and final norms 881,664
    assert rows["attention"].total + rows["norm"].total == 11_413_547_008 + 881_664


def test_a_model_counted_by_hand():
    model = Model(
        vocab_size=100, hidden=8, layers=3, dense_layers=1, heads=4, kv_heads=2, head_dim=3, ffn_hidden=10,
        moe=Moe(experts=5, top_k=2, expert_hidden=7, shared_experts=2),
    )  # fmt: skip
    rows = count(model).rows
    assert rows["attention"].total == 3 * (8 * 12 + 2 * 8 * 6 + 12 * 8)  # q, k and v, output
    assert rows["experts"].total == 2 * 5 * 3 * 8 * 7
    assert rows["experts"].activated == 2 * 2 * 3 * 8 * 7
    assert rows["shared_expert"].total == rows["shared_expert"].activated == 2 * 2 * 3 * 8 * 7
    assert rows["router"].total == 2 * 8 * 5
    assert rows["dense_ffn"].total == 3 * 8 * 10
    assert rows["norm"].total == 3 * 2 * 8 + 8
    assert rows["embed_head"].total == 2 * 800


def test_tied_embedding_is_counted_once_and_is_active_as_head():
    model = Model(tie_embeddings=True)
    untied, tied = count(Model()), count(model)
    assert untied.total - tied.total == model.vocab_size * model.hidden
    assert tied.activated == untied.activated
    assert tied.activated_with_embedding == tied.activated


def test_full_rank_queries_of_latent_attention():
    mla = Mla(q_lora_rank=0, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    model = Model(hidden=32, layers=1, dense_layers=1, heads=2, attention="mla", mla=mla)
    assert count(model).rows["attention"].total == 32 * 24 + 32 * 20 + 16 * 2 * 16 + 16 * 32
    assert count(model).rows["norm"].total == 2 * 32 + 16 + 32


def test_routing_bias_exists_only_with_bias_balancing():
    assert count(Model()).routing_bias == 0
    biased = msgspec.structs.replace(Model(), moe=Moe(bias_update_speed=0.001))
    assert count(biased).routing_bias == 3 * 8
    assert count(biased).total == count(Model()).total + 24
