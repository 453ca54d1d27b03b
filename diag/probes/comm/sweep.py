"""Sizes and operations of one group, within a budget of time and memory on which its ranks agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from diag.probes.comm.ask import Ask
from diag.probes.comm.operations import Bench, Operation, buffer_bytes, prepare
from diag.probes.comm.records import Row, bus_factor
from diag.probes.host_words import size as size_words

#: Fewer repetitions than this say nothing about their scatter.
LEAST = 3
#: Small messages are repeated up to this many times the iterations asked for.
SMALL_TIMES = 5
SMALL = 64 << 10
#: Part of the free memory that buffers may take.
MEMORY_SHARE = 0.5

Enter = Callable[[str], None]


def sweep(bench: Bench, operations: Sequence[str], sizes: Sequence[int], ask: Ask, enter: Enter, *, group: str,
          budget: float, memory: float, concurrent: bool = False, note: str = "") -> Iterator[Row | str]:
    """A row for each operation and size; a sentence for sizes left out. Equal on every rank of the group.

    `budget` in seconds, `memory` in bytes for the buffers of this rank; both are agreed on by the group.
    """
    begun = time.perf_counter()
    memory = -bench.largest(-memory)[0]
    for index, name in enumerate(operations):
        spent = bench.largest(time.perf_counter() - begun)[0]
        allowed = max(0.0, budget - spent) / (len(operations) - index)
        began, last = time.perf_counter(), 0.0
        for place, bytes_ in enumerate(sizes):
            label = f"{name} {size_words(bytes_)}" + ("" if group == "world" else f" in {group}")
            left = allowed - bench.largest(time.perf_counter() - began)[0]
            growth = bytes_ / sizes[place - 1] if place else 1.0
            if buffer_bytes(name, bench.size, bytes_) > memory:
                yield f"{label} and above: their buffers need more than half of the free memory"
                break
            if left < (LEAST + 2) * last * min(growth, 4.0) or left <= 0:
                yield f"{label} and above: would exceed the time budget of {ask.budget:g} s (--budget)"
                break
            enter(label)
            operation = prepare(bench, name, bytes_)
            row, last = measure(bench, operation, ask.iterations, left / (len(sizes) - place), lambda at=label: enter(
                at))  # type: ignore[misc]
            row.group, row.ranks, row.concurrent, row.note = group, list(bench.ranks), concurrent, note
            del operation
            yield row


def measure(bench: Bench, operation: Operation, iterations: int, seconds: float, progress: Callable[[], None],
            ) -> tuple[Row, float]:
    """The row of `operation` and the seconds of one repetition, after a checked warm-up."""
    first = time.perf_counter()
    operation.run()
    bench.wait()
    wrong = operation.wrong()
    first = time.perf_counter() - first
    progress()
    again = time.perf_counter()
    operation.run()
    bench.wait()
    once = bench.largest(min(first, time.perf_counter() - again))[0]
    most = iterations * (SMALL_TIMES if operation.bytes <= SMALL else 1)
    repeat = int(max(LEAST, min(most, seconds / max(once, 1e-7))))
    times = []
    for _ in range(repeat):
        progress()
        start = time.perf_counter()
        operation.run()
        bench.wait()
        times.append(time.perf_counter() - start)
    # the mean over ranks, as nccl-tests: a rank that comes late to one repetition is early in the next
    ordered = sorted(seconds / bench.size for seconds in bench.total(*times))
    median = ordered[repeat // 2] if repeat % 2 else sum(ordered[repeat // 2 - 1 :][:2]) / 2
    algorithm = operation.bytes / median / 1e9
    row = Row(operation=operation.name, bytes=operation.bytes, count=operation.count, iterations=repeat,
              min_seconds=ordered[0], median_seconds=median, p99_seconds=ordered[_place(repeat)], algbw=algorithm,
              busbw=algorithm * bus_factor(operation.name, bench.size), wrong=int(bench.total(wrong)[0]))
    return row, median


def _place(count: int) -> int:
    """Index of the 99th percentile, by nearest rank."""
    return max(0, -(-99 * count // 100) - 1)
