"""How much of an all-reduce and of an all-to-all hides under matrix products that run at the same time.

hidden = (computation alone + exchange alone - both together) / the shorter of the two: 1 when the shorter one costs
nothing, 0 when they take turns, negative when they disturb each other. On CPUs both want the same cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from diag.probes.comm.hierarchy import median
from diag.probes.comm.operations import ITEM, Bench
from diag.probes.comm.records import Extra

#: Rows and columns of one product.
WIDTH = {"cpu": 256, "cuda": 4096}


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

        alone = median(bench, compute)
        began = time.perf_counter()
        both = median(bench, together)
        yield Extra(kind="overlap", name=name, numbers={
            "bytes": x.numel() * ITEM, "exchange_seconds": exchange, "compute_seconds": alone, "both_seconds": both,
            "hidden": (exchange + alone - both) / min(exchange, alone)})
        if bench.largest(time.perf_counter() - began)[0] > 10.0:
            yield "overlap of all_to_all: a single one takes too long here"
            return
