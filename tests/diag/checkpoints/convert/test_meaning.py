"""The converted weights mean the same: transformers computes this trainer's logits from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra 'train' is not installed")

import torch

from diag.checkpoints.convert.reshard import Options, Wish, reshard
from pdtrain.config.schema import Moe
from tests.small_run import NumberedSequences, small_run


def save(run: Any, root: Path) -> Any:
    """A checkpoint of fresh weights, large enough to make the logits differ; the model."""
    from pdtrain.checkpoint import Checkpointer
    from pdtrain.model.build import build_model
    from pdtrain.optim import build_optimizer
    from pdtrain.parallel.gradients import rows_of

    model = build_model(run)
    rows = rows_of(model, None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    for buffer in model.buffers():
        buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
    assert Checkpointer(root, run, model, build_optimizer(run, rows), rows, "x").save(1, 1)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_transformers_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'bench' is not installed")
    if family == "mixtral":
        moe = Moe(experts=8, top_k=2, expert_hidden=32, shared_experts=0)
        run = small_run(model={"attention": "gqa", "dense_layers": 0, "moe": moe})
    else:
        moe = Moe(experts=8, top_k=2, expert_hidden=32, shared_experts=1, score="sigmoid", groups=2, top_groups=1,
                  bias_update_speed=0.001, route_scale=2.5)
        run = small_run(model={"attention": "mla", "moe": moe})
    model, m = save(run, tmp_path / "ckpt"), run.model
    reshard(Wish(source=tmp_path / "ckpt", destination=tmp_path / "hf", options=Options(to="hf"), weights_only=True))
    common = {
        "vocab_size": m.vocab_size, "hidden_size": m.hidden, "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads, "rope_theta": m.rope_theta, "rms_norm_eps": m.norm_eps,
        "tie_word_embeddings": False, "num_experts_per_tok": 2,
    }
    if family == "mixtral":
        config = transformers.MixtralConfig(
            **common, num_key_value_heads=m.kv_heads, head_dim=m.head_dim, num_local_experts=8, intermediate_size=32,
            sliding_window=None, architectures=["MixtralForCausalLM"])
    else:
        config = transformers.DeepseekV3Config(
            **common, num_key_value_heads=m.heads, intermediate_size=m.ffn_hidden, moe_intermediate_size=32,
            n_shared_experts=1, n_routed_experts=8, routed_scaling_factor=2.5, n_group=2, topk_group=1,
            kv_lora_rank=m.mla.kv_lora_rank, q_lora_rank=m.mla.q_lora_rank, v_head_dim=m.mla.v_head_dim,
            qk_rope_head_dim=m.mla.qk_rope_head_dim, qk_nope_head_dim=m.mla.qk_nope_head_dim,
            first_k_dense_replace=1, norm_topk_prob=True, rope_interleave=True,
            architectures=["DeepseekV3ForCausalLM"])
    config.save_pretrained(tmp_path / "hf")
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(NumberedSequences().sequences(0, 2)[:, :32])
    with torch.no_grad():
        mine, theirs = model(tokens), other(tokens).logits
    assert mine.abs().max() > 1
    assert (mine - theirs).abs().max() < 1e-4
