"""Which splits the layout and the batch of a run allow, and how a change is typed."""

from __future__ import annotations

from dataclasses import dataclass

from diag.artefacts.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run's configuration demands of its compute ranks; ones where it does not say.

    `unit`: pipeline times tensor, and pipeline times expert, must both divide the compute ranks. `batch`: sequences per
    step, which the data-parallel ranks must divide; 0 where it is not known.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    batch: int = 0
    micro_batch: int = 1

    @classmethod
    def of(cls, config: RunConfig | None) -> Limits:
        """The limits of a resolved configuration."""
        if config is None:
            return cls()

        def degree(key: str, default: int = 1) -> int:
            value = config.number(key)
            return int(value) if value is not None and value >= 1 else default

        return cls(degree("modules.attention.tensor"), degree("modules.experts.expert"),
                   degree("parallel.pipeline"), degree("train.train_batch", 0), degree("train.micro_batch"))

    def compute(self, ranks: int) -> bool:
        """Whether so many compute ranks factorise, and share the batch evenly."""
        if ranks < 1 or ranks % (self.pipeline * self.tensor) or ranks % (self.pipeline * self.expert):
            return False
        return self.micro(ranks) is not None

    def micro(self, ranks: int) -> int | None:
        """The largest micro-batch up to the present one with which so many ranks make the same batch; None: none."""
        dp = ranks // (self.pipeline * self.tensor)
        if not self.batch:
            return self.micro_batch
        if self.batch % dp:
            return None
        share = self.batch // dp
        return next(size for size in range(min(self.micro_batch, share), 0, -1) if share % size == 0)

    def split(self, compute: int, update: int) -> bool:
        """Whether a split is one that the trainer takes: any number of update ranks, compute ranks that factorise."""
        return update >= 1 and self.compute(compute)


def command(limits: Limits, directory: str, compute: int, update: int) -> str:
    """What to type to go on with another split."""
    micro = limits.micro(compute)
    smaller = f" --set train.micro_batch={micro}" if micro is not None and micro != limits.micro_batch else ""
    return (f"pdtrain train {directory}/config.toml --run-dir {directory} --resume --nproc {compute + update} "
            f"--set parallel.ranks={compute} --set pools.update_ranks={update}{smaller}")
