"""What follows from a configuration: degrees, batch, and the effective value of every row of the policy table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from pdtrain.config.schema import MODULES, Dtype, ModulePolicy, Run

#: Rows that are FP32 whatever `precision.all` says, unless the row itself says otherwise: a BF16 router is the
#: first suspect when routing collapses, BF16 norms make the loss oscillate late.
FP32_ROWS = ("router", "norm")
#: Rows that are split over attention's tensor group.
TENSOR_ROWS = ("attention", "dense_ffn", "embed_head")
#: Rows whose matrices Muon takes with `optimizer.name = "muon"`. Embedding, head and norms stay with AdamW as in the
#: reports (kellerjordan.github.io/posts/muon, arXiv 2502.16982). The router does too: it is a classifier like the head,
#: and the first suspect when routing collapses (Moonlight gives it to Muon; nobody reports a comparison).
MUON_ROWS = ("attention", "experts", "shared_expert", "dense_ffn")
#: Seconds that a wait for the other pool may outlast its limit (pdtrain.pools.links.MERCY_SECONDS), and some.
SPEAKS_FIRST = 30.0
#: `pools.staleness` where it is absent.
STALENESS = 1
#: Steps in which it can be measured how busy the pools are: `diag.artefacts.pool_records.SETTLING` of a start,
#: `diag.pools.gather.LEAST_STEPS` after them, and the boundary's own, which the update pool's answer does not wait for.
LEAST_WINDOW = 3 + 8 + 1


@dataclass(frozen=True, slots=True)
class Resolved:
    """The arithmetic of one run: both factorisations of the ranks, the batch, and effective policies.

    ranks = pipeline x dp x tp = pipeline x edp x ep; world = ranks + update_ranks;
    train_batch [sequences] = micro_batch x accumulation x dp.
    """

    run: Run
    world: int
    ranks: int
    update_ranks: int
    pipeline: int
    tp: int
    dp: int
    ep: int
    edp: int
    micro_batch: int
    accumulation: int
    train_batch: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.train_batch * self.run.train.sequence_length

    @property
    def moe_layers(self) -> int:
        """Blocks with an MoE instead of a dense FFN."""
        return self.run.model.layers - self.run.model.dense_layers

    def policy(self, row: str) -> ModulePolicy:
        """The row as written.

        Raises:
            KeyError: `row` is none of `MODULES`.
        """
        if row not in MODULES:
            raise KeyError(f"no module row {row!r}; rows are {', '.join(MODULES)}")
        return getattr(self.run.modules, row)

    def dtype(self, row: str) -> Dtype:
        """Compute dtype: the row's own, else FP32 for router and norms, else `precision.all`."""
        return self.policy(row).dtype or ("fp32" if row in FP32_ROWS else self.run.precision.all)

    def tensor(self, row: str) -> int:
        """Tensor-parallel degree in effect: attention's for the rows that follow it, else 1."""
        return self.tp if row in TENSOR_ROWS else 1

    def expert(self, row: str) -> int:
        """Expert-parallel degree in effect: 1 for all rows but experts."""
        return self.ep if row == "experts" else 1

    def clip(self, row: str) -> float | None:
        """Gradient-norm limit: the row's own, else `optimizer.clip`; None is no clipping."""
        own = self.policy(row).clip
        return self.run.optimizer.clip if own is None else own

    def checkpoint_every(self, row: str) -> int:
        """Steps between saves: the row's own, else `checkpoint.every`; 0 is only at the end."""
        return self.policy(row).checkpoint_every or self.run.checkpoint.every

    def muon(self, row: str, dimensions: int) -> bool:
        """Whether Muon, not AdamW, updates a weight of `row` with so many dimensions; a stack of matrices has 3."""
        return takes_muon(self.run, row, dimensions)

    @property
    def state_tensors(self) -> dict[str, int]:
        """Row -> FP32 tensors per weight that the optimizer keeps, master included, for the row's matrices."""
        return {row: 2 if self.muon(row, 2) else 3 for row in MODULES}

    @property
    def staleness_bound(self) -> int:
        """`pools.staleness`, or its default."""
        return staleness_bound(self.run)

    @property
    def staleness(self) -> int:
        """By how many steps the weights of a forward pass are old: 0 unless pools.mode is async."""
        return self.staleness_bound if self.run.pools.mode == "async" else 0

    @property
    def collective_seconds(self) -> float:
        """Limit of one collective: train.timeout_seconds, and longer where a rank may come to it late because it waits
        for the other pool, of which it shall be the first to speak."""
        run = self.run
        return run.train.timeout_seconds + (run.pools.timeout_seconds + SPEAKS_FIRST if run.pools.update_ranks else 0)

    def lr(self, row: str) -> float:
        """Peak learning rate of the row."""
        return self.run.optimizer.lr * self.policy(row).lr_scale

    def weight_decay(self, row: str) -> float:
        """Decoupled weight decay of the row."""
        return self.run.optimizer.weight_decay * self.policy(row).weight_decay_scale


def takes_muon(run: Run, row: str, dimensions: int) -> bool:
    """See Resolved.muon."""
    return run.optimizer.name == "muon" and row in MUON_ROWS and dimensions >= 2


def staleness_bound(run: Run) -> int:
    """See Resolved.staleness_bound."""
    return STALENESS if run.pools.staleness is None else run.pools.staleness


def stage_ranks(run: Run) -> int:
    """Ranks of one pipeline stage, rounded down."""
    return run.parallel.ranks // run.parallel.pipeline


def data_degree(run: Run) -> int:
    """DP: the ranks of a stage that see different data; at least 1, rounded down where nothing divides."""
    return max(1, stage_ranks(run) // run.modules.attention.tensor)


def rebalance_window(run: Run) -> int:
    """Steps from one look at the pools' busy shares to the next: `pools.rebalance_every`, or 10 % of the steps."""
    return run.pools.rebalance_every or max(LEAST_WINDOW, math.ceil(run.train.steps / 10))


def fill(run: Run) -> Run:
    """`run` with `accumulation` and `train_batch` filled in, where one follows from the other.

    train_batch = micro_batch x accumulation x DP. What does not follow (nothing divides) is left as it is, and the
    rules say why.
    """
    train, dp = run.train, data_degree(run)
    per_pass = train.micro_batch * dp
    accumulation, batch = train.accumulation, train.train_batch
    if batch is None:
        accumulation = accumulation or 1
        batch = per_pass * accumulation
    elif accumulation is None and batch % per_pass == 0:
        accumulation = batch // per_pass
    filled = msgspec.structs.replace(train, accumulation=accumulation, train_batch=batch)
    return msgspec.structs.replace(run, train=filled)


def resolve(run: Run) -> Resolved:
    """The arithmetic of a validated run (one that `load_run` returned, or that `check` finds no error in)."""
    run = fill(run)
    if run.train.accumulation is None or run.train.train_batch is None:
        raise ValueError("batch identity does not hold: check the run with pdtrain.config.rules.check first")
    stage = stage_ranks(run)
    return Resolved(
        run=run,
        world=run.parallel.ranks + run.pools.update_ranks,
        ranks=run.parallel.ranks,
        update_ranks=run.pools.update_ranks,
        pipeline=run.parallel.pipeline,
        tp=run.modules.attention.tensor,
        dp=data_degree(run),
        ep=run.modules.experts.expert,
        edp=max(1, stage // run.modules.experts.expert),
        micro_batch=run.train.micro_batch,
        accumulation=run.train.accumulation,
        train_batch=run.train.train_batch,
    )
