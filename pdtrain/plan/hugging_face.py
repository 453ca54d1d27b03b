"""A Hugging Face config.json as a model to plan: Llama, Qwen, Mixtral, DBRX, OLMoE, DeepSeek, GLM, GPT-OSS, Llama 4.

For the model types of `EXACT` the parameter count is that of the published weights, entry for entry (multi-token
prediction and vision towers left out, which is said). Of other types a decoder of the usual build is planned, with a
warning; state-space and linear-attention layers are refused: they have no attention to plan.
"""

from __future__ import annotations

import math
from typing import Any

from diag.errors import UsageError
from pdtrain.config.mistakes import show
from pdtrain.plan.extras import Extras

#: Of a number in a foreign configuration: what is more is a mistake, not a model.
LARGEST = 1 << 40
#: Model types whose count was compared with the published model, built from its own code (docs/plan.md).
EXACT = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "deepseek_v2",
         "deepseek_v3", "deepseek_v32", "kimi_k2", "olmoe", "dbrx", "gpt_oss", "glm4_moe",
         "granitemoe", "llama4_text", "minimax_m2")  # fmt: skip
#: Older families: two matrices per FFN, not three.
UNGATED = ("gpt2", "gpt_neox", "bloom", "falcon", "opt", "mpt")
#: Keys that only decoders with other layers than attention have.
NO_ATTENTION = ("hybrid_override_pattern", "layers_block_type", "mamba_num_heads", "mamba_d_state", "mamba_d_ssm",
                "ssm_state_size", "linear_num_value_heads", "attn_layer_period", "rwkv_hidden_size",
                "linear_attn_config")  # fmt: skip
#: Other names of the same thing: DBRX's.
ALIASES = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}


class Keys:
    """Typed access to a foreign configuration: one clear line for what is missing or of the wrong kind."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, as an integer.

        Raises:
            UsageError: none is there and there is no default, or it is no whole number.
        """
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf or value != int(value):
                raise UsageError(f"{self.where}: {name} = {show(value)} is no whole number")
            if value > LARGEST:
                raise UsageError(f"{self.where}: {name} = {show(value)} is larger than any model; at most {LARGEST:,}")
            return int(value)
        if default is None:
            raise UsageError(f"{self.where}: has no {' or '.join(names)}")
        return default


def ungated(where: str, what: str, ffn: int) -> str:
    """The warning for an FFN of two matrices."""
    return f"{where}: {what} has an ungated FFN of {ffn}; planned as a gated one of {round(ffn * 2 / 3)}"


