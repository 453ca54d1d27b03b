"""How fast a memory snapshot is explained: 745,000 events against torch's own `_memory_viz trace_plot`, then 1 GB.

    python benchmarks/memory.py                          # both sizes, the peer at 745,000 events
    python benchmarks/memory.py --events 100000 --large 0     # a quick look

Snapshots come from a seed: steps of a training loop on one device, 500,000 actions of the program (an allocation or
its free; each free is two events), then steps with their own copy of the stack for every event, as torch writes when
C++ frames are recorded. Both contestants are whole commands, start-up included, run one after the other; the memory is
the peak of the command and its children together. The answer is checked too: the peak must be the generator's own.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from hang import BIN, measure

MIB = 1 << 20
BASE = 0x7F0000000000
LIB = "/env/lib/python3.11/site-packages/torch"


def stacks(count: int, depth: int) -> list[list[dict[str, Any]]]:
    """`count` different stacks of `depth` frames that share most frames."""
    shared = [{"filename": f"{LIB}/nn/modules/module.py", "line": 1700 + i, "name": "_call_impl"} for i in range(depth)]
    return [[{"filename": f"/job/model/layer_{i % 9}.py", "line": i, "name": "forward"}, *shared[i % 7 : depth - 1]]
            for i in range(count)]


def generate(path: Path, events: int, *, own_stacks: bool = False, depth: int = 12, seed: int = 0) -> tuple[int, int]:
    """Write a snapshot of `events` events; (peak of the requested bytes, size of the file)."""
    rng = random.Random(seed)
    places = stacks(300, depth)
    trace: list[dict[str, Any]] = []
    free: dict[int, list[int]] = {}
    next_address, total, peak, now = BASE, 0, 0, 1_757_000_000_000_000
    alive: list[tuple[int, int, Any]] = []

    def event(action: str, address: int, size: int, stack: Any) -> None:
        nonlocal now
        now += rng.randrange(1, 40)
        trace.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": now,
                      "frames": list(stack) if own_stacks else stack})

    kept = [(BASE - (64 << 30) + i * 64 * MIB, 64 * MIB - 100, places[0]) for i in range(200)]
    total = peak = sum(size for _, size, _ in kept)
    while len(trace) < events:
        for _ in range(rng.randrange(400, 500)):  # a step: up, then down
            size = rng.choice((300, 4096, 65_000, 2 * MIB + 17, 9 * MIB, 33 * MIB))
            stack = rng.choice(places)
            block = -(-size // 512) * 512
            pool = free.setdefault(block, [])
            if pool:
                address = pool.pop()
            else:
                address = next_address
                next_address += block
            event("alloc", address, size, stack)
            alive.append((address, size, stack))
            total += size
            peak = max(peak, total)
        while len(alive) > rng.randrange(0, 3):
            address, size, stack = alive.pop(rng.randrange(max(len(alive) - 5, 0), len(alive)))
            event("free_requested", address, size, stack)
            event("free_completed", address, size, stack)
            free[-(-size // 512) * 512].append(address)
            total -= size
    blocks = [{"address": a, "size": -(-s // 512) * 512, "requested_size": s, "state": "active_allocated",
               "frames": f} for a, s, f in kept]
    at, used = BASE, sorted(alive, key=lambda item: item[0])
    top = [{"address": a, "size": -(-s // 512) * 512, "requested_size": s, "state": "active_allocated", "frames": f}
           for a, s, f in used]
    filled = []
    for block in top:
        if block["address"] > at:
            filled.append({"address": at, "size": block["address"] - at, "requested_size": 0, "state": "inactive",
                           "frames": []})
        filled.append(block)
        at = block["address"] + block["size"]
    if next_address > at:
        filled.append({"address": at, "size": next_address - at, "requested_size": 0, "state": "inactive",
                       "frames": []})

    def segment(address: int, size: int, inside: list[dict[str, Any]]) -> dict[str, Any]:
        held = sum(b["size"] for b in inside if b["state"] != "inactive")
        return {"device": 0, "address": address, "total_size": size, "allocated_size": held, "active_size": held,
                "requested_size": sum(b["requested_size"] for b in inside), "stream": 0, "segment_type": "large",
                "segment_pool_id": (0, 0), "is_expandable": True, "frames": [], "blocks": inside}

    low = kept[0][0]
    segments = [segment(low, kept[-1][0] + 64 * MIB - low, blocks), segment(BASE, next_address - BASE, filled)]
    with path.open("wb") as file:
        pickle.dump({"segments": segments, "device_traces": [trace], "allocator_settings": {},
                     "external_annotations": []}, file)
    return peak, path.stat().st_size


def ours(path: Path, peak: int, turns: int) -> dict[str, Any]:
    """The best of `turns`, and whether the answer is right."""
    runs = [measure([str(BIN / "pdtrain"), "diag", "memory", "--json", str(path)]) for _ in range(turns)]
    report = json.loads(runs[0][2])
    right = bool(report["findings"]) and report["findings"][0]["numbers"].get("peak_requested_bytes") == peak
    return {"seconds": round(min(r[0] for r in runs), 2), "peak_mib": round(max(r[1] for r in runs)), "right": right}


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=745_000)
    parser.add_argument("--large", type=int, default=2_600_000, help="events with stacks of their own; 0: none")
    parser.add_argument("--depth", type=int, default=70, help="frames of a stack in the large file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--keep", metavar="DIR", help="generate into DIR and leave the files there")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "memory", "events": options.events}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        path = folder / "snapshot.pickle"
        peak, size = generate(path, options.events)
        result["megabytes"] = round(size / 1e6)
        result["ours"] = ours(path, peak, options.turns)
        page = [str(BIN / "pdtrain"), "diag", "memory", str(path), "--html", str(folder / "ours.html"), "--force",
                "--no-tree"]
        seconds, memory, _ = measure(page)
        result["ours_html"] = {"seconds": round(seconds, 2), "peak_mib": round(memory),
                               "megabytes": round((folder / "ours.html").stat().st_size / 1e6, 2)}
        peer = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(folder / "p.html")]
        seconds, memory, _ = measure(peer)
        result["peer"] = {"seconds": round(seconds, 2), "peak_mib": round(memory),
                          "megabytes": round((folder / "p.html").stat().st_size / 1e6, 2)}
        result["ratio"] = round(seconds / result["ours"]["seconds"], 1)
        if options.large:
            large = folder / "large.pickle"
            peak, size = generate_apart(large, options.large, options.depth)
            result["large"] = {"events": options.large, "megabytes": round(size / 1e6), **ours(large, peak, 1)}
    import torch

    result |= {"peer_version": f"torch.cuda._memory_viz of torch {torch.__version__}", "load": os.getloadavg()[0],
               "machine": f"{os.cpu_count()} x {platform.machine()}", "python": platform.python_version()}
    print(f"{'':24}{'MB':>7}{'seconds':>9}{'peak MiB':>10}")
    rows = [("pdtrain --json", result["megabytes"], result["ours"]),
            ("pdtrain --html", result["megabytes"], result["ours_html"]),
            ("_memory_viz trace_plot", result["megabytes"], result["peer"])]
    if options.large:
        rows.append(("pdtrain --json, large", result["large"]["megabytes"], result["large"]))
    for name, size, row in rows:
        print(f"{name:24}{size:>7}{row['seconds']:>9}{row['peak_mib']:>10}")
    print(json.dumps(result))


def generate_apart(path: Path, events: int, depth: int) -> tuple[int, int]:
    """`generate` with stacks of their own, in a process of its own: the events take more memory than the reader may."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import memory; "
            "print(*memory.generate(Path(sys.argv[2]), int(sys.argv[3]), own_stacks=True, depth=int(sys.argv[4])))")
    _, _, out = measure([sys.executable, "-c", code, str(Path(__file__).parent), str(path), str(events), str(depth)])
    peak, size = out.split()
    return int(peak), int(size)


if __name__ == "__main__":
    main()
