"""How fast a hang is analysed: 256 ranks x 2,000 entries against torch's own `torchfrtrace`, then 1,024 ranks.

    python benchmarks/hang.py                       # both sizes, the peer at 256 ranks
    python benchmarks/hang.py --ranks 64 --large 0  # a quick look

Dumps come from a seed: wrapped rings of a run with tensor, expert, data and world groups, three frames per call, and
one rank that stops. Both contestants are whole commands, start-up included, run one after the other in this run; the
memory is the peak of the command and its children together. The answers are checked too: ours must name the rank.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent
GUILTY = 77
GROUPS = (("TENSOR_MODEL_PARALLEL_GROUP", 8, 1), ("EXPERT_MODEL_PARALLEL_GROUP", 64, 1), ("DATA_PARALLEL_GROUP", 0, 8),
          ("default_pg", 0, 1))
#: One step: which group, what, where in the program. 20 calls.
_LAYER = [(0, "_all_gather_base", 101), (1, "all_to_all", 203), (1, "all_to_all", 207),
          (0, "_reduce_scatter_base", 104)]
STEP = _LAYER * 4 + [
    (2, "_reduce_scatter_base", 310), (2, "_all_gather_base", 311), (3, "all_reduce", 402), (3, "all_reduce", 405)]


def members(kind: int, rank: int, world: int) -> list[int]:
    """The ranks of `rank`'s group of this kind."""
    _, size, stride = GROUPS[kind]
    if size:
        first = rank // size * size
        return list(range(first, min(first + size, world)))
    return list(range(rank % stride, world, stride)) if stride > 1 else list(range(world))


def dump(rank: int, world: int, entries: int) -> bytes:
    """What torch 2.9 would have written on `rank` when rank `GUILTY` did not come to the last step."""
    names = {kind: str(kind * world + members(kind, rank, world)[0]) for kind in range(len(GROUPS))}
    frames = {line: [{"name": "wrapper", "filename": "/env/torch/distributed/c10d_logger.py", "line": 81},
                     {"name": f"layer_{line}", "filename": "/job/pretrain/model.py", "line": line},
                     {"name": "<module>", "filename": "/job/pretrain/train.py", "line": 12}]
              for line in {line for _, _, line in STEP}}
    sizes = [len(members(kind, rank, world)) for kind in range(len(GROUPS))]
    issued = [0] * len(GROUPS)
    rows: list[dict[str, Any]] = []
    before = 7 * len(STEP)
    total = before + entries
    for number in range(total):
        kind, op, line = STEP[number % len(STEP)]
        issued[kind] += 1
        last = number >= total - 4
        if rank == GUILTY and last:
            issued[kind] -= 1
            break
        if number < before:
            continue
        into, out = line, line
        if "gather" in op:
            out *= sizes[kind]
        elif "scatter" in op:
            into *= sizes[kind]
        at = 1_757_000_000_000_000_000 + number * 1_000_000 + rank * 37
        rows.append({
            "frames": frames[line], "record_id": number, "pg_id": kind,
            "process_group": (names[kind], GROUPS[kind][0]), "collective_seq_id": issued[kind], "p2p_seq_id": 0,
            "op_id": issued[kind], "profiling_name": f"nccl:{op}", "time_created_ns": at,
            "input_sizes": [[4096, 1, into]], "input_dtypes": ["BFloat16"],
            "output_sizes": [[4096, 1, out]], "output_dtypes": ["BFloat16"],
            "state": "scheduled" if last else "completed", "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None if last else at + 400_000, "retired": not last,
            "timeout_ms": 600_000, "is_p2p": False, "thread_id": "140719717157760", "thread_name": "pt_main_thread"})
    config = {name: {"name": name, "desc": GROUPS[kind][0], "ranks": str(members(kind, rank, world))}
              for kind, name in names.items()}
    status = {str(kind): {"last_enqueued_collective": issued[kind], "last_started_collective": -1,
                          "last_completed_collective": issued[kind]} for kind in names}
    return pickle.dumps({"version": "2.10", "pg_config": config, "comm_lib_version": "2.27.3", "pg_status": status,
                         "entries": rows}, protocol=2)


def generate(folder: Path, world: int, entries: int) -> int:
    """Write the dumps; their size in bytes."""
    folder.mkdir()
    size = 0
    for rank in range(world):
        size += (folder / f"nccl_trace_rank_{rank}").write_bytes(dump(rank, world, entries))
    return size


def measure(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak MiB of the command with its children, and what it wrote."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = 0.0

    def watch() -> None:
        nonlocal peak
        try:
            top = psutil.Process(process.pid)
            while process.poll() is None:
                tree = [top, *top.children(recursive=True)]
                peak = max(peak, sum(_resident(p) for p in tree) / 2**20)
                time.sleep(0.02)
        except psutil.Error:
            pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    seconds = time.perf_counter() - began
    watcher.join()
    return seconds, peak, out


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def ours(folder: Path, turns: int) -> dict[str, Any]:
    """The best of `turns`, and whether the answer is right."""
    runs = [measure([str(BIN / "pdtrain"), "diag", "hang", "--json", str(folder)]) for _ in range(turns)]
    report = json.loads(runs[0][2])
    right = report["findings"][0]["where"].get("ranks") == [GUILTY]
    return {"seconds": round(min(r[0] for r in runs), 2), "peak_mib": round(max(r[1] for r in runs)), "right": right}


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--large", type=int, default=1024, help="a second size without the peer; 0: none")
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "hang", "entries": options.entries}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "small"
        result["megabytes"] = round(generate(folder, options.ranks, options.entries) / 1e6)
        result["ranks"] = options.ranks
        result["ours"] = ours(folder, options.turns)
        peer = [str(BIN / "torchfrtrace"), str(folder), "--prefix", "nccl_trace_rank_"]
        seconds, peak, out = measure(peer)
        result["peer"] = {"seconds": round(seconds, 2), "peak_mib": round(peak), "lines": out.count("\n")}
        result["ratio"] = round(seconds / result["ours"]["seconds"], 1)
        if options.large:
            folder = Path(scratch) / "large"
            generate(folder, options.large, options.entries)
            result["large"] = {"ranks": options.large, **ours(folder, 1)}
    import torch

    result |= {"peer_version": f"torchfrtrace of torch {torch.__version__}", "load": os.getloadavg()[0],
               "machine": f"{os.cpu_count()} x {platform.machine()}", "python": platform.python_version()}
    print(f"{'':14}{'ranks':>7}{'seconds':>9}{'peak MiB':>10}")
    rows = [("pdtrain", options.ranks, result["ours"]), ("torchfrtrace", options.ranks, result["peer"])]
    if options.large:
        rows.append(("pdtrain", options.large, result["large"]))
    for name, ranks, row in rows:
        print(f"{name:14}{ranks:>7}{row['seconds']:>9}{row['peak_mib']:>10}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
