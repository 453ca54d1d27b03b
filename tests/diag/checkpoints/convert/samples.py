"""Small sources for the converter's tests: a model of this trainer's names, written without training anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, FFN, EXPERT_FFN, VOCAB = 16, 4, 2, 4, 4, 24, 8, 32
FACTS = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


def mixtral(layers: int = 2, seed: int = 0, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names of Mixtral; every element differs."""
    random = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    made = {"model.embed_tokens.weight": some(VOCAB, HIDDEN), "model.norm.weight": some(HIDDEN),
            "lm_head.weight": some(VOCAB, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        made |= {
            f"{at}input_layernorm.weight": some(HIDDEN), f"{at}post_attention_layernorm.weight": some(HIDDEN),
            f"{at}self_attn.q_proj.weight": some(HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": some(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": some(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": some(HIDDEN, HEADS * HEAD_DIM),
            f"{at}block_sparse_moe.gate.weight": some(EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            to = f"{at}block_sparse_moe.experts.{expert}."
            made |= {f"{to}w1.weight": some(EXPERT_FFN, HIDDEN), f"{to}w3.weight": some(EXPERT_FFN, HIDDEN),
                     f"{to}w2.weight": some(HIDDEN, EXPERT_FFN)}
    return made


def write_hf(folder: Path, weights: dict[str, np.ndarray], *, optimizer: bool = True) -> Path:
    """A Hugging Face folder with config.json and, as the converter writes them, optimizer states."""
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FACTS))
    if optimizer:
        states = {}
        for number, (name, value) in enumerate(weights.items()):
            states[f"optimizer.state.{name}.exp_avg"] = value * np.float32(0.5) + number
            states[f"optimizer.state.{name}.exp_avg_sq"] = value * value
            states[f"optimizer.state.{name}.step"] = np.full((1,), 7, np.float32)
        (folder / "optimizer").mkdir()
        save_file(states, folder / "optimizer" / "optimizer.safetensors")
    return folder


def read_all(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of every tensor, through the doctor's readers."""
    from diag.checkpoints import open_checkpoint

    found = {}
    for path in [folder, folder / "optimizer"] if (folder / "optimizer").is_dir() else [folder]:
        checkpoint = open_checkpoint(path)
        assert not checkpoint.problems, checkpoint.problems
        for tensor in checkpoint.tensors.values():
            found[tensor.name] = (tensor.dtype, tensor.shape, checkpoint.read(tensor).tobytes())
    return found
