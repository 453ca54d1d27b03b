"""Phase separation in numbers: what an update pool holds, what crosses between the pools, and whether that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diag.errors import UsageError
from diag.pools.against import Verdict, against
from diag.pools.balance import choice_of, verdict
from diag.pools.exchange import exposed
from diag.pools.gather import separated
from diag.pools.legal import Limits, command
from diag.pools.members import slow_update
from diag.pools.ratio import Choice, Split, unseparated
from diag.pools.report import read_runs
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.parameters import count
from pdtrain.plan.setup import Setup

#: Cross-pool traffic above this share of a step calls for deeper buffers, compression or another placement.
WORTH_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Pools:
    """An update pool of `ranks`. Bytes per step: gradients there, weights back, both in the payload's dtype.

    saved_bytes: optimizer state that one compute rank no longer holds. exchange_seconds: on the network devices of the
    compute ranks and of the pool, whichever is slower.
    """

    ranks: int
    state_bytes_per_rank: float
    exchange_bytes_per_step: float
    exchange_bytes_per_token: float
    exchange_seconds: float
    saved_bytes: float
    pays: bool
    reason: str


def pools(setup: Setup, hardware: Hardware, step_seconds: float, optimizer_seconds: float, saved: float) -> Pools:
    """The pool of `pools.update_ranks`, or of one rank in eight where the configuration has none yet."""
    total = count(setup.run.model).trained
    ranks = setup.run.pools.update_ranks or max(1, setup.ranks // 8)
    payload = 2 if setup.run.precision.all == "bf16" else 4
    exchange = 2.0 * payload * total  # every gradient once, every weight once
    rate = hardware.network_bandwidth * 0.8
    seconds = max(exchange / 2 / (rate * ranks), exchange / 2 / (rate * setup.ranks)) * 2
    share = seconds / step_seconds
    if share > WORTH_SHARE:
        pays, why = False, f"the exchange takes {share:.0%} of a step, above {WORTH_SHARE:.0%}"
    elif setup.ranks <= hardware.devices_per_node:
        pays, why = False, "the job fits on one node"
    elif optimizer_seconds < 0.05 * step_seconds and setup.sharding in ("zero1", "zero2", "zero3"):
        part = optimizer_seconds / step_seconds
        pays, why = False, f"the update takes {part:.1%} of a step and its state is already sharded"
    else:
        pays, why = True, f"the exchange takes {share:.1%} of a step; it frees {saved / 1e9:.1f} GB per compute rank"
    return Pools(
        ranks, 12.0 * total / ranks, exchange, exchange / setup.tokens_per_step, seconds, saved, pays, why
    )


@dataclass(frozen=True, slots=True)
class MeasuredPools:
    """What one separated run showed. `without`: (ranks, seconds per step) of the same work on one pool, estimated from
    the run's own seconds; `beside`: against runs that trained the same without pools, measured."""

    directory: str
    mode: str
    split: Split
    exchange_share: float
    choice: Choice
    slow: list[int]
    change: str | None
    without: tuple[int, float] | None
    beside: list[Verdict]

    def pays(self, needed: bool) -> tuple[bool | None, str]:
        """Whether separation pays, and the sentence that says so with both numbers.

        `needed`: without pools the states do not fit, so that there is nothing to be compared with.
        """
        if self.beside:
            best = min(self.beside, key=lambda item: item.other.step_seconds * item.other.ranks)
            return best.pays, best.text
        like = "as if no rank were slow" if self.slow else "measured"
        now = self.choice.now
        seconds = f"{now.step_seconds:.3g} s per step with pools ({now.text} ranks, {like})"
        if self.without is None:
            return None, f"{seconds}; without pools no number of ranks up to {self.split.ranks} fits the layout"
        ranks, estimate = self.without
        both = f"{seconds} against about {estimate:.3g} s on {ranks} without (estimated from the same seconds)"
        if ranks != now.ranks:
            both += f"; in rank-seconds per step {now.step_seconds * now.ranks:.3g} against {estimate * ranks:.3g}"
        cheaper = now.step_seconds * now.ranks < estimate * ranks
        if needed:
            return True, f"separation is needed: without it the states do not fit; {both}"
        if cheaper:
            return None, f"separation does no harm here: {both}; train a run without pools and give it as well"
        return False, f"separation does not pay here: {both}"


def measured_pools(directories: Sequence[Path]) -> list[MeasuredPools]:
    """The separated runs among `directories`, each beside those that were not.

    Raises:
        UsageError: a path is missing, or no separated run with enough measured steps is among them.
    """
    artefacts = read_runs(directories)
    found = []
    for job in separated(artefacts):
        split, out = job.split, exposed(job)
        if split is None or not split.step_seconds:
            continue
        limits = Limits.of(job.config)
        slow = slow_update(job)
        choice = choice_of(job, split, [], slow)
        change = command(limits, job.directory, choice.best.compute, choice.best.update) \
            if choice.changes and choice.balances else None
        found.append(MeasuredPools(job.directory, job.mode or "?", split, out.share if out else 0.0, choice,
                                   sorted(item.rank for item in slow), change, unseparated(choice.now, limits.compute),
                                   against(job, artefacts)))
    if not found:
        names = ", ".join(map(str, directories[:3]))
        raise UsageError(f"--measured {names}: no separated run with measured steps of both pools; "
                         "see `pdtrain diag pools`")
    return found


def measured_text(found: Sequence[MeasuredPools], needed: bool) -> Iterator[str]:
    """For people: what was measured, the ratio that balances, and whether separation pays."""
    for run in found:
        split = run.split
        yield (f"measured in {run.directory} ({run.mode}, {split.text} ranks): compute {split.compute_busy:.0%} busy, "
               f"update {split.update_busy:.0%}, {split.step_seconds:.3g} s per step, {run.exchange_share:.0%} of it "
               "on the exchange")
        if split.balanced:
            yield "  the pools are balanced"
        else:
            if run.slow:
                yield f"  update rank {', '.join(map(str, run.slow))} is slow: see `pdtrain diag pools {run.directory}`"
            yield f"  {verdict(run.choice)}"
            if run.change is not None:
                yield f"  {run.change}"
        yield f"  {run.pays(needed)[1]}"


def measured_json(found: Sequence[MeasuredPools], needed: bool) -> list[dict[str, Any]]:
    """The same as objects."""
    rows = []
    for run in found:
        pays, why = run.pays(needed)
        rows.append({
            "directory": run.directory, "mode": run.mode, "split": asdict(run.split), "exchange": run.exchange_share,
            "gap_points": run.split.points, "balances": run.choice.balances, "best": asdict(run.choice.best),
            "slow_ranks": run.slow, "change": run.change, "without": run.without, "pays": pays, "why": why,
            "beside": [asdict(item) | {"pays": item.pays} for item in run.beside],
        })
    return rows
