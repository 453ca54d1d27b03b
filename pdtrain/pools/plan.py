"""Which update rank owns which part of the model, and in which buckets it travels. Plain arithmetic, no torch.

Inside the compute pool the gradients are reduced to one shard per rank. A piece is one rank's shard of one parameter;
where several ranks hold the same elements (replicas), one of them exchanges it and hands the new weights on, so that
the traffic between the pools does not grow with data parallelism. Each element crosses once up and once down per step.

The pieces, in the order of ranks and of the forward pass, are cut into as many runs of equal size as there are update
ranks: a compute rank then talks to few owners, and there are at most compute + update - 1 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from diag.errors import UsageError


@dataclass(frozen=True, slots=True)
class Piece:
    """One compute rank's shard of one parameter. `holders`: all ranks that hold these elements, `rank` among them."""

    rank: int
    name: str
    row: str
    shape: tuple[int, ...]  #: of the whole parameter
    offset: tuple[int, ...]
    local: tuple[int, ...]  #: shape of the shard
    holders: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.local)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that travel in one message between `rank` and `owner`, in forward order. `index` counts per rank."""

    index: int
    rank: int
    owner: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every bucket of the job. The same on all ranks, because all make it from the same descriptions."""

    compute: tuple[int, ...]
    update: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    shared: tuple[Piece, ...]  #: pieces that other ranks hold as well: the ranks that exchange them hand them on

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(compute, update) ranks that exchange something, in the order in which their groups are made."""
        return sorted({(bucket.rank, bucket.owner) for bucket in self.buckets})

    def of(self, rank: int) -> list[Bucket]:
        """The buckets that `rank`, of either pool, exchanges."""
        return [bucket for bucket in self.buckets if rank in (bucket.rank, bucket.owner)]

    def peers(self, rank: int) -> list[int]:
        """The ranks of the other pool that `rank` exchanges with."""
        return sorted({b if rank == a else a for a, b in self.pairs if rank in (a, b)})

    def parameters(self, rank: int) -> int:
        """Elements that `rank` exchanges in one direction per step."""
        return sum(bucket.numel for bucket in self.of(rank))

    def describe(self, mode: str, payload: str, staleness: int, item_bytes: int) -> dict[str, Any]:
        """`pools` in environment.json."""
        total = sum(bucket.numel for bucket in self.buckets)
        return {
            "mode": mode,
            "compute": list(self.compute),
            "update": list(self.update),
            "pairs": [list(pair) for pair in self.pairs],
            "payload": payload,
            "staleness": staleness,
            "owners": {
                str(rank): {"serves": self.peers(rank), "parameters": self.parameters(rank),
                            "state_bytes": 12 * self.parameters(rank)}
                for rank in self.update
            },
            "bytes_up": total * item_bytes,
            "bytes_down": total * item_bytes,
        }


def make_plan(shards: Sequence[Sequence[Piece]], update_ranks: int, bucket_bytes: int, item_bytes: int) -> Plan:
    """The plan for `shards`, the pieces of each compute rank in forward order, `holders` still empty.

    Raises UsageError: there are fewer pieces than update ranks.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for pieces in shards:
        for piece in pieces:
            if piece.numel:
                holders.setdefault((piece.name, piece.offset), []).append(piece.rank)
    names: dict[str, int] = {}
    exchanged: list[Piece] = []
    for pieces in shards:
        for piece in pieces:
            turn = names.setdefault(piece.name, len(names))  # replicas take turns, parameter by parameter
            if not piece.numel:
                continue
            held = holders[piece.name, piece.offset]
            if held[turn % len(held)] == piece.rank:
                exchanged.append(
                    Piece(piece.rank, piece.name, piece.row, piece.shape, piece.offset, piece.local, tuple(held))
                )
    compute = tuple(range(len(shards)))
    update = tuple(range(len(shards), len(shards) + update_ranks))
    owners = _owners(exchanged, update)
    if len(set(owners)) < update_ranks:
        raise UsageError(
            f"pools.update_ranks = {update_ranks} is more than this model can keep busy: it has "
            f"{len(exchanged)} shards; use at most {len(set(owners))}"
        )
    buckets: list[Bucket] = []
    counts = dict.fromkeys(compute, 0)
    waiting: list[Piece] = []
    for position, (piece, owner) in enumerate(zip(exchanged, owners, strict=True)):
        waiting.append(piece)
        following = position + 1
        ends = following == len(exchanged) or (exchanged[following].rank, owners[following]) != (piece.rank, owner)
        if ends or sum(each.numel for each in waiting) * item_bytes >= bucket_bytes:
            buckets.append(Bucket(counts[piece.rank], piece.rank, owner, tuple(waiting)))
            counts[piece.rank] += 1
            waiting = []
    return Plan(compute, update, tuple(buckets), tuple(piece for piece in exchanged if len(piece.holders) > 1))


def _owners(pieces: Sequence[Piece], update: Sequence[int]) -> list[int]:
    """The update rank of each piece: the run in which its middle lies."""
    total = sum(piece.numel for piece in pieces)
    owners, before = [], 0
    for piece in pieces:
        middle = before + piece.numel / 2
        owners.append(update[min(len(update) - 1, int(middle * len(update) / total))])
        before += piece.numel
    return owners