def from_hugging_face(data: dict[str, Any], where: str) -> tuple[dict[str, Any], Extras, list[str]]:
    """(tables of a run, what its blocks have beside them, warnings) for a decoder's config.json.

    Raises:
        UsageError: no decoder with attention in every block, or numbers that make no model.
    """
    warnings: list[str] = []
    data = _text_part(data, where, warnings)
    kind = str(data.get("model_type", ""))
    _refuse_hybrids(data, kind, where)
    keys = Keys(data, where)
    hidden, layers, heads = (
        keys.whole("hidden_size", "n_embd"),
        keys.whole("num_hidden_layers", "n_layer"),
        keys.whole("num_attention_heads", "n_head"),
    )
    if not heads or not layers:
        raise UsageError(f"{where}: {layers} layers of {heads} heads make no model")
    ffn = keys.whole("intermediate_size", "n_inner", default=4 * hidden)
    dense_ffn = keys.whole("intermediate_size_mlp", default=ffn) or ffn
    tied = kind.startswith(("gemma", "gpt2", "bloom", "opt", "falcon"))  # their default; others' is untied
    model: dict[str, Any] = {
        "vocab_size": keys.whole("vocab_size"), "hidden": hidden, "layers": layers, "heads": heads,
        "kv_heads": keys.whole("num_key_value_heads", default=heads) or heads,
        "head_dim": keys.whole("head_dim", default=hidden // heads) or hidden // heads,
        "ffn_hidden": dense_ffn, "tie_embeddings": bool(data.get("tie_word_embeddings", tied)), "dense_layers": layers,
    }  # fmt: skip
    experts = keys.whole("n_routed_experts", "num_local_experts", "num_experts", default=0)
    if experts:
        model |= _experts(keys, kind, layers, experts, ffn, warnings)
    if data.get("kv_lora_rank"):
        model["attention"] = "mla"
        model["mla"] = {
            "q_lora_rank": keys.whole("q_lora_rank", default=0), "kv_lora_rank": keys.whole("kv_lora_rank"),
            "qk_nope_head_dim": keys.whole("qk_nope_head_dim"), "qk_rope_head_dim": keys.whole("qk_rope_head_dim"),
            "v_head_dim": keys.whole("v_head_dim"),
        }  # fmt: skip
    if kind in UNGATED:
        model["ffn_hidden"] = max(1, round(ffn * 2 / 3))
        warnings.append(ungated(where, kind, ffn))
    _say_what_is_left_out(data, kind, keys, warnings)
    train = {"sequence_length": 4096, "micro_batch": 1}
    return {"model": model, "precision": {"all": "bf16"}, "train": train}, _extras(keys, kind), warnings


def _text_part(data: dict[str, Any], where: str, warnings: list[str]) -> dict[str, Any]:
    """The language model's part of a configuration, under the usual names."""
    for inner in ("text_config", "language_config", "llm_config"):
        if isinstance(data.get(inner), dict):
            outer, data = data, data[inner]
            data = {"tie_word_embeddings": outer.get("tie_word_embeddings", False)} | data
            if "vision_config" in outer:
                warnings.append(f"{where}: the vision tower is left out")
            break
    data = {ALIASES.get(name, name): value for name, value in data.items()}
    attention, ffn = data.get("attn_config"), data.get("ffn_config")
    if isinstance(attention, dict):
        data |= {"num_key_value_heads": attention.get("kv_n_heads")}
    if isinstance(ffn, dict):
        data |= {"intermediate_size": ffn.get("ffn_hidden_size"), "num_experts": ffn.get("moe_num_experts"),
                 "num_experts_per_tok": ffn.get("moe_top_k")}  # fmt: skip
    return data


def _refuse_hybrids(data: dict[str, Any], kind: str, where: str) -> None:
    layers = data.get("layer_types")
    other = sorted({str(layer) for layer in layers if "attention" not in str(layer) or "linear" in str(layer)}) \
        if isinstance(layers, list) else []  # fmt: skip
    found = [f"layers of type {show(layer)}" for layer in other] or [k for k in NO_ATTENTION if data.get(k)]
    if found or kind in ("mamba", "mamba2", "rwkv", "rwkv7"):
        what = ", ".join(found[:3]) or f"model type {show(kind)}"
        raise UsageError(f"{where}: {what}: a plan knows softmax attention in every block; this model has state-space "
                         "or linear-attention layers, whose memory and FLOP it cannot tell")  # fmt: skip


def _experts(keys: Keys, kind: str, layers: int, experts: int, ffn: int, warnings: list[str]) -> dict[str, Any]:
    """`dense_layers` and `moe` of a model with experts."""
    data, where = keys.data, keys.where
    expert_hidden = keys.whole("moe_intermediate_size", default=ffn)
    shared = keys.whole("n_shared_experts", "num_shared_experts", default=1 if kind == "llama4_text" else 0)
    wide = keys.whole("shared_expert_intermediate_size", default=0)
    if wide and not shared and expert_hidden:
        shared = max(1, round(wide / expert_hidden))
        if shared * expert_hidden != wide:
            warnings.append(f"{where}: shared expert of {wide} taken as {shared} x {expert_hidden}")
    moe: dict[str, Any] = {
        "experts": experts, "expert_hidden": expert_hidden, "shared_experts": shared,
        "top_k": keys.whole("num_experts_per_tok", "num_experts_per_token", "experts_per_token", default=2),
        "groups": keys.whole("n_group", default=1) or 1, "top_groups": keys.whole("topk_group", default=1) or 1,
    }  # fmt: skip
    if data.get("topk_method") == "noaux_tc" or kind == "glm4_moe" or data.get("use_routing_bias"):
        moe |= {"score": "sigmoid", "bias_update_speed": 0.001, "aux_loss": 1e-4}
    dense = _dense_blocks(keys, layers)
    if dense != list(range(len(dense))):
        warnings.append(f"{where}: {len(dense)} dense blocks lie between the {layers - len(dense)} with experts; "
                        "planned as the first ones, which leaves every sum the same")  # fmt: skip
    return {"dense_layers": len(dense), "moe": moe}


def _dense_blocks(keys: Keys, layers: int) -> list[int]:
    """Indices of the blocks without experts."""
    data = keys.data
    first = keys.whole("first_k_dense_replace", default=0)
    listed = data.get("moe_layers")
    if isinstance(listed, list) and listed:
        return [index for index in range(layers) if index not in listed]
    names = data.get("mlp_layer_types")
    if isinstance(names, list) and names:
        return [index for index, name in enumerate(names[:layers]) if name == "dense"]
    pattern = data.get("moe_layer_freq")
    if isinstance(pattern, list):
        return [index for index, sparse in enumerate(pattern[:layers]) if not sparse]
    step = keys.whole("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", default=1) or 1
    only = data.get("mlp_only_layers")
    dense = set(only) if isinstance(only, list) else set()
    if "moe_layer_freq" in data:  # DeepSeek counts from 0
        return [i for i in range(layers) if i < first or i % step]
    return [i for i in range(layers) if i < first or (i + 1) % step or i in dense]


def _extras(keys: Keys, kind: str) -> Extras:
    data = keys.data
    mla = bool(data.get("kv_lora_rank"))
    bias = bool(data.get("attention_bias", False)) and not mla
    oss = kind == "gpt_oss"
    if kind.startswith("qwen3") or (kind == "glm4_moe" and data.get("use_qk_norm")):
        norm = "head"
    elif kind == "olmoe" or (kind == "minimax_m2" and data.get("use_qk_norm", True)):
        norm = "full"
    else:
        norm = "none"
    qwen2 = kind in ("qwen2", "qwen2_moe")
    return Extras(
        qk_norm=norm,  # type: ignore[arg-type]
        qkv_bias=bias or oss or (qwen2 and bool(data.get("qkv_bias", True))),
        out_bias=(bias or oss) and kind not in ("glm4_moe", "qwen2", "qwen2_moe"),
        sinks=oss, router_bias=oss, expert_bias=oss,
        shared_gate=kind == "qwen2_moe" and bool(data.get("shared_expert_intermediate_size")),
        index_heads=keys.whole("index_n_heads", default=0) if mla else 0,
        index_dim=keys.whole("index_head_dim", default=0) if mla else 0,
    )  # fmt: skip


def _say_what_is_left_out(data: dict[str, Any], kind: str, keys: Keys, warnings: list[str]) -> None:
    """Warnings for what the plan does not hold."""
    where = keys.where
    if extra := keys.whole("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", default=0):
        warnings.append(f"{where}: {extra} layer{'s' if extra > 1 else ''} of multi-token prediction left out, "
                        "memory and time too")  # fmt: skip
    if data.get("index_n_heads"):
        warnings.append(f"{where}: sparse attention is planned in full: its FLOP are an upper bound")
    layers = data.get("layer_types")
    windows = isinstance(layers, list) and any("sliding" in str(x) or "chunked" in str(x) for x in layers)
    if windows or data.get("attention_chunk_size"):
        warnings.append(f"{where}: layers with a window are planned with full attention: FLOP above its length are "
                        "an upper bound")  # fmt: skip
    if kind not in EXACT and kind not in UNGATED:
        warnings.append(f"{where}: model type {show(kind) if kind else 'not said'}: planned as a usual decoder with "
                        "gated FFNs and two norms per block; compare the parameter count")  # fmt: skip
