"""What the many names of a metric mean: one canonical name, one unit, and the convention where several are in use.

docs/series.md lists the canonical names. A name is looked up in its normal form: lower case, blanks and dashes as
underscores. The first row that matches wins; what matches none keeps its normal form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Meaning:
    """`name` is canonical; values are multiplied by `scale`; `convention` is what the source's definition implies."""

    name: str
    scale: float = 1.0
    convention: str | None = None
    #: of several columns with one canonical name the smallest rank is taken
    rank: int = 0


def normal(key: str) -> str:
    """`key` in lower case, with blanks and dashes as underscores."""
    return re.sub(r"[\s\-]+", "_", key.strip().lower())


#: How the training loss is called, the surest name first. Others that end in "loss" become "loss/<their name>".
LOSS_NAMES = (
    "lm_loss", "loss", "train_loss", "train/loss", "training_loss", "training/loss", "lm_loss_training/lm_loss",
    "train/crossentropyloss", "train/ce_loss", "ce_loss", "ce", "cross_entropy", "train/cross_entropy",
    "loss_metrics/global_avg_loss", "global_avg_loss", "loss/train/total", "loss/train", "loss/total", "total_loss",
    "train/total_loss", "train_loss_step", "train/loss_step", "train/lm_loss", "trl", "reduced_train_loss",
    "train/train_loss", "train/ce", "nll", "nll_loss", "train/nll_loss", "train_nll", "train/nll", "train_mean_nll",
    "mean_nll", "mean_loss", "batch_loss", "avg_loss", "loss_step",
    "iter_loss", "train_batch_loss", "train/batch_loss", "train_loss_epoch", "critic/loss", "actor/pg_loss",
)
_SPLIT = r"(?:^|[/_.])(?:val|valid|validation|eval|test|dev|tel|validate)(?:[/_.]|$)"
_AUX = r"load_?balanc|(?:^|[/_])aux|aux_?loss|lb_?loss|balance_?loss"

