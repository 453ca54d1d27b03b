"""Whole matrices on the update rank that owns them, for Muon: its pieces come in buckets of several compute ranks.

Moments and masters stay as pieces, like everywhere else; a matrix is put together for the time of its iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pdtrain.optim.muon import MuonAdamW, orthogonalised
from pdtrain.pools.plan import Key, Piece, matrix_of

if TYPE_CHECKING:
    from pdtrain.pools.update import OwnedBucket


#: Number of the bucket, piece, master.
Part = tuple[int, Piece, nn.Parameter]


class Matrices:
    """The matrices among the pieces of `owned`, the buckets of one rank in the order in which they are applied."""

    def __init__(self, owned: Sequence[OwnedBucket]) -> None:
        self.owned = owned
        held: dict[Key, list[Part]] = {}
        for number, bucket in enumerate(owned):
            if isinstance(bucket.optimizer, MuonAdamW):
                for piece, master in bucket.pieces():
                    if bucket.optimizer.takes(master):
                        held.setdefault(matrix_of(piece), []).append((number, piece, master))
        self._complete: list[list[list[Part]]] = [[] for _ in owned]  # by bucket: matrices whose last part it holds
        whole = list(range(len(owned)))  # by bucket: the last one that it, or a matrix with a part in it, waits for
        for parts in held.values():
            last = parts[-1][0]
            self._complete[last].append(parts)
            for number, _, _ in parts:
                whole[number] = max(whole[number], last)
        self._done: list[list[OwnedBucket]] = [[] for _ in owned]
        for bucket, last in zip(owned, whole, strict=True):
            self._done[last].append(bucket)

    @torch.no_grad()
    def after(self, number: int) -> list[OwnedBucket]:
        """Bucket `number` was applied: step the matrices that are complete with it; the buckets that are now done."""
        for parts in self._complete[number]:
            self._step(parts)
        return self._done[number]

    def _step(self, parts: list[Part]) -> None:
        first = parts[0][1]
        stack = first.shape if len(first.shape) == 2 else (first.local[0], *first.shape[1:])
        whole = torch.empty(stack)
        if sum(piece.numel for _, piece, _ in parts) != whole.numel():
            raise AssertionError(f"the plan splits {first.name} between update ranks")
        for number, piece, master in parts:
            whole[_window(piece)] = self._muon(number).directions[master]
        made = orthogonalised(whole)
        for number, piece, master in parts:
            self._muon(number).move(master, made[_window(piece)].contiguous(), piece.shape)

    def _muon(self, number: int) -> MuonAdamW:
        optimizer = self.owned[number].optimizer
        assert isinstance(optimizer, MuonAdamW)
        return optimizer


def _window(piece: Piece) -> tuple[slice, ...]:
    """Where `piece` lies in its matrix, or in its experts' stack."""
    offset = piece.offset if len(piece.offset) == 2 else (0, *piece.offset[1:])
    return tuple(slice(start, start + size) for start, size in zip(offset, piece.local, strict=True))
