"""Which update rank owns which part of the model, and in which buckets it travels. Plain arithmetic, no torch.

Inside the compute pool the gradients are reduced to one shard per rank. A piece is one rank's shard of one parameter;
where several ranks hold the same elements (replicas), one of them exchanges it and hands the new weights on, so that
the traffic between the pools does not grow with data parallelism. Each element crosses once up and once down per step.

The pieces, in the order of ranks and of the forward pass, are cut into as many runs of equal size as there are update
ranks: a compute rank then talks to few owners, and there are at most compute + update - 1 pairs.

Muon needs whole matrices: then all pieces of a matrix, or of the same experts, have one owner, the cut goes through the
forward pass, and every compute rank talks to every owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType
from typing import Any

from diag.errors import UsageError

Key = tuple[str, tuple[int, ...]]
#: Indices on the wire are 32 bits wide.
INDEX_BYTES = 4
MOST_INDEXED = 2**31 - 1


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

    def state_bytes(self, rank: int, state_tensors: Mapping[str, int]) -> int:
        """Masters and moments of an update rank; `state_tensors`: row -> FP32 tensors per matrix, 3 where absent."""
        return sum(
            4 * piece.numel * (state_tensors.get(piece.row, 3) if len(piece.shape) > 1 else 3)
            for bucket in self.of(rank) for piece in bucket.pieces
        )

    def describe(
        self, mode: str, payload: str, staleness: int, item_bytes: int, *, top_k: float = 1.0,
        state_tensors: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, Any]:
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
                            "state_bytes": self.state_bytes(rank, state_tensors)}
                for rank in self.update
            },
            "bytes_up": sum(gradient_bytes(bucket.numel, item_bytes, top_k) for bucket in self.buckets),
            "bytes_down": total * item_bytes,
        }


def kept_elements(numel: int, top_k: float) -> int:
    """How many of a bucket's gradients travel."""
    return max(1, ceil(numel * top_k))


def gradient_bytes(numel: int, item_bytes: int, top_k: float) -> int:
    """Payload of one bucket of gradients: values, and their indices where not all travel."""
    return numel * item_bytes if top_k == 1 else kept_elements(numel, top_k) * (INDEX_BYTES + item_bytes)


def matrix_of(piece: Piece) -> Key:
    """What pieces of the same matrix, or of the same experts' matrices, have in common."""
    return (piece.name, piece.offset[:1] if len(piece.shape) == 3 else ())


def make_plan(
    shards: Sequence[Sequence[Piece]], update_ranks: int, bucket_bytes: int, item_bytes: int,
    whole: Callable[[Piece], bool] = lambda piece: False,
) -> Plan:
    """The plan for `shards`, the pieces of each compute rank in forward order, `holders` still empty.

    `whole`: which pieces belong to matrices that must not be divided between update ranks.
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
    units = [matrix_of(piece) if whole(piece) else (piece.name, piece.offset) for piece in exchanged]
    divides = len(set(units)) == len(units)
    order = list(range(len(units)))
    if not divides:
        order.sort(key=lambda position: (names[units[position][0]], units[position]))
    owners = _owners(exchanged, units, order, update)
    if len(set(owners)) < update_ranks:
        noun = "shards" if divides else "whole matrices, for Muon, and shards"
        raise UsageError(
            f"pools.update_ranks = {update_ranks} is more than this model can keep busy: it has "
            f"{len(set(units))} {noun}; use at most {len(set(owners))}"
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


def _owners(pieces: Sequence[Piece], units: Sequence[Key], order: Sequence[int], update: Sequence[int]) -> list[int]:
    """The update rank of each piece: the run, of equal runs in this `order`, in which the middle of its unit lies."""
    sizes: dict[Key, int] = {}
    for position in order:
        sizes[units[position]] = sizes.get(units[position], 0) + pieces[position].numel
    total, before = sum(sizes.values()), 0
    owner: dict[Key, int] = {}
    for unit, size in sizes.items():
        owner[unit] = update[min(len(update) - 1, int((before + size / 2) * len(update) / total))]
        before += size
    return [owner[unit] for unit in units]
