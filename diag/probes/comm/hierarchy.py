"""One all-to-all in one step among all ranks, against two: inside each node, then between equal places of all nodes.

The second sends as many bytes between nodes, in messages that are larger by the ranks of a node; DeepSeek's and Tutel's
reports gain by it where small messages across nodes are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from diag.probes.comm.operations import ITEM, Bench
from diag.probes.comm.records import Extra

REPEATS = 5


def compare(bench: Bench, per_node: int, bytes_: int) -> Iterator[Extra | str]:
    """Both ways at `bytes_` per rank and at 1/64 of it; a sentence where there are no two nodes of equal size."""
    import torch
    import torch.distributed as dist

    size = bench.size
    if not 1 < per_node < size or size % per_node:
        yield "hierarchical all-to-all: needs at least two nodes of as many ranks (--ranks-per-node to pretend)"
        return
    nodes = size // per_node
    inner = outer = None
    for node in range(nodes):
        group = dist.new_group(list(range(node * per_node, (node + 1) * per_node)))
        inner = group if bench.me // per_node == node else inner
    for place in range(per_node):
        group = dist.new_group(list(range(place, size, per_node)))
        outer = group if bench.me % per_node == place else outer
    for amount in (max(bytes_ // 64, size * ITEM), bytes_):
        part = max(1, amount // ITEM // size)
        x = torch.arange(part * size, dtype=torch.float32, device=bench.device) + bench.me
        flat, y, z = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)

        def at_once(x: Any = x, flat: Any = flat) -> None:
            dist.all_to_all_single(flat, x)

        def in_steps(x: Any = x, y: Any = y, z: Any = z, part: int = part) -> None:
            # [node of the receiver, place of the receiver, ...] -> place first: all that goes to a place, to that place
            dist.all_to_all_single(y, x.view(nodes, per_node, part).transpose(0, 1).contiguous(), group=inner)
            dist.all_to_all_single(z, y.view(per_node, nodes, part).transpose(0, 1).contiguous(), group=outer)

        first, second = median(bench, at_once), median(bench, in_steps)
        wrong = int((z != flat).sum())
        yield Extra(kind="hierarchy", name=f"{nodes} nodes of {per_node}", numbers={
            "bytes": part * size * ITEM, "flat_seconds": first, "hierarchical_seconds": second,
            "gain": first / second, "wrong": wrong})


def median(bench: Bench, run: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median of the slowest rank's times, after a warm-up."""
    run()
    bench.wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        bench.wait()
        times.append(time.perf_counter() - start)
    return sorted(bench.largest(*times))[repeats // 2]
