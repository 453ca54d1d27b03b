"""Which splits the layout and the batch of a run allow, and how a change is typed."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from diag.artefacts.run_config import RunConfig

#: Keys of [pools] that are a mistake with mode "off", and what takes each back.
NEEDS_POOLS: dict[str, str | int | None] = {"rebalance": "off", "restarts": 0, "keep": None}


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
    """What to type to go on with another split, the batch unchanged."""
    return (f"pdtrain train {quote(directory + '/config.toml')} --run-dir {quote(directory)} --resume "
            f"--nproc {compute + update} --set parallel.ranks={compute} --set pools.update_ranks={update}"
            f"{_batch(limits, compute)}")


def command_without(limits: Limits, directory: str, ranks: int, config: RunConfig | None) -> str:
    """What to type to measure the same job without pools, in a directory of its own."""
    return (f"pdtrain train {quote(directory + '/config.toml')} --run-dir {quote(directory + '-without-pools')} "
            f"--nproc {ranks} --set parallel.ranks={ranks} {without_pools(config)} "
            f"--set train.steps=50{_batch(limits, ranks)}")


def without_pools(config: RunConfig | None) -> str:
    """The options that take the pools from a configuration, with what the trainer refuses without them."""
    words = "--set pools.mode=off --set pools.update_ranks=0"
    for key, nothing in NEEDS_POOLS.items():
        value = config.get(f"pools.{key}") if config is not None else None
        if value not in (None, nothing):
            words += f" --set pools.{key}={'none' if nothing is None else nothing}"
    return words


def _batch(limits: Limits, compute: int) -> str:
    """The keys that keep the batch: a run's config.toml has all of them written out."""
    micro = limits.micro(compute)
    if micro is None or not limits.batch:
        return ""
    smaller = f" --set train.micro_batch={micro}" if micro != limits.micro_batch else ""
    dp = compute // (limits.pipeline * limits.tensor)
    return f"{smaller} --set train.accumulation={limits.batch // (micro * dp)}"
