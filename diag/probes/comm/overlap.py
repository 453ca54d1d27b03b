"""How much of an all-reduce and of an all-to-all hides under matrix products that run at the same time.

hidden = (computation alone + exchange alone - both together) / the shorter of the two: 1 when the shorter one costs
nothing, 0 when they take turns, negative when they disturb each other. On CPUs both want the same cores. The three are
measured in turn, and where one and the same thing takes such different times that the answer lies in their noise, there
is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from diag.probes.comm.hierarchy import REPEATS, median
from diag.probes.comm.operations import ITEM, Bench
from diag.probes.comm.records import Extra

#: Rows and columns of one product.
WIDTH = {"cpu": 256, "cuda": 4096}
#: Half of the middle half of all three times together, as a share of the shorter one, above which nothing can be told.
NOISE = 0.5


def measure(bench: Bench, bytes_: int) -> Iterator[Extra | str]:
    """One result for each of the two operations at `bytes_`."""
    import torch
    import torch.distributed as dist

    size = bench.size
    width = WIDTH["cpu" if bench.device == "cpu" else "cuda"]
    a = torch.ones(width, width, device=bench.device)
    b = torch.empty_like(a)
    x = torch.zeros(max(1, bytes_ // ITEM // size) * size, device=bench.device)
    y = torch.empty_like(x)

    def product() -> None:
        torch.mm(a, a, out=b)

    once = median(bench, product)
    for name in ("all_reduce", "all_to_all"):

        def start(name: str = name):  # type: ignore[no-untyped-def]
            if name == "all_reduce":
                return dist.all_reduce(x, async_op=True)
            return dist.all_to_all_single(y, x, async_op=True)

        exchange = median(bench, lambda: start().wait())
        products = max(1, min(1000, int(exchange / max(once, 1e-7))))

        def compute(products: int = products) -> None:
            for _ in range(products):
                product()

        def together() -> None:
            work = start()
            compute()
            work.wait()

        began = time.perf_counter()
        times = in_turn(bench, [lambda start=start: start().wait(), compute, together])  # type: ignore[misc]
        exchange, alone, both = (sorted(row)[REPEATS // 2] for row in times)
        numbers: dict[str, float | int | str] = {"bytes": x.numel() * ITEM, "exchange_seconds": exchange,
                                                 "compute_seconds": alone, "both_seconds": both}
        share = hidden(*times)
        yield Extra(kind="overlap", name=name, numbers=numbers if share is None else numbers | {"hidden": share})
        if bench.largest(time.perf_counter() - began)[0] > 30.0:
            yield "overlap of all_to_all: a single one takes too long here"
            return


def in_turn(bench: Bench, runs: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Times of the slowest rank of each of `runs`, one after the other so that what disturbs one disturbs all."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for run, row in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            bench.wait()
            row.append(time.perf_counter() - start)
    return [bench.largest(*row) for row in times]


def hidden(exchange: Sequence[float], compute: Sequence[float], both: Sequence[float]) -> float | None:
    """The share that is hidden; None where times vary by more than `NOISE` of what could be hidden."""
    rows = [sorted(row) for row in (exchange, compute, both)]
    middle = [row[len(row) // 2] for row in rows]
    spread = sum((row[-len(row) // 4] - row[len(row) // 4]) / 2 for row in rows)
    shorter = min(middle[0], middle[1])
    if shorter <= 0 or spread > NOISE * shorter:
        return None
    return min(1.0, (middle[0] + middle[1] - middle[2]) / shorter)
