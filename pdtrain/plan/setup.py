"""What is planned: a validated configuration, and what only a plan can say about it (schedule, ZeRO stage ...).

    ranks = pipeline x DP x context x TP (attention, dense) = pipeline x EDP x EP (experts, "folded")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diag.errors import UsageError
from pdtrain.config.resolved import TENSOR_ROWS
from pdtrain.config.schema import Run
from pdtrain.plan.extras import extras_of

Sharding = Literal["none", "zero1", "zero2", "zero3"]
#: selective: core attention (nothing with flash attention); op: every second matrix product and all that is no product
#: (torchtitan's "selective op"); alternate: every second block whole; full: every block whole.
Recompute = Literal["none", "selective", "op", "alternate", "full"]
#: Parts of a block that are computed again one by one, as by Megatron-LM's --recompute-modules: the outputs of its two
#: norms; MLA's up-projections; the experts' activation function; whole MoE layers, their all-to-all included.
Drop = Literal["norm", "mla-up", "moe-act", "moe"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble", "dualpipe"]
StateScheme = Literal["fsdp", "megatron"]
Kernels = Literal["eager", "fused"]
#: Blocks that a plan walks through one by one.
MOST_LAYERS = 10_000
SHARDINGS: tuple[Sharding, ...] = ("none", "zero1", "zero2", "zero3")
DROPS: tuple[Drop, ...] = ("norm", "mla-up", "moe-act", "moe")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "op", "alternate", "full")
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble", "dualpipe")
DTYPE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Options:
    """What the configuration of a run does not hold. None: follows from the run, see `Setup`.

    sharding: over the data-parallel ranks. none: all replicated; zero1: optimizer state; zero2: gradients too; zero3:
        parameters too.
    context: ranks that split the sequence inside attention (context parallel); they are taken from DP.
    virtual: model chunks per stage of the interleaved schedule.
    overload: tokens of the fullest expert rank / balanced. Multiplies what routed rows cost.
    moments: bytes per Adam moment: 4, or 2 for BF16 moments.
    flash: attention never stores its score matrix.
    dispatch_bytes: bytes per element that dispatch sends forward (1: FP8); None: the experts' compute dtype.
    node_limited: rows for several experts of one node cross the network once, and a token visits at most
        model.moe.top_groups nodes (DeepEP, arXiv 2412.19437 3.2.2).
    kernels: eager, as pdtrain's modules run, or fused, as Megatron-LM's and Transformer Engine's; None: eager where the
        states are kept as pdtrain keeps them.
    drop: parts of a block that are computed again, beside `recompute`.
    early_weights: routed rows are weighted before an expert's last product, so that what comes back is not kept
        (Megatron-LM since core 0.12); else after it.
    fp8_activations: inputs of matrix products are kept in FP8 with a scale per tile, and SwiGLU's product is computed
        again (DeepSeek-V3, arXiv 2412.19437, 3.3.3).
    reduce_each: sharded gradients are reduced after every micro-batch (FSDP's default), not once per step as pdtrain
        does, which holds whole ones meanwhile.
    overlap: share of traffic that compute hides, by group (ep, tp, dp ...), where it is known.
    """

    sharding: Sharding | None = None
    states: StateScheme | None = None
    recompute: Recompute | None = None
    schedule: Schedule = "1f1b"
    virtual: int = 1
    context: int = 1
    overload: float = 1.0
    gradient_bytes: int | None = None
    moment_bytes: int = 4
    flash: bool = True
    dispatch_bytes: float | None = None
    node_limited: bool = False
    kernels: Kernels | None = None
    drop: tuple[Drop, ...] = ()
    early_weights: bool = False
    fp8_activations: bool = False
    reduce_each: bool = False
    overlap: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """One layout of one model, ready for arithmetic. `run` is filled (`pdtrain.config.resolved.fill`)."""

    run: Run
    options: Options = Options()

    def __post_init__(self) -> None:
        problem = self.problem()
        if problem:
            raise UsageError(problem)

    def problem(self) -> str | None:
        """Why this layout cannot be, beyond what the configuration's own rules find; None: it can."""
        if self.run.model.layers > MOST_LAYERS:
            return f"model.layers = {self.run.model.layers}: a plan is made for at most {MOST_LAYERS:,} blocks"
        context, dp_context = self.options.context, self.stage_ranks // self.tp
        if dp_context % context:
            return f"--context {context} does not divide the {dp_context} data-parallel ranks of TP {self.tp}"
        if self.run.train.sequence_length % (context * self.tp):
            return (
                f"--context {context} x TP {self.tp} does not divide sequence length {self.run.train.sequence_length}"
            )
        if self.options.virtual > 1 and self.options.schedule != "interleaved":
            return f"--virtual {self.options.virtual} needs --schedule interleaved"
        if self.pp * self.options.virtual > self.run.model.layers:
            return (
                f"{self.pp} stages x {self.options.virtual} chunks are more than the {self.run.model.layers} layers"
            )
        batch, unit = self.run.train.train_batch, self.run.train.micro_batch * self.dp
        if batch is not None and unit and batch % unit:  # no unit: the ranks do not factorise, which the rules say
            return f"train_batch {batch} is no multiple of micro_batch {self.run.train.micro_batch} x DP {self.dp}"
        return None

    # -- degrees -------------------------------------------------------------------------------------------------
    @property
    def ranks(self) -> int:
        return self.run.parallel.ranks

    @property
    def pp(self) -> int:
        return self.run.parallel.pipeline

    @property
    def tp(self) -> int:
        return self.run.modules.attention.tensor

    @property
    def ep(self) -> int:
        return self.run.modules.experts.expert

    @property
    def cp(self) -> int:
        return self.options.context

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.ranks // self.pp

    @property
    def dp(self) -> int:
        """Ranks of a stage that read different sequences."""
        return self.stage_ranks // (self.tp * self.cp)

    @property
    def edp(self) -> int:
        """Copies of each expert in a stage."""
        return self.stage_ranks // self.ep

    def shard_size(self, row: str) -> int:
        """Ranks over which the states of a row are sharded: EDP for experts, DP x CP (x TP, where replicated)."""
        if row == "experts":
            return self.edp
        return self.stage_ranks if row in ("router", "shared_expert") else self.stage_ranks // self.tp

    def split(self, row: str) -> int:
        """Model-parallel degree of a row: TP, EP or 1."""
        return self.ep if row == "experts" else self.tp if row in TENSOR_ROWS else 1

    # -- batch ---------------------------------------------------------------------------------------------------
    @property
    def micro_batches(self) -> int:
        """Forward passes of one rank per optimizer step."""
        batch = self.run.train.train_batch or 1
        return max(1, batch // (self.run.train.micro_batch * self.dp))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, all ranks."""
        return self.micro_batches * self.run.train.micro_batch * self.dp * self.run.train.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch whose attention one rank of a tensor group computes: b x s / CP."""
        return self.run.train.micro_batch * self.run.train.sequence_length // self.cp

    @property
    def local_tokens(self) -> float:
        """The same for a rank where the sequence is split over TP (sequence parallel; always so for MoE layers)."""
        return self.tokens / self.tp

    # -- policies ------------------------------------------------------------------------------------------------
    @property
    def sharding(self) -> Sharding:
        """The option, else as pdtrain trains; with pipeline stages ZeRO-1, since ZeRO-3 gathers per micro-batch."""
        if self.options.sharding is not None:
            return self.options.sharding
        if not self.run.parallel.fsdp:
            return "none"
        return "zero1" if self.pp > 1 else "zero3"

    @property
    def states(self) -> StateScheme:
        """fsdp: FP32 weights are the master copy. megatron: weights in the compute dtype, a master copy beside them."""
        if self.options.states is not None:
            return self.options.states
        return "megatron" if self.sharding in ("zero1", "zero2") else "fsdp"

    def recompute(self, row: str) -> str:
        """none, selective or full, for one row."""
        if self.options.recompute is not None:
            return self.options.recompute
        return str(getattr(self.run.modules, row).recompute)

    @property
    def repeated_blocks(self) -> float:
        """Share of the blocks of which only the input is kept, by the plan's option (the run's own rows recompute
        module by module)."""
        return {"full": 1.0, "alternate": 0.5}.get(self.options.recompute or "", 0.0)

    def block_policy(self, index: int) -> Recompute | None:
        """The plan's recompute option for one block of a stage: alternate is full or none."""
        if self.options.recompute == "alternate":
            return "full" if index % 2 else "none"
        return self.options.recompute

    def dtype(self, row: str) -> str:
        own = getattr(self.run.modules, row).dtype
        return own or ("fp32" if row in ("router", "norm") else self.run.precision.all)

    def itemsize(self, row: str) -> int:
        """Bytes per element of a row's compute dtype."""
        return DTYPE_BYTES[self.dtype(row)]

    @property
    def runnable(self) -> list[str]:
        """What keeps `pdtrain train` from running this layout today; empty: it runs."""
        found = []
        if self.pp > 1:
            found.append("pipeline parallel")
        if self.sharding in ("zero1", "zero2"):
            found.append(f"optimizer sharding {self.sharding} (it trains zero3, or none with parallel.fsdp = false)")
        if self.cp > 1:
            found.append("context parallel")
        if self.options.recompute in ("selective", "op", "alternate"):
            found.append(f'recompute "{self.options.recompute}"')
        if self.options.drop:
            found.append(f"recompute of {', '.join(self.options.drop)} alone")
        if self.options.reduce_each:
            found.append("gradients reduced after every micro-batch")
        if self.options.fp8_activations:
            found.append("activations kept in FP8")
        if self.options.early_weights:
            found.append("routed rows weighted before an expert's last product")
        if self.states == "megatron" and self.run.precision.all == "bf16":
            found.append("weights kept in BF16 beside an FP32 master copy")
        if self.run.pools.update_ranks:
            found.append("phase separation")
        return [*dict.fromkeys(found), *extras_of(self.run.model).named()]


def layout_text(setup: Setup) -> str:
    """`PP16 x DP128 x TP1, EP64 x EDP2, zero1`."""
    context = f" x CP{setup.cp}" if setup.cp > 1 else ""
    stages = f"PP{setup.pp} x " if setup.pp > 1 else ""
    virtual = f" (VP{setup.options.virtual})" if setup.options.virtual > 1 else ""
    return (
        f"{stages}DP{setup.dp}{context} x TP{setup.tp}{virtual}, EP{setup.ep} x EDP{setup.edp}, {setup.sharding}"
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline stage holds: numbers of dense and MoE blocks, and whether embedding and head are here."""

    index: int
    dense: int
    moe: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        return self.dense + self.moe


def stages(setup: Setup) -> list[Stage]:
    """Blocks in order over the stages, as evenly as they go; the last, then the first stage get fewer.

    Chunks of an interleaved schedule are summed: a stage holds as many blocks either way.
    """
    model, pp = setup.run.model, setup.pp
    base, extra = divmod(model.layers, pp)
    sizes = [base] * pp
    # the ends also hold head and embedding, so that the blocks left over go to the middle, from the second stage on
    order = [*range(1, pp - 1), 0, pp - 1] if pp > 1 else [0]
    for stage in order[:extra]:
        sizes[stage] += 1
    found, start = [], 0
    for index, size in enumerate(sizes):
        dense = max(0, min(model.dense_layers - start, size))
        found.append(Stage(index, dense, size - dense, embedding=index == 0, head=index == pp - 1))
        start += size
    return found


def in_flight(setup: Setup, stage: int) -> float:
    """Micro-batches whose activations a stage holds at the peak.

    1F1B: p - stage, no more than there are; interleaved: x (1 + (p - 1) / (p v)) on the first stage (arXiv 2205.05198);
    zero-bubble (ZB-H1) as 1F1B; DualPipe: p + 1 on every stage (its README).
    """
    pp, batches = setup.pp, setup.micro_batches
    if pp == 1:
        return 1.0
    if setup.options.schedule == "dualpipe":
        return min(pp + 1, batches)
    if setup.options.schedule == "interleaved" and setup.options.virtual > 1:
        v = setup.options.virtual
        return min((pp * v + pp - 1 - 2 * stage) / v, batches)
    return min(pp - stage, batches)


def bubble(setup: Setup) -> float:
    """Idle share of the ideal pipeline time: (p - 1) / m, / v interleaved; zero-bubble and DualPipe as fractions of it.

    Zero-bubble ZB-H1 leaves (p - 1)(F + B - 2W) with F = B = W (B here without weight gradients): a third of 1F1B.
    DualPipe: (p / 2 - 1)(F&B + B - 3W) with F&B = 2.. 3 units; taken as (p / 2 - 1) of one unit F (README of DualPipe).
    """
    pp, batches = setup.pp, setup.micro_batches
    if pp == 1:
        return 0.0
    plain = (pp - 1) / batches
    match setup.options.schedule:
        case "interleaved":
            return plain / setup.options.virtual
        case "zero-bubble":
            return plain / 3
        case "dualpipe":
            return max(0.0, pp / 2 - 1) / 3 / batches
    return plain
