"""The operations of a sweep: how each is done, how its result is checked. Imports torch lazily, in the ranks only.

`bytes` is counted as nccl-tests does: the whole buffer of one rank (of all_gather what it receives, of reduce_scatter
and all_to_all what it sends).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: What is sent is small whole numbers, exact in every dtype and sum.
PERIOD = 7
ITEM = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """torch, the group and the device an operation runs on; `ranks` are the group's members in its order."""

    group: Any
    ranks: tuple[int, ...]
    me: int
    device: str

    @property
    def size(self) -> int:
        return len(self.ranks)

    def wait(self) -> None:
        """Until the device has done what was asked of it; Gloo's calls return when they are done."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over the group: what all agree on."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, *values: float) -> list[float]:
        """The sum of each value over the group."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: tuple[float, ...], how: Any) -> list[float]:
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how, group=self.group)
        return [float(value) for value in tensor.cpu()]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation at one size, its buffers made. `run` does it once, `wrong` counts the result's wrong elements."""

    name: str
    bytes: int
    count: int
    run: Callable[[], object]
    wrong: Callable[[], int]


def hot_share(size: int) -> float:
    """What part of its rows every rank sends to the hot one: half of them; of two ranks, three quarters."""
    return 0.5 if size > 2 else 0.75


def splits(size: int, elements: int) -> list[int]:
    """How many of `elements` a rank sends to each of `size` ranks when rank 0 has the hot expert."""
    cold = int(elements * (1 - hot_share(size))) // (size - 1)
    return [elements - cold * (size - 1), *[cold] * (size - 1)]


def buffer_bytes(name: str, size: int, bytes_: int) -> int:
    """Bytes that the buffers of one rank take, at worst, the check included."""
    received = int(size * hot_share(size) * bytes_) if name == "all_to_all_skewed" else bytes_
    return 2 * (bytes_ + received)


def prepare(bench: Bench, name: str, bytes_: int) -> Operation:
    """`name` with buffers of about `bytes_`; rounded to what divides among the ranks. Names: `ask.OPERATIONS`."""
    import torch
    import torch.distributed as dist

    size, me, group = bench.size, bench.me, bench.group
    whole = name in ("all_reduce", "broadcast", "send_recv")
    elements = max(1, bytes_ // ITEM) if whole else max(1, bytes_ // ITEM // size) * size
    part = elements // size

    def pattern(count: int, start: int = 0) -> Any:
        return torch.arange(start, start + count, device=bench.device).remainder_(PERIOD).to(torch.float32)

    def count_wrong(result: Any, expected: Any) -> int:
        return int((result != expected).sum())

    if name == "all_reduce":
        x = pattern(elements) + me

        def expected_sum() -> int:
            return count_wrong(x, pattern(elements) * size + size * (size - 1) // 2)

        return Operation(name, elements * ITEM, elements, lambda: dist.all_reduce(x, group=group), expected_sum)
    if name == "broadcast":
        x = pattern(elements) + me
        return Operation(name, elements * ITEM, elements,
                         lambda: dist.broadcast(x, src=bench.ranks[0], group=group),
                         lambda: count_wrong(x, pattern(elements)))
    if name == "send_recv":
        x, y = pattern(elements) + me, torch.zeros(elements, device=bench.device)
        after, before = bench.ranks[(me + 1) % size], bench.ranks[(me - 1) % size]

        def ring() -> None:
            asked = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, y, before, group)]
            for work in dist.batch_isend_irecv(asked):
                work.wait()

        return Operation(name, elements * ITEM, elements, ring,
                         lambda: count_wrong(y, pattern(elements) + (me - 1) % size))
    if name == "all_gather":
        x, y = pattern(part) + me, torch.zeros(elements, device=bench.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Operation(name, elements * ITEM, part, lambda: gather(y, x, group=group), lambda: count_wrong(
            y.view(size, part), pattern(part) + torch.arange(size, device=bench.device)[:, None]))
    if name == "reduce_scatter":
        x, y = pattern(elements) + me, torch.zeros(part, device=bench.device)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return Operation(name, elements * ITEM, part, lambda: scatter(y, x, group=group),
                         lambda: count_wrong(y, pattern(part, me * part) * size + size * (size - 1) // 2))
    outgoing = splits(size, elements) if name == "all_to_all_skewed" else [part] * size
    incoming = [outgoing[me]] * size
    x = pattern(elements) + me
    y = torch.zeros(sum(incoming), device=bench.device)

    def check() -> int:
        begin = sum(outgoing[:me])
        return count_wrong(y.view(size, outgoing[me]),
                           pattern(outgoing[me], begin) + torch.arange(size, device=bench.device)[:, None])

    return Operation(name, elements * ITEM, part, lambda: dist.all_to_all_single(
        y, x, incoming, outgoing, group=group), check)
