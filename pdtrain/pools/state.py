"""The update pool's state as torch.distributed.checkpoint sees it: the same keys and chunks as the unseparated run's.

A master is part of a tensor whose other parts other update ranks hold; `Parts` tells the planner which part lies
where, through the protocol that DTensor uses as well. So a run may save with pools and resume without, and vice versa.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pdtrain.checkpoint import Checkpointer
from pdtrain.config.schema import Run
from pdtrain.model.transformer import row_of
from pdtrain.pools.compute import ComputeSide
from pdtrain.pools.update import UpdateSide


class Parts(Tensor):
    """The parts of one FP32 tensor of `shape` that this rank holds: offset -> tensor. Only a planner can use it."""

    parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Tensor]) -> Parts:
        self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=torch.float32)  # type: ignore[attr-defined]
        self.parts = dict(parts)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{operation} on a tensor that is held in parts")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts.items()]

    def __create_write_items__(self, name: str, tensor: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), part.shape),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


class UpdateCheckpointer(Checkpointer):
    """Checkpoints of a run with pools, from the update ranks alone. `buffers`: the model's, on the first of them."""

    def __init__(
        self, root: Path, run: Run, side: UpdateSide, rows: Iterable[str], data_fingerprint: str, world: int,
        group: dist.ProcessGroup, buffers: dict[str, Tensor],
    ) -> None:
        super().__init__(root, run, None, None, rows, data_fingerprint, group=group)
        self.side = side
        self.world = world  # of the whole job
        self.buffers = buffers

    def row_state(self, row: str) -> dict[str, Tensor]:
        """As `pdtrain.checkpoint.state.row_state`, of what this rank owns."""
        state: dict[str, Tensor] = {
            f"model.{name}": buffer for name, buffer in self.buffers.items() if row_of(name) == row
        }
        shapes: dict[str, tuple[int, ...]] = {}
        parts: dict[str, dict[tuple[int, ...], Tensor]] = {}
        for owned in self.side.owned:
            for piece, master in owned.pieces():
                if piece.row != row:
                    continue
                held = owned.optimizer.state[master]
                for key, tensor in [(f"model.{piece.name}", master.detach())] + [
                    (f"optimizer.{piece.name}.{moment}", held[moment]) for moment in owned.moments[master]
                ]:
                    shapes[key] = piece.shape
                    parts.setdefault(key, {})[piece.offset] = tensor
                state.setdefault(f"optimizer.{piece.name}.step", held["step"])
        return state | {key: Parts(shapes[key], held) for key, held in parts.items()}

    def after_restore(self) -> None:
        """Every piece of a parameter has its own step count; the checkpoint has one."""
        counts: dict[str, Tensor] = {}
        for owned in self.side.owned:
            for piece, master in owned.pieces():
                held = owned.optimizer.state[master]
                counts.setdefault(piece.name, held["step"])
                held["step"].copy_(counts[piece.name])


class RemoteCheckpointer:
    """What a compute rank sees of the checkpoints: it asks the update pool, and waits until it is done."""

    def __init__(self, root: Path, side: ComputeSide, own: Checkpointer, where: dict[str, str]) -> None:
        self.root = root
        self.side = side
        self.own = own  # for the cadence only
        self.own.where = where
        self.problem = ""
        self.told = False  # whether the update pool knows what to do after this step

    @property
    def where(self) -> dict[str, str]:
        """Row -> the folder that holds its newest save."""
        return self.own.where

    def due(self, step: int) -> list[str]:
        """As Checkpointer.due."""
        return self.own.due(step)

    def save(
        self, step: int, consumed: int, rows: Iterable[str] | None = None, end: bool | Literal["saved"] | None = None
    ) -> bool:
        """As Checkpointer.save; `rows` None: all, and the run ends here; `end` "saved": only if it was saved."""
        chosen = list(rows) if rows is not None else None
        wanted = {"consumed": consumed, "rows": chosen, "buffers": self.side.buffers()}
        self.side.after(step, save=wanted, end=rows is None if end is None else end)
        self.told = True
        answer = self.side.report(step)
        self.problem = answer["problem"]
        self.own.where = answer["where"]
        return bool(answer["saved"])

    def go_on(self, step: int) -> None:
        """The loop is done with `step`; unless `save` has said so, the update pool learns it here."""
        if not self.told:
            self.side.after(step)
        self.told = False
