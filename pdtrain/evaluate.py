"""Validation loss on the held-out split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pdtrain.model.loss import cross_entropy
from pdtrain.model.transformer import Transformer
from pdtrain.parallel.meshes import Meshes
from pdtrain.parallel.tensor import vocabulary_parallel_loss


@torch.no_grad()
def validation_loss(
    model: Transformer, sequences: np.ndarray, micro_batch: int, meshes: Meshes | None, device: torch.device
) -> float:
    """Mean cross-entropy in nat/token over `sequences` [n, s + 1]; collective, the same value on every rank.

    Every DP rank makes the same number of forward passes; a tail that would not fill them evenly is left out, and when
    there are fewer sequences than DP ranks every rank computes the first one.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with vocabulary_parallel_loss(meshes):
        for tokens in _batches(sequences, micro_batch, meshes, device):
            loss = plain(cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))
            total += torch.stack((loss.double() * tokens.shape[0], loss.new_tensor(tokens.shape[0]).double()))
    if meshes is not None:
        dist.all_reduce(total, group=meshes.dp.get_group())
    model.train(was_training)
    return (total[0] / total[1]).item()


def _batches(
    sequences: np.ndarray, micro_batch: int, meshes: Meshes | None, device: torch.device
) -> Iterator[Tensor]:
    dp, rank = (1, 0) if meshes is None else (meshes.dp.size(), meshes.dp.get_local_rank())
    per_rank = max(1, len(sequences) // dp)
    start = rank * per_rank if len(sequences) >= dp else 0
    for first in range(start, start + per_rank, micro_batch):
        yield torch.from_numpy(sequences[first : min(first + micro_batch, start + per_rank)]).to(device)


def plain(value: Tensor) -> Tensor:
    """A loss that may be a DTensor over the tensor group, as a plain tensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
