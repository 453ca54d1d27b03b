"""Values handed to the recorder: kept where they are, read together once per logging interval.

A tensor is copied on its own device when it is handed over (so that a later in-place change cannot alter the record)
and stays there. `Pending.read` moves all waiting tensors of one device and dtype to the host in one copy: one host
sync per interval, whatever was logged in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Unreadable(Exception):
    """A value that cannot be read on this rank alone, such as a tensor whose parts live on other ranks."""


def hold(value: Any, *, copy: bool = True) -> Any:
    """`value` made safe to keep: tensors detached and copied on their device, without a host sync.

    `copy` false is for what is read before the caller can change it. Raises Unreadable for a sharded DTensor, whose
    reading would be a collective.
    """
    torch = sys.modules.get("torch")  # a loop that never imported torch hands no tensor over
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and isinstance(value, dtensor.DTensor):
        if not all(placement.is_replicate() for placement in value.placements):
            raise Unreadable(f"a DTensor placed {value.placements}: hand over .full_tensor(), called on every rank")
        value = value.to_local()
    return value.detach().clone() if copy else value.detach()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by "/": `{"grad_norm": {"router": 1.0}}` → `{"grad_norm/router": 1.0}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}/")
        else:
            found[prefix + str(key)] = value
    return found


class Pending:
    """Rows of metrics that wait for the end of the logging interval."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._marks: list[Any] = []  # one CUDA event per row, so that a crash can tell what is safe to read

    def add(self, row: dict[str, Any]) -> None:
        """Keep `row`, whose tensors have gone through `hold`; a row of the same step is merged into the last."""
        if self.rows and self.rows[-1].get("step") == row.get("step"):
            self.rows[-1] |= row
            self._marks[-1] = _mark(self.rows[-1])
        else:
            self.rows.append(row)
            self._marks.append(_mark(row))

    def read(self, *, crashed: bool = False) -> list[dict[str, Any]]:
        """All rows as plain Python values, in one copy per device and dtype; the store is empty afterwards.

        After a crash a stream may wait for ever behind a hung collective: then only rows that the device has finished
        are read, through a stream of their own, and the tensors of the others are left out.
        """
        rows, marks, self.rows, self._marks = self.rows, self._marks, [], []
        torch = sys.modules.get("torch")
        if torch is None:
            return rows
        waiting: dict[tuple[Any, Any], list[tuple[dict[str, Any], str, Any]]] = {}
        for row, mark in zip(rows, marks):
            finished = not crashed or mark is None or mark.query()
            for key in [key for key, value in row.items() if isinstance(value, torch.Tensor)]:
                tensor = row[key]
                if finished:
                    waiting.setdefault((tensor.device, tensor.dtype), []).append((row, key, tensor))
                else:
                    del row[key]
        for (device, _), items in waiting.items():
            flat = _together([tensor for _, _, tensor in items], own_stream=crashed and device.type == "cuda")
            start = 0
            for row, key, tensor in items:
                numbers = flat[start : start + tensor.numel()]
                start += tensor.numel()
                row[key] = numbers[0] if tensor.ndim == 0 or tensor.numel() == 1 and tensor.ndim <= 1 else _nested(
                    numbers, tuple(tensor.shape)
                )
        return rows


def _mark(row: dict[str, Any]) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not any(isinstance(value, torch.Tensor) and value.is_cuda for value in row.values()):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _together(tensors: list[torch.Tensor], *, own_stream: bool) -> list[Any]:
    import torch

    if len(tensors) == 1:
        joined = tensors[0].reshape(-1)
    elif not own_stream:
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    else:
        with torch.cuda.stream(torch.cuda.Stream(device=tensors[0].device)):
            host = torch.cat([tensor.reshape(-1) for tensor in tensors]).to("cpu", non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return host.tolist()
    return joined.tolist()


def _nested(numbers: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) <= 1:
        return numbers
    step = len(numbers) // shape[0] if shape[0] else 0
    return [_nested(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
