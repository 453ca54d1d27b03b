"""Names and shapes against a model: a Hugging Face config.json, or this trainer's config.toml.

The table says which shape follows from which hyper-parameters for the names of the usual decoder-only families; what it
does not know is left alone. Layers and experts are counted by name, whatever the family.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diag.checkpoints.canonical import Checkpoint, Problem, Tensor
from diag.checkpoints.verify.arrays import where_of
from diag.checkpoints.verify.experts import _ids
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural
from diag.errors import UsageError

MAX_BYTES = 16 << 20
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|block)\.(?P<n>\d+)\.")


@dataclass(frozen=True, slots=True)
class Model:
    """What a configuration says, under one set of names; None where it does not."""

    kind: str
    hidden: int | None = None
    vocab: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    experts: int | None = None
    expert_ffn: int | None = None
    tied: bool = False
    dtype: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def load_model(path: str) -> Model:
    """Read a configuration. Raises `UsageError` when it is neither of the two kinds."""
    file = Path(path)
    if file.is_dir():
        file = next((file / n for n in ("config.json", "config.toml") if (file / n).is_file()), file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES)
    except OSError as error:
        raise UsageError(f"--against {path}: {error.strerror or error}") from None
    try:
        if data.lstrip()[:1] == b"{":
            return _hugging_face(json.loads(data))
        values = tomllib.loads(data.decode("utf-8"))
        if isinstance(values.get("model"), dict):
            return _pdtrain(values["model"])
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise UsageError(f"--against {file}: cannot be read: {error}") from None
    raise UsageError(f"--against {file}: neither a Hugging Face config.json nor a run configuration with [model]")


def _hugging_face(values: dict[str, Any]) -> Model:
    values = values | (values["text_config"] if isinstance(values.get("text_config"), dict) else {})

    def first(*names: str) -> int | None:
        return next((values[n] for n in names if type(values.get(n)) is int), None)

    kind = str(values.get("model_type", ""))
    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head")
    experts = first("num_local_experts", "num_experts", "n_routed_experts")
    dense = first("intermediate_size", "ffn_dim")
    return Model(
        kind=kind, hidden=hidden, vocab=first("vocab_size"), layers=first("num_hidden_layers", "n_layer"), heads=heads,
        kv_heads=first("num_key_value_heads", "num_kv_heads") or heads,
        head_dim=first("head_dim") or (hidden // heads if hidden and heads else None), ffn=dense, experts=experts,
        expert_ffn=first("moe_intermediate_size") or dense, tied=values.get("tie_word_embeddings") is True,
        dtype=str(values.get("torch_dtype") or values.get("dtype") or "").removeprefix("torch.") or None,
        extra={"mla": type(values.get("kv_lora_rank")) is int},
    )


def _pdtrain(values: dict[str, Any]) -> Model:
    moe = values.get("moe") if isinstance(values.get("moe"), dict) else {}
    assert isinstance(moe, dict)

    def whole(table: dict[str, Any], name: str) -> int | None:
        return table[name] if type(table.get(name)) is int else None

    return Model(
        kind="pdtrain", hidden=whole(values, "hidden"), vocab=whole(values, "vocab_size"), layers=whole(values,
                                                                                                        "layers"),
        heads=whole(values, "heads"), kv_heads=whole(values, "kv_heads"), head_dim=whole(values, "head_dim"),
        ffn=whole(values, "ffn_hidden"), experts=whole(moe, "experts"), expert_ffn=whole(moe, "expert_hidden"),
        tied=values.get("tie_embeddings") is True, extra={"mla": values.get("attention") == "mla"},
    )


#: pattern of a name (searched in the order given) -> axes, each a product of `Model` fields. In the table of stacked
#: experts the first axis counts them.
_SHAPES: tuple[tuple[re.Pattern[str], tuple[tuple[str, ...], ...]], ...] = tuple((re.compile(p), s) for p, s in (
    (r"(?:embed_tokens|wte|^embed|\.embed)\.weight$", (("vocab",), ("hidden",))),
    (r"(?:^|\.)(?:lm_head|head)\.weight$", (("vocab",), ("hidden",))),
    (r"(?:self_attn\.q_proj|attention\.wq)\.weight$", (("heads", "head_dim"), ("hidden",))),
    (r"(?:self_attn\.[kv]_proj|attention\.w[kv])\.weight$", (("kv_heads", "head_dim"), ("hidden",))),
    (r"(?:self_attn\.o_proj|attention\.wo)\.weight$", (("hidden",), ("heads", "head_dim"))),
    (r"\.experts\.w[13]$", (("experts",), ("expert_ffn",), ("hidden",))),
    (r"\.experts\.w2$", (("experts",), ("hidden",), ("expert_ffn",))),
    (r"\.experts\.\d+\.(?:w1|w3|gate_proj|up_proj)\.weight$", (("expert_ffn",), ("hidden",))),
    (r"\.experts\.\d+\.(?:w2|down_proj)\.weight$", (("hidden",), ("expert_ffn",))),
    (r"(?:block_sparse_moe|mlp)\.gate\.weight$|moe\.router\.weight$", (("experts",), ("hidden",))),
    (r"(?:\.layers\.\d+\.mlp\.(?:gate_proj|up_proj)|dense_ffn\.w[13])\.weight$", (("ffn",), ("hidden",))),
    (r"(?:\.layers\.\d+\.mlp\.down_proj|dense_ffn\.w2)\.weight$", (("hidden",), ("ffn",))),
    (r"(?:input_layernorm|post_attention_layernorm|attention_norm|ffn_norm|^norm|model\.norm)\.weight$",
     (("hidden",),)),
))
#: Families whose projections follow the table; of others only layers, experts and the embedding are counted.
_LIKE_LLAMA = re.compile(
    r"^(?:pdtrain|llama|mistral|mixtral|qwen[23]?(?:_moe)?|qwen3_moe|olmoe?2?|phi3|deepseek(?:_v[23])?|"
    r"granite(?:moe)?|minimax|glm4_moe|ernie4_5_moe)$")


def against(checkpoint: Checkpoint, options: Options, problems: list[Problem]) -> str:
    """Layers, experts, shapes and 16-bit type are those of the model."""
    assert options.against is not None
    model = load_model(options.against)
    weights = {t.fqn: t for t in checkpoint.tensors.values() if t.role in ("parameter", "buffer")} or {
        t.fqn: t for t in checkpoint.tensors.values() if t.role == "master"}
    if not weights:
        raise NotApplicable("no weights in the checkpoint")
    _layers(model, weights, problems)
    _experts(model, weights, problems)
    compared = 0
    for fqn, tensor in weights.items():
        wanted = expected_shape(model, fqn, quantised=_quantised(weights, fqn))
        if wanted is None or not tensor.dtype:
            continue
        compared += 1
        if tensor.shape != wanted:
            padded = len(wanted) == len(tensor.shape) and tensor.shape[1:] == wanted[1:] and re.search(
                r"embed|head", fqn) and tensor.shape[0] > wanted[0]
            what = "; the vocabulary is padded" if padded else ""
            problems.append(Problem("model config", f"{tensor.name} is {list(tensor.shape)}, the model's is "
                                    f"{list(wanted)}{what}", **where_of(tensor), cause="ckpt_shape_mismatch"))
    _types(model, weights, problems)
    if not any(re.search(r"embed|wte|word_emb", fqn) for fqn in weights):
        problems.append(Problem("model config", "no embedding is among the names", cause="ckpt_missing_keys"))
    return f"{model.kind}: {plural(len(weights), 'name')}, {plural(compared, 'shape')}"


def _quantised(weights: dict[str, Tensor], fqn: str) -> bool:
    return f"{fqn.removesuffix('.weight')}.qweight" in weights


def expected_shape(model: Model, fqn: str, *, quantised: bool = False) -> tuple[int, ...] | None:
    """The shape that the model gives to a name, None where the table does not say."""
    if quantised or not _LIKE_LLAMA.match(model.kind):
        return None
    for pattern, axes in _SHAPES:
        if pattern.search(fqn):
            if model.extra.get("mla") and "attn" in fqn or model.extra.get("mla") and "attention.w" in fqn:
                return None
            found = []
            for axis in axes:
                product = 1
                for name in axis:
                    value = getattr(model, name)
                    if value is None:
                        return None
                    product *= value
                found.append(product)
            return tuple(found)
    return None


def _layers(model: Model, weights: dict[str, Tensor], problems: list[Problem]) -> None:
    """Every layer is there, and has what nearly all layers have."""
    layers: dict[int, set[str]] = defaultdict(set)
    for fqn in weights:
        if (match := _LAYER.search(fqn)) is not None:
            layers[int(match["n"])].add(re.sub(r"\.\d+\.", ".*.", fqn[match.end() :]))
    if not layers or model.layers is None:
        return
    missing = sorted(set(range(model.layers)) - layers.keys())
    if missing:
        problems.append(Problem("model config", f"layers {_ids(missing)} of {model.layers} are not in the checkpoint",
                                cause="ckpt_missing_keys"))
    extra = sorted(n for n in layers if n > model.layers)  # one more may be multi-token prediction
    if extra:
        problems.append(Problem("model config", f"the model has {model.layers} layers, the checkpoint also "
                                                f"{_ids(extra)}",
                                cause="ckpt_missing_keys"))
    counts = Counter(name for names in layers.values() for name in names)
    for name, count in counts.items():
        without = [n for n in layers if name not in layers[n] and n < model.layers]
        if count >= 3 and len(without) == 1:
            likes = [fqn for fqn in weights if f".{without[0]}." in fqn]
            if not any(fqn.endswith("inv_freq") for fqn in (name,)) and not _dense_first(name, without[0]):
                problems.append(Problem("model config", f"layer {without[0]} has no {name}, as the other layers have",
                                        tensor=name, file=_file(weights, likes), cause="ckpt_missing_keys"))


def _dense_first(name: str, layer: int) -> bool:
    """The first layer of a MoE may be dense: it has no router and no experts, the others no dense FFN."""
    return layer == 0 and bool(re.search(r"expert|router|gate|shared|moe|mlp|ffn", name))


def _file(weights: dict[str, Tensor], names: list[str]) -> str | None:
    return next((weights[n].chunks[0].file for n in names if weights[n].chunks), None)


def _experts(model: Model, weights: dict[str, Tensor], problems: list[Problem]) -> None:
    ids: dict[str, set[int]] = defaultdict(set)
    for fqn, tensor in weights.items():
        if tensor.expert is not None and (match := _LAYER.search(fqn)) is not None:
            ids[match["n"]].add(tensor.expert)
    for layer, there in ids.items():
        wanted = set(range(model.experts or 0))
        if wanted and there != wanted:
            lost, more = wanted - there, there - wanted
            what = f"lacks experts {_ids(lost)}" if lost else f"has experts {_ids(more)} more"
            problems.append(Problem("model config", f"layer {layer} {what}; the model has {model.experts}",
                                    tensor=f"layer {layer}", cause="ckpt_missing_keys"))


def _types(model: Model, weights: dict[str, Tensor], problems: list[Problem]) -> None:
    """float16 among a bfloat16 model, or the reverse: the same bits read as another type."""
    halves = {"float16", "bfloat16"}
    if model.dtype not in halves:
        return
    other = [t for t in weights.values() if t.dtype in halves and t.dtype != model.dtype]
    if other and len(other) * 10 < len(weights):
        for tensor in other:
            problems.append(Problem("model config", f"{tensor.name} is {tensor.dtype}, the model {model.dtype}",
                                    **where_of(tensor), cause="ckpt_shape_mismatch"))
