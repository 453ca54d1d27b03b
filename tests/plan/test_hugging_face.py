"""Published configurations: the count is that of the published weights, and what cannot be planned is refused.

The expected counts are those of the models' own code in transformers 5.23, built on the meta device from the published
config.json, multi-token prediction left out, routing biases counted.
"""

from __future__ import annotations

import json

import pytest

from diag.errors import UsageError
from pdtrain.config.schema import Model
from pdtrain.plan.extras import extras_of, plain
from pdtrain.plan.flops import per_token
from pdtrain.plan.parameters import count
from pdtrain.plan.setup import Setup, stages
from pdtrain.plan.shrink import shrink
from pdtrain.plan.sources import read_source
from pdtrain.plan.states import entries, stage_tensors


def decoder(kind, hidden, layers, heads, kv, vocab, **more):
    return {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "vocab_size": vocab} | more  # fmt: skip


def routed(experts, top, width, **more):
    return {"num_experts": experts, "num_experts_per_tok": top, "moe_intermediate_size": width} | more


LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GLM = {"attention_bias": True, "head_dim": 128, "n_shared_experts": 1, "num_nextn_predict_layers": 1}
V3 = decoder("deepseek_v3", 7168, 61, 128, 128, 129280, intermediate_size=18432, first_k_dense_replace=3,
             n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
             moe_layer_freq=1, topk_method="noaux_tc", n_group=8, topk_group=4, **LATENT)  # fmt: skip
LLAMA4 = {"head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1}
PUBLISHED = {
    "Mixtral 8x7B": (46_702_792_704, decoder("mixtral", 4096, 32, 32, 8, 32000, intermediate_size=14336,
                                             num_local_experts=8, num_experts_per_tok=2)),
    "Qwen3 0.6B, tied": (596_049_920, decoder("qwen3", 1024, 28, 16, 8, 151936, head_dim=128, intermediate_size=3072,
                                              tie_word_embeddings=True)),
    "Qwen3 30B-A3B": (30_532_122_624, decoder("qwen3_moe", 2048, 48, 32, 4, 151936, head_dim=128,
                                              intermediate_size=6144, decoder_sparse_step=1, mlp_only_layers=[],
                                              **routed(128, 8, 768))),
    "Qwen3 235B-A22B": (235_093_634_560, decoder("qwen3_moe", 4096, 94, 64, 4, 151936, head_dim=128,
                                                 **routed(128, 8, 1536))),
    "Qwen1.5 MoE A2.7B": (14_315_784_192, decoder("qwen2_moe", 2048, 24, 16, 16, 151936, intermediate_size=5632,
                                                  shared_expert_intermediate_size=5632, **routed(60, 4, 1408))),
    "OLMoE 1B-7B": (6_919_161_856, decoder("olmoe", 2048, 16, 16, 16, 50304, intermediate_size=1024, num_experts=64,
                                           num_experts_per_tok=8)),
    "DBRX": (131_596_523_520, {
        "model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16,
                                                         "moe_top_k": 4}}),
    "DeepSeek V2": (235_741_434_880, decoder("deepseek_v2", 5120, 60, 128, 128, 102400, intermediate_size=12288,
                                             first_k_dense_replace=1, n_routed_experts=160, num_experts_per_tok=6,
                                             moe_intermediate_size=1536, n_shared_experts=2, moe_layer_freq=1,
                                             **LATENT)),
    "DeepSeek V3": (671_026_419_200, V3),
    "DeepSeek V3.2": (671_877_944_064, V3 | {"model_type": "deepseek_v32", "index_n_heads": 64,
                                             "index_head_dim": 128}),
    "GPT-OSS 20B": (20_914_757_184, decoder("gpt_oss", 2880, 24, 64, 8, 201088, head_dim=64, intermediate_size=2880,
                                            num_local_experts=32, num_experts_per_tok=4, attention_bias=True,
                                            layer_types=["sliding_attention", "full_attention"] * 12)),
    "GLM 4.5 Air": (106_852_251_264, decoder("glm4_moe", 4096, 46, 96, 8, 151552, intermediate_size=10944,
                                             first_k_dense_replace=1, use_qk_norm=False, n_routed_experts=128,
                                             num_experts_per_tok=8, moe_intermediate_size=1408, **GLM)),
    "GLM 4.5": (352_797_829_024, decoder("glm4_moe", 5120, 92, 96, 8, 151552, intermediate_size=12288,
                                         first_k_dense_replace=3, use_qk_norm=True, n_routed_experts=160,
                                         num_experts_per_tok=8, moe_intermediate_size=1536, **GLM)),
    "Llama 4 Scout": (107_769_861_120, {"vision_config": {}, "text_config": decoder(
        "llama4_text", 5120, 48, 40, 8, 202048, num_local_experts=16, interleave_moe_layer_step=1, **LLAMA4)}),
    "Llama 4 Maverick": (400_711_848_960, {"text_config": decoder(
        "llama4_text", 5120, 48, 40, 8, 202048, num_local_experts=128, interleave_moe_layer_step=2, **LLAMA4)}),
    "MiniMax M2.5": (228_689_764_864, decoder("minimax_m2", 3072, 62, 48, 8, 200064, head_dim=128,
                                              intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8,
                                              use_qk_norm=True, use_routing_bias=True)),
    "Llama 3.1 405B": (405_853_388_800, decoder("llama", 16384, 126, 128, 8, 128256, intermediate_size=53248)),
}  # fmt: skip


