"""Where the model comes from: a run's TOML or preset, a Hugging Face config.json, a file of Megatron-LM arguments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from diag.errors import UsageError
from pdtrain.config.load import Loaded, parse_run, presets, read_run
from pdtrain.config.mistakes import show
from pdtrain.plan.extras import Extras, with_extras
from pdtrain.plan.files import read_regular
from pdtrain.plan.hugging_face import Keys, from_hugging_face, ungated

#: Largest file that is read as a configuration.
LIMIT_BYTES = 4 << 20
#: As parallel.ranks.
MOST_DEVICES = 1 << 20


def read_source(
    path: Path | None, *, preset: str | None, overrides: Sequence[str], gpus: int | None, free: bool = False
) -> Loaded:
    """The run to plan. A batch that does not fit `gpus` is raised to one that does, with a warning.

    free: degrees and `gpus` need not fit together yet; the batch stays, unless it is smaller than `gpus`.

    Raises:
        UsageError: no such file, or what it says makes no model.
    """
    if free and gpus is not None:
        return _freed(read_source(path, preset=preset, overrides=overrides, gpus=None), gpus)
    if path is None and preset is None:
        raise UsageError(f"give a CONFIG file or --preset NAME; presets: {', '.join(presets())}")
    if path is None or preset is not None:
        return read_run(path, preset=preset, overrides=overrides, world=gpus)
    text = _text(path)
    foreign = _foreign(path, text)
    if foreign is None:
        return read_run(path, overrides=overrides, world=gpus)
    tables, extras, warnings = foreign
    loaded = parse_run(tomli_w.dumps(tables), str(path), path.stem, overrides=overrides, world=gpus)
    run = msgspec.structs.replace(loaded.run, model=with_extras(loaded.run.model, extras))
    return Loaded(run, loaded.name, (*warnings, *loaded.warnings))


def _freed(loaded: Loaded, gpus: int) -> Loaded:
    run, replace = loaded.run, msgspec.structs.replace
    if gpus > MOST_DEVICES:
        raise UsageError(f"--gpus {gpus}: a plan is made for at most {MOST_DEVICES:,} devices")
    batch, warnings = run.train.train_batch or 1, loaded.warnings
    if batch < gpus:
        warnings = (*warnings, f"train.train_batch = {batch} gives {gpus} devices nothing to do: swept with {2 * gpus}")
        batch = 2 * gpus
    train = replace(run.train, train_batch=batch, accumulation=None)
    return Loaded(replace(run, train=train, parallel=replace(run.parallel, ranks=gpus)), loaded.name, warnings)


def _text(path: Path) -> str:
    try:
        return read_regular(path, LIMIT_BYTES, show(str(path))).decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        return ""  # read_run offers the preset of that name


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"not valid JSON: {error}" if text.strip() else "an empty file"
        raise UsageError(f"{path}: {problem}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: not a JSON object")
    return data


def _foreign(path: Path, text: str) -> tuple[dict[str, Any], Extras, list[str]] | None:
    """TOML tables, what they cannot say, and warnings, for a file that is not a run's TOML; None: it is."""
    if text.lstrip().startswith("{") or (path.suffix == ".json" and path.exists()):
        return from_hugging_face(_json(path, text), str(path))
    if re.search(r"--(num-layers|hidden-size)\b", text):
        return from_megatron(_arguments(text, str(path)), str(path))
    return None


