"""The typed run configuration. Every field carries its meaning: docs, `--print-config` and error texts come from here.

Field names are public (`--set section.key=value`). Limits of a single field stand in its annotation; rules that join
several fields stand in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
MOST_RANKS = 1_048_576
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
PositiveFloat = Annotated[float, Meta(gt=0)]
#: A wait longer than a week is none; far beyond it the system's clocks overflow.
Seconds = Annotated[float, Meta(gt=0, le=604800)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
OpenShare = Annotated[float, Meta(ge=0, lt=1)]
Dtype = Literal["fp32", "bf16"]
Recompute = Literal["none", "full"]
PoolMode = Literal["off", "sync", "stream", "async"]
OnSpike = Literal["warn", "skip", "rewind"]

#: The rows of the module policy table, in the order in which they are printed and checkpointed.
MODULES = ("attention", "experts", "shared_expert", "router", "dense_ffn", "norm", "embed_head")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the configuration: immutable, keyword-only, unknown keys refused."""


class Mla(Section, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries and keys/values."""

    q_lora_rank: Annotated[NonNegativeInt, Meta(description="rank of the query projection; 0: full rank")] = 0
    kv_lora_rank: Annotated[PositiveInt, Meta(description="rank of the joint key/value latent")] = 512
    qk_nope_head_dim: Annotated[PositiveInt, Meta(description="per-head dimension without rotary embedding")] = 128
    qk_rope_head_dim: Annotated[PositiveInt, Meta(description="per-head dimension with rotary embedding")] = 64
    v_head_dim: Annotated[PositiveInt, Meta(description="per-head value dimension")] = 128


class Moe(Section, frozen=True):
    """Mixture-of-experts layers: router, routed experts, shared experts, balancing."""

    experts: Annotated[PositiveInt, Meta(description="routed experts per MoE layer")] = 8
    top_k: Annotated[PositiveInt, Meta(description="experts chosen per token")] = 2
    expert_hidden: Annotated[PositiveInt, Meta(description="hidden size of one routed expert's SwiGLU")] = 256
    shared_experts: Annotated[NonNegativeInt, Meta(description="experts that every token visits, fused into one")] = 0
    score: Annotated[Literal["softmax", "sigmoid"], Meta(description="router score function")] = "softmax"
    normalize_top_k: Annotated[bool, Meta(description="scale the chosen scores to sum to 1")] = True
    route_scale: Annotated[PositiveFloat, Meta(description="factor on the chosen scores")] = 1.0
    groups: Annotated[PositiveInt, Meta(description="expert groups for group-limited routing; 1: off")] = 1
    top_groups: Annotated[PositiveInt, Meta(description="groups a token may choose from")] = 1
    capacity_factor: Annotated[
        PositiveFloat | None, Meta(description="room per expert relative to an even share; absent: dropless")
    ] = None
    min_capacity: Annotated[PositiveInt, Meta(description="least room per expert, in tokens")] = 4
    aux_loss: Annotated[NonNegativeFloat, Meta(description="load-balance loss coefficient (start at 0.01)")] = 0.01
    z_loss: Annotated[NonNegativeFloat, Meta(description="router z-loss coefficient (usual: 0.001)")] = 0.0
    bias_update_speed: Annotated[
        NonNegativeFloat, Meta(description="bias-update balancing step (usual: 0.001); 0: off")
    ] = 0.0
    jitter: Annotated[
        OpenShare, Meta(description="multiplicative noise on router inputs in training, against early lock-in")
    ] = 0.0


class Model(Section, frozen=True):
    """Shape of the decoder-only transformer."""

    vocab_size: Annotated[PositiveInt, Meta(description="rows of the embedding")] = 256
    hidden: Annotated[PositiveInt, Meta(description="model width")] = 256
    layers: Annotated[PositiveInt, Meta(description="transformer blocks")] = 4
    dense_layers: Annotated[NonNegativeInt, Meta(description="first blocks that have a dense FFN, not MoE")] = 1
    heads: Annotated[PositiveInt, Meta(description="query heads")] = 8
    kv_heads: Annotated[PositiveInt, Meta(description="key/value heads (grouped-query attention)")] = 8
    head_dim: Annotated[PositiveInt, Meta(description="dimension of one head (grouped-query attention)")] = 32
    attention: Annotated[Literal["gqa", "mla"], Meta(description="attention kind")] = "gqa"
    ffn_hidden: Annotated[PositiveInt, Meta(description="hidden size of the dense FFN's SwiGLU")] = 1024
    rope_theta: Annotated[PositiveFloat, Meta(description="base of the rotary frequencies")] = 10000.0
    norm_eps: Annotated[PositiveFloat, Meta(description="RMSNorm epsilon")] = 1e-6
    tie_embeddings: Annotated[bool, Meta(description="the head shares the embedding's weight")] = False
    init_std: Annotated[PositiveFloat, Meta(description="standard deviation of weight initialisation")] = 0.02
    mla: Mla = msgspec.field(default_factory=Mla)
    moe: Moe = msgspec.field(default_factory=Moe)


class ModulePolicy(Section, frozen=True):
    """One row of the module policy table: everything that may differ between modules of one model."""

    tensor: Annotated[
        Ranks, Meta(description="tensor-parallel degree (attention; dense_ffn and embed_head follow it)")
    ] = 1
    expert: Annotated[Ranks, Meta(description="expert-parallel degree (experts only)")] = 1
    dtype: Annotated[
        Dtype | None, Meta(description="compute dtype; absent: precision.all (router and norms stay FP32)")
    ] = None
    recompute: Annotated[Recompute, Meta(description="activation recomputation in the backward pass")] = "none"
    lr_scale: Annotated[NonNegativeFloat, Meta(description="factor on the learning rate")] = 1.0
    weight_decay_scale: Annotated[NonNegativeFloat, Meta(description="factor on the weight decay")] = 1.0
    clip: Annotated[PositiveFloat | None, Meta(description="own gradient-norm limit; absent: optimizer.clip")] = None
    checkpoint_every: Annotated[
        PositiveInt | None, Meta(description="steps between saves; absent: checkpoint.every")
    ] = None


class Modules(Section, frozen=True):
    """The module policy table."""

    attention: ModulePolicy = msgspec.field(default_factory=ModulePolicy)
    experts: ModulePolicy = msgspec.field(default_factory=ModulePolicy)
    shared_expert: ModulePolicy = msgspec.field(default_factory=ModulePolicy)
    router: ModulePolicy = msgspec.field(default_factory=ModulePolicy)
    dense_ffn: ModulePolicy = msgspec.field(default_factory=ModulePolicy)
    norm: ModulePolicy = msgspec.field(default_factory=lambda: ModulePolicy(weight_decay_scale=0.0))
    embed_head: ModulePolicy = msgspec.field(default_factory=ModulePolicy)


class Parallel(Section, frozen=True):
    """The world. Both factorisations must hold: ranks = pipeline x DP x tensor = pipeline x EDP x expert."""

    ranks: Annotated[Ranks, Meta(description="compute ranks (world size without pools.update_ranks)")] = 1
    pipeline: Annotated[Ranks, Meta(description="pipeline stages; planned today, not trained")] = 1
    sequence_parallel: Annotated[
        bool, Meta(description="split norms along the sequence inside the tensor group")
    ] = True
    fsdp: Annotated[
        bool, Meta(description="shard dense parameters over DP and expert parameters over EDP; false: replicate")
    ] = True


class Train(Section, frozen=True):
    """Length, batch and determinism of the run."""

    steps: Annotated[PositiveInt, Meta(description="optimizer steps")] = 100
    seed: Annotated[NonNegativeInt, Meta(description="seed of initialisation and data order")] = 0
    sequence_length: Annotated[PositiveInt, Meta(description="tokens per sequence")] = 512
    micro_batch: Annotated[PositiveInt, Meta(description="sequences per DP rank per forward pass")] = 4
    accumulation: Annotated[
        PositiveInt | None, Meta(description="micro-batches per step; absent: train_batch / (micro_batch x DP)")
    ] = None
    train_batch: Annotated[
        PositiveInt | None,
        Meta(description="sequences per step over all ranks; absent: micro_batch x accumulation x DP"),
    ] = None
    threads: Annotated[PositiveInt, Meta(description="CPU threads per process; changes bits")] = 1
    log_every: Annotated[
        PositiveInt, Meta(description="steps between readings of the device; each step keeps its line")
    ] = 1
    val_every: Annotated[NonNegativeInt, Meta(description="steps between validations; 0: only at the end")] = 0
    val_sequences: Annotated[
        NonNegativeInt, Meta(description="sequences of the validation split to use; 0: no validation")
    ] = 64
    timeout_seconds: Annotated[Seconds, Meta(description="limit of one collective")] = 600.0
    on_spike: Annotated[
        OnSpike,
        Meta(
            description="loss or gradient norm far above the steps before; warn: record it; skip: drop that update; "
            "rewind: also restore the last checkpoint and go on behind the suspect data. The latter two wait for the "
            "device in every step"
        ),
    ] = "warn"
    on_spike_max: Annotated[
        NonNegativeInt, Meta(description="skipped updates and rewinds of one start; beyond it spikes are only recorded")
    ] = 10


class Optimizer(Section, frozen=True):
    """AdamW or Muon with FP32 states, the schedule and the default clip."""

    name: Annotated[
        Literal["adamw", "muon"],
        Meta(
            description="muon: orthogonalised momentum for the matrices of attention, dense FFN, routed experts (each "
            "expert by itself) and shared expert, scaled to AdamW's RMS so that lr and weight decay mean the same; "
            "AdamW for embedding, head, norms and router"
        ),
    ] = "adamw"
    lr: Annotated[PositiveFloat, Meta(description="peak learning rate")] = 3e-4
    beta1: Annotated[OpenShare, Meta(description="AdamW: first-moment decay")] = 0.9
    beta2: Annotated[OpenShare, Meta(description="AdamW: second-moment decay")] = 0.95
    eps: Annotated[PositiveFloat, Meta(description="AdamW epsilon")] = 1e-8
    momentum: Annotated[OpenShare, Meta(description="Muon: decay of the momentum, which is Nesterov's")] = 0.95
    weight_decay: Annotated[NonNegativeFloat, Meta(description="decoupled weight decay")] = 0.1
    clip: Annotated[
        PositiveFloat | None,
        Meta(description="gradient-norm limit of each module row without its own; absent: no clipping"),
    ] = 1.0
    warmup_steps: Annotated[NonNegativeInt, Meta(description="linear warm-up")] = 10
    schedule: Annotated[Literal["cosine", "linear", "constant"], Meta(description="decay after warm-up")] = "cosine"
    min_lr_ratio: Annotated[Share, Meta(description="final learning rate / peak")] = 0.1


class Precision(Section, frozen=True):
    """Compute dtype of every row; routers, norms, losses and optimizer states stay FP32."""

    all: Annotated[Dtype, Meta(description="compute dtype of the rows that do not set their own")] = "fp32"


class Data(Section, frozen=True):
    """Where tokens come from."""

    path: Annotated[
        str | None,
        Meta(description="file, glob or directory of text, JSONL or .bin/.idx; absent: Python's own library sources"),
    ] = None
    tokenizer: Annotated[str | None, Meta(description="tokenizers JSON file; absent: bytes")] = None
    text_key: Annotated[str, Meta(description="field of a JSONL record that holds the text")] = "text"
    val_share: Annotated[
        OpenShare, Meta(description="share of the tokens held out for validation, in whole documents")
    ] = 0.02


class Checkpoint(Section, frozen=True):
    """When and how many. A row's own `checkpoint_every` overrides `every`."""

    every: Annotated[NonNegativeInt, Meta(description="steps between saves; 0: only at the end and on SIGTERM")] = 0
    keep: Annotated[NonNegativeInt, Meta(description="complete checkpoints kept; 0: all")] = 3


class Recorder(Section, frozen=True):
    """The black box."""

    tensorboard: Annotated[bool, Meta(description="write TensorBoard files")] = True
    wandb: Annotated[bool, Meta(description="also log to W&B where it is installed")] = False
    router_every: Annotated[PositiveInt, Meta(description="steps between per-expert counts in metrics.jsonl")] = 1
    module_times_every: Annotated[PositiveInt, Meta(
        description="most steps from one measurement of time/<module> to the next; fewer where steps are long")] = 5
    spans: Annotated[bool, Meta(description="write per-rank event spans")] = True
    flight_recorder_entries: Annotated[NonNegativeInt, Meta(description="collectives kept for a dump; 0: off")] = 2000
    memory_history_entries: Annotated[NonNegativeInt, Meta(
        description="CUDA allocator events kept for a memory snapshot, written when memory runs out; 0: off")] = 100_000
    memory_snapshot_steps: Annotated[tuple[PositiveInt, ...], Meta(
        description="steps of which a memory snapshot is written: the allocator's on CUDA, module peaks on CPU")] = ()


class Pools(Section, frozen=True):
    """Phase separation: forward/backward on the compute ranks, optimizer state and step on the update ranks."""

    mode: Annotated[
        PoolMode,
        Meta(
            description="off: one pool does both; sync: gradients, step, weights, one after the other; stream: the "
            "same bits, overlapped with backward and the next forward; async: weights are `staleness` steps old"
        ),
    ] = "off"
    update_ranks: Annotated[NonNegativeInt, Meta(description="ranks of the update pool")] = 0
    rebalance: Annotated[
        Literal["off", "advise", "auto"],
        Meta(
            description="when the pools' busy shares are more than 20 points apart: advise: say which split of the "
            "same ranks would balance; auto: also save, and start the ranks again with it"
        ),
    ] = "off"
    rebalance_every: Annotated[
        PositiveInt | None,
        Meta(description="steps between two looks at the busy shares, at least 12; absent: 10 % of the steps"),
    ] = None
    payload: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Meta(description="what gradients and weights travel as; masters, moments and sums stay FP32"),
    ] = "fp32"
    granularity: Annotated[
        Literal["step", "micro_batch"],
        Meta(
            description="stream and async: gradients leave once per step, or of each micro-batch and are added up by "
            "the update pool: more traffic, earlier, and another order of summation"
        ),
    ] = "step"
    bucket_mb: Annotated[
        float, Meta(ge=0.01, le=1024, description="size of one message, in MB of payload; a larger shard travels whole")
    ] = 4.0
    buffers: Annotated[PositiveInt, Meta(description="messages per link that may wait to be sent")] = 8
    timeout_seconds: Annotated[Seconds, Meta(description="limit of one wait for the other pool")] = 600.0
    resend_limit: Annotated[
        NonNegativeInt, Meta(description="how often a damaged message is sent again, and a refused step computed again")
    ] = 3
    on_mismatch: Annotated[
        Literal["recompute", "drop", "accept"],
        Meta(
            description="gradients of another weight version than expected: compute the step again, leave its update "
            "out, or accept them where they are at most `staleness` steps old"
        ),
    ] = "recompute"
    error_feedback: Annotated[
        bool,
        Meta(
            description="add what `payload` and `top_k` took from a gradient to the next one; needs its size in FP32"
        ),
    ] = False
    top_k: Annotated[
        float,
        Meta(
            gt=0, le=1,
            description="share of the elements of each bucket of gradients that travels, the largest, with their "
            "indices; 1: all. Weights travel whole"
        ),
    ] = 1.0
    offload: Annotated[
        str | None,
        Meta(description="folder for masters and moments as memory-mapped files, on NVMe for instance; absent: memory"),
    ] = None
    staleness: Annotated[
        NonNegativeInt | None,
        Meta(
            description="async: by how many steps the weights of a forward pass are old; absent: 1. Elsewhere only "
            "the bound of on_mismatch = \"accept\""
        ),
    ] = None
    restarts: Annotated[
        NonNegativeInt,
        Meta(description="how often the launcher starts all ranks again after one of them has died; torchrun's own "
             "--max-restarts does the same")
    ] = 0
    keep: Annotated[
        str | None,
        Meta(
            description="folder, in memory (/dev/shm) for instance, where each rank keeps its state of the last two "
            "steps, so that a start after a death loses no step; absent: such a start goes back to the last checkpoint"
        ),
    ] = None


class Run(Section, frozen=True):
    """One run, whole."""

    model: Model = msgspec.field(default_factory=Model)
    parallel: Parallel = msgspec.field(default_factory=Parallel)
    modules: Modules = msgspec.field(default_factory=Modules)
    train: Train = msgspec.field(default_factory=Train)
    optimizer: Optimizer = msgspec.field(default_factory=Optimizer)
    precision: Precision = msgspec.field(default_factory=Precision)
    data: Data = msgspec.field(default_factory=Data)
    checkpoint: Checkpoint = msgspec.field(default_factory=Checkpoint)
    recorder: Recorder = msgspec.field(default_factory=Recorder)
    pools: Pools = msgspec.field(default_factory=Pools)