def planned(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read_source(path, preset=None, overrides=[], gpus=8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(tmp_path, name):
    total, config = PUBLISHED[name]
    run = planned(tmp_path, config).run
    assert count(run.model).total == total
    # and the tensors that are spread over ranks are the same ones
    tensors = stage_tensors(Setup(run), stages(Setup(run))[0])
    assert sum(number * entries(tensor.shape) for tensor, number in tensors) == total


def test_dense_blocks_between_others_are_counted_where_they_are(tmp_path):
    config = PUBLISHED["Qwen3 30B-A3B"][1]
    for more, dense in (({"mlp_only_layers": [0, 5]}, 2), ({"decoder_sparse_step": 2}, 24),
                        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, 33)):  # fmt: skip
        found = planned(tmp_path, config | more)
        assert found.run.model.dense_layers == dense
        assert ("dense blocks lie between" in " ".join(found.warnings)) == (dense > 0)


def test_what_is_left_out_is_said(tmp_path):
    said = " ".join(planned(tmp_path, PUBLISHED["GLM 4.5"][1]).warnings)
    assert "1 layer of multi-token prediction left out" in said
    assert "vision tower" in " ".join(planned(tmp_path, PUBLISHED["Llama 4 Scout"][1]).warnings)
    assert "window" in " ".join(planned(tmp_path, PUBLISHED["GPT-OSS 20B"][1]).warnings)
    unknown = planned(tmp_path, decoder("brandnew", 64, 2, 2, 2, 512))
    assert 'model type "brandnew"' in " ".join(unknown.warnings)


@pytest.mark.parametrize("more", [
    {"hybrid_override_pattern": "M-M*-"}, {"layer_types": ["linear_attention", "full_attention"]},
    {"model_type": "mamba2"}, {"layer_types": ["conv", "full_attention"]}, {"attn_layer_period": 8},
])  # fmt: skip
def test_layers_without_attention_are_refused(tmp_path, more):
    with pytest.raises(UsageError, match="softmax attention in every block"):
        planned(tmp_path, decoder("nemotron_h", 64, 2, 2, 2, 512) | more)


def test_an_empty_file_is_no_model(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    with pytest.raises(UsageError, match="an empty file"):
        read_source(path, preset=None, overrides=[], gpus=8)


def test_what_the_trainer_has_not_is_planned_and_left_out_of_what_it_runs(tmp_path):
    run = planned(tmp_path, PUBLISHED["GPT-OSS 20B"][1]).run
    assert "attention sinks" in Setup(run).runnable
    assert type(plain(run).model) is Model and type(shrink(run).model) is Model
    assert extras_of(plain(run).model).named() == []
    assert per_token(run.model, 4096) == per_token(plain(run).model, 4096)  # biases are no products