_ROWS: tuple[tuple[str, Meaning], ...] = (
    (r"router/.*|moe/\d.*|time/.*|grad_norm/.*|grad_norm_clipped/.*|val_loss|aux_loss|z_loss", Meaning("=")),
    # fp16 and skipped steps
    (r"(?:.*/)?(?:loss_?scale|grad_scale|scaler_scale|amp/scale|cur_scale)", Meaning("loss_scale")),
    (r"number_of_skipped_iterations|skipped(?:_iterations|_steps)?|(?:.*/)?skip(?:ped)?_steps?",
     Meaning("skipped")),
    (r"number_of_nan_iterations|nan_iterations", Meaning("nan_iterations")),
    # the optimizer
    (r"(?:.*[/_])?(?:lr|learning_rate)(?:_?group_?0|_0|/pg0|/group0|_pg1)?(?:_adamw)?", Meaning("lr")),
    (r"lr_(?:adam|adamw|sgd|muon)(?:/pg\d+)?", Meaning("lr", rank=1)),
    (r"(?:.*/)?(?:grad(?:ient)?_?norm_(?:after|post)_?clip(?:ping)?|clipped_grad_?norm|grad_norm_clipped)",
     Meaning("grad_norm", convention="after clipping", rank=5)),
    (r"(?:.*/)?(?:grad(?:ient)?s?_?norm|gnorm|total_grad_norm|global_grad_norm|grad|norm|2_norm|l2_grad_norm"
     r"|gradient_norm|grad_norm/total|grad_2.0_norm_total)", Meaning("grad_norm")),
    (r"optim/grad/(.+)\.norm|grad(?:ient)?_?norms?/(.+)|gradients?/(.+)_norm|grad_2.0_norm/(.+)",
     Meaning("grad_norm/")),
    (r"(?:.*/)?params?_?norm", Meaning("params_norm")),
    (r"(?:.*/)?num_?zeros", Meaning("num_zeros")),
    # data
    (r"(?:.*/)?(?:global_)?batch_?size", Meaning("batch_size")),
    (r"(?:.*/)?consumed_(?:train_)?samples", Meaning("consumed_samples")),
    (r"(?:.*/)?(?:consumed_(?:train_)?tokens|total_tokens|num_(?:input_)?tokens(?:_seen)?|tokens(?:_seen)?"
     r"|n_tokens|num_tokens)", Meaning("consumed_tokens")),
    (r"(?:.*/)?(?:actual_)?seq_?len(?:gth)?", Meaning("sequence_length")),
    (r"document_ids?|doc_ids?|suspect_documents", Meaning("document_ids")),
    # time
    (r"elapsed_time_per_iteration_\(ms\)|step_time_ms|iter_time_ms|.*time_per_(?:step|iter(?:ation)?)_\(?ms\)?|dt_ms",
     Meaning("step_seconds", 1e-3)),
    (r"elapsed_time_per_iteration_\(s\)|iteration_time(?:/iteration_time)?|step_seconds|step_?time(?:_s|\(s\))?"
     r"|iter_?time(?:_s)?|(?:.*/)?(?:step|iteration|iter)_(?:time|seconds)(?:_s)?|perf/time_per_step"
     r"|time_metrics/end_to_end\(s\)|.*seconds_per_step|train_step_timing_in_s", Meaning("step_seconds")),
    (r"data_seconds|time_metrics/data_loading\(s\)|(?:.*/)?data(?:_loading)?_time(?:_s)?", Meaning("data_seconds")),
    (r"checkpoint_seconds|save_?time(?:_s)?", Meaning("checkpoint_seconds")),
    (r"validation_seconds|eval_?time(?:_s)?", Meaning("validation_seconds")),
    (r"tokens_per_second|(?:.*/)?total_tokens_per_second|tok(?:ens)?(?:/|_per_)(?:s|sec|second)|tgs_total"
     r"|throughput/tokens_per_sec", Meaning("tokens_per_second", convention="over all ranks")),
    (r"tps|throughput\(tps\)|(?:.*/)?(?:device|gpu)/tokens_per_sec(?:ond)?|tokens_per_(?:gpu|device)_per_sec(?:ond)?"
     r"|tgs|tok(?:ens)?/s/(?:gpu|device)|tokens/sec/(?:gpu|device)|wps|perf/throughput",
     Meaning("tokens_per_second", convention="per device")),
    (r"(?:.*/)?(?:train_)?samples(?:_per_|/)?(?:second|sec|s)", Meaning("samples_per_second")),
    (r"(?:.*/)?(?:tflops|tflop/s|throughput_per_gpu_\(tflop/s/gpu\)|tflops?_per_(?:gpu|device)|throughput"
     r"|model_tflops|tflops?/s/gpu)", Meaning("tflops_per_device", convention="per device")),
    (r"(?:.*/)?mfu\(?%\)?|(?:.*/)?mfu_percent", Meaning("mfu", 0.01)),
    (r"(?:.*/)?mfu", Meaning("mfu")),
    (r"(?:.*/)?(?:memory|max_reserved|max_active)(?:/.*)?\(gib\)|memory_gib", Meaning("memory_bytes", 2.0**30)),
    (r"(?:.*/)?memory_bytes|peak_memory_bytes", Meaning("memory_bytes")),
    (r"system/peak_gpu_memory_\(mb\)", Meaning("memory_bytes", 1e6)),
    (r"time|timestamp|_timestamp|wall_time|unix_time", Meaning("time")),
    # losses beside the one that is trained for
    (rf".*(?:{_AUX}).*", Meaning("aux_loss")),
    (r".*z_?loss.*", Meaning("z_loss")),
    (rf".*{_SPLIT}.*(?:loss|ce|nll|crossentropyloss).*|tel|eval_loss|(?:val|valid|validation|test|dev)_?(?:loss|ce)",
     Meaning("val_loss")),
)
_COMPILED = tuple((re.compile(pattern), meaning) for pattern, meaning in _ROWS)
_SPLIT_WORD = re.compile(_SPLIT)
#: Copies of another column over another axis (Megatron's event files), and what only looks like a metric.
_COPIES = re.compile(r".*_vs_(?:samples|tokens|steps)|.*_loss_(?:spread|std|min|max|best)|best_.*|.*/(?:p\d+|std)")
_PPL = re.compile(r".*(?:ppl|perplexity).*")
_LOSSLIKE = re.compile(r".*loss(?:es)?(?:_\d+)?|.*loss/\w+|mtp_\d+_loss")


@lru_cache(maxsize=16_384)
def meaning_of(key: str, style: str = "") -> Meaning | None:
    """What the column `key` of a source written by `style` means; None for a column that copies another."""
    name = normal(key)
    if style == "pdtrain":
        if name == "tokens":
            return Meaning("consumed_tokens")
        if name in ("grad_norm", "mfu"):
            return Meaning(name, convention="before clipping" if name == "grad_norm" else "causal attention")
        if name == "tokens_per_second":
            return Meaning(name, convention="over all ranks")
    if _COPIES.fullmatch(name):
        return None
    for pattern, meaning in _COMPILED:
        found = pattern.fullmatch(name)
        if found is None:
            continue
        if meaning.name == "=":
            return Meaning(name)
        if meaning.name.endswith("/"):
            return Meaning(meaning.name + next(g for g in found.groups() if g))
        if meaning.name == "grad_norm" and meaning.convention is None:
            return Meaning("grad_norm", convention=_CLIP.get(style))
        if meaning.name == "mfu" and style in _MFU:
            return Meaning("mfu", meaning.scale, _MFU[style])
        return meaning
    if name in LOSS_NAMES:
        return Meaning("loss", rank=LOSS_NAMES.index(name))
    if _LOSSLIKE.fullmatch(name) and not _SPLIT_WORD.search(name):
        return Meaning("loss/" + name)
    if _PPL.fullmatch(name):
        return Meaning("val_perplexity" if _SPLIT_WORD.search(name) else "perplexity")
    return Meaning(name)


#: Which norm a program prints: PyTorch's and Megatron's clipping return the norm before it.
_CLIP = {"megatron": "before clipping", "hf": "before clipping", "torchtitan": "before clipping",
         "olmo": "before clipping", "nanogpt": "before clipping"}
#: torchtitan counts attention without the causal half, as PaLM did.
_MFU = {"torchtitan": "non-causal attention", "nanogpt": "non-causal attention"}