def _arguments(text: str, where: str) -> dict[str, Any]:
    """`--name value` pairs of a shell script or an argument file; flags are True. Nothing is expanded or run."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"{where}: unbalanced quotes: {error}") from None
    found: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for word in words:
        if match := re.fullmatch(r"(?:export )?([A-Za-z_]\w*)=(.*)", word):
            variables[match[1]] = match[2]
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].strip("()").partition("=")
        following = words[index + 1] if index + 1 < len(words) else ""
        if not equals and following and not following.startswith("--"):
            value = following.strip("()")
        if reference := re.fullmatch(r"\$\{?(\w+)(?::-([^}]*))?\}?", value):
            value = variables.get(reference[1], reference[2] or value)
        found[name.replace("-", "_")] = _number(value) if value else True
    return found


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def from_megatron(arguments: dict[str, Any], where: str) -> tuple[dict[str, Any], Extras, list[str]]:
    """Tables of a run for Megatron-LM's arguments: model, degrees, batch; what its blocks have beside; warnings."""
    keys, warnings = Keys(arguments, where), []
    hidden, heads, layers = keys.whole("hidden_size"), keys.whole("num_attention_heads"), keys.whole("num_layers")
    if not heads:
        raise UsageError(f"{where}: --num-attention-heads 0 makes no model")
    ffn = keys.whole("ffn_hidden_size", default=4 * hidden)
    if "swiglu" not in arguments:
        warnings.append(ungated(where, "a model without --swiglu", ffn))
        ffn = round(ffn * 2 / 3)
    model: dict[str, Any] = {
        "vocab_size": keys.whole("padded_vocab_size", "vocab_size", default=128_256), "hidden": hidden,
        "layers": layers, "heads": heads, "ffn_hidden": ffn,
        "kv_heads": keys.whole("num_query_groups", default=heads),
        "head_dim": keys.whole("kv_channels", default=hidden // heads), "dense_layers": layers,
        "tie_embeddings": "untie_embeddings_and_output_weights" not in arguments,
    }  # fmt: skip
    if not {"padded_vocab_size", "vocab_size"} & set(arguments):
        warnings.append(f"{where}: no --vocab-size; 128,256 taken")
    experts = keys.whole("num_experts", default=0)
    if experts:
        wide = keys.whole("moe_shared_expert_intermediate_size", default=0)
        expert_hidden = keys.whole("moe_ffn_hidden_size", default=ffn)
        pattern = str(arguments.get("moe_layer_freq", 1))
        dense = re.match(r"\(?\[0\](?:\*(\d+))?", pattern)
        model["dense_layers"] = int(dense[1] or 1) if dense else 0
        model["moe"] = {
            "experts": experts, "top_k": keys.whole("moe_router_topk", default=2), "expert_hidden": expert_hidden,
            "shared_experts": round(wide / expert_hidden) if wide and expert_hidden else 0,
            "groups": keys.whole("moe_router_num_groups", default=1),
            "top_groups": keys.whole("moe_router_group_topk", default=1),
        }  # fmt: skip
        if "moe_router_enable_expert_bias" in arguments:
            model["moe"] |= {"score": "sigmoid", "bias_update_speed": 0.001, "aux_loss": 1e-4}
    if "multi_latent_attention" in arguments:
        model["attention"] = "mla"
        model["mla"] = {
            "q_lora_rank": keys.whole("q_lora_rank", default=0),
            "kv_lora_rank": keys.whole("kv_lora_rank", default=512),
            "qk_nope_head_dim": keys.whole("qk_head_dim", default=128),
            "qk_rope_head_dim": keys.whole("qk_pos_emb_head_dim", default=64),
            "v_head_dim": keys.whole("v_head_dim", default=128),
        }  # fmt: skip
    tensor, pipeline = (
        keys.whole("tensor_model_parallel_size", default=1), keys.whole("pipeline_model_parallel_size", default=1)
    )  # fmt: skip
    expert = keys.whole("expert_model_parallel_size", default=1)
    ranks = keys.whole("world_size", default=0) or pipeline * max(tensor, expert)
    train: dict[str, Any] = {
        "sequence_length": keys.whole("seq_length", default=4096),
        "micro_batch": keys.whole("micro_batch_size", default=1),
    }  # fmt: skip
    if batch := keys.whole("global_batch_size", default=0):
        train["train_batch"] = batch
    if steps := keys.whole("train_iters", default=0):
        train["steps"] = steps
    tables: dict[str, Any] = {
        "model": model, "train": train, "precision": {"all": "bf16" if {"bf16", "fp16"} & set(arguments) else "fp32"},
        "parallel": {"ranks": ranks, "pipeline": pipeline, "fsdp": "use_distributed_optimizer" in arguments},
        "modules": {"attention": {"tensor": tensor}, "experts": {"expert": expert}},
    }  # fmt: skip
    if not {"bf16", "fp16"} & set(arguments):
        warnings.append(f"{where}: neither --bf16 nor --fp16: planned in FP32, as Megatron-LM would run it")
    for name, option in (("recompute_granularity", "--recompute"), ("recompute_modules", "--recompute-modules"),
                         ("context_parallel_size", "--context"), ("num_layers_per_virtual_pipeline_stage", "--virtual"),
                         ("use_precision_aware_optimizer", "--gradient-dtype, --moment-dtype")):  # fmt: skip
        if arguments.get(name) not in (None, 1):
            warnings.append(f"{where}: --{name.replace('_', '-')} is not read; say it with {option}")
    bias = "disable_bias_linear" not in arguments
    extras = Extras(
        qk_norm="head" if "qk_layernorm" in arguments and "multi_latent_attention" not in arguments else "none",
        qkv_bias=bias or "add_qkv_bias" in arguments, out_bias=bias,
    )  # fmt: skip
    return tables, extras, warnings
