"""Resharding a DCP checkpoint from 2 to 8 files against torch.distributed.checkpoint's own way, taking turns.

    python benchmarks/checkpoint_reshard.py                       # 1 GB, 3 turns
    python benchmarks/checkpoint_reshard.py --gigabytes 4 --turns 1

The peer allocates the tensors, loads and saves them in one process (two writer threads, fsync as by default): what one
does without a tool. Ours is the command `pdtrain diag reshard`, start of the process, reading back and comparing every
byte included; the peer's time is that of load and save alone, without its imports. Also measured: peak resident memory
of either process, and ours against its limit of twice the largest tensor and 200 MB.

Prints a table and, last, one JSON line. Both folders lie on the same disk; the page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

#: Rows of the largest tensor; every tensor is [rows, 1024] FP32.
LARGEST = 16 * 1024
COLUMNS = 1024

PEER = """
import json, resource, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed.checkpoint as dcp
torch.set_num_threads(int(sys.argv[4]))
source, target, threads = sys.argv[1], sys.argv[2], int(sys.argv[4])
start = time.perf_counter()
metadata = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
dcp.load(state, checkpoint_id=source, no_dist=True)
dcp.save(state, storage_writer=dcp.FileSystemWriter(target, thread_count=threads), no_dist=True)
print(json.dumps({"seconds": time.perf_counter() - start, "torch": torch.__version__,
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: a temporary folder)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="reshard-", dir=options.folder))
    try:
        print(json.dumps(run(folder, options)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make(folder: Path, size: int) -> tuple[int, int]:
    """A checkpoint of `size` bytes in two files, made by the converter from a plain safetensors file of noise.

    Returns (bytes, bytes of the largest tensor).
    """
    from safetensors.numpy import save_file

    noise = np.random.default_rng(7)
    shards, total, largest = [], 0, 0
    raw = folder / "raw"
    raw.mkdir()
    while total < size:
        tensors, held = {}, 0
        while held < min(size - total, 500_000_000):
            rows = int(noise.choice([64, 1024, 4096, LARGEST]))
            name = f"blocks.{len(shards)}.{len(tensors)}.weight"
            tensors[name] = noise.random((rows, COLUMNS), np.float32)
            held += tensors[name].nbytes
            largest = max(largest, tensors[name].nbytes)
        shards.append((raw / f"model-{len(shards) + 1:05d}.safetensors", list(tensors)))
        save_file(tensors, shards[-1][0])
        total += held
    index = {"metadata": {"total_size": total}, "weight_map": {n: p.name for p, names in shards for n in names}}
    (raw / "model.safetensors.index.json").write_text(json.dumps(index))
    ours(raw, folder / "source", 2, 2)
    shutil.rmtree(raw)
    return total, largest


def ours(source: Path, target: Path, ranks: int, threads: int) -> tuple[float, int]:
    """(seconds of the whole command, its peak resident bytes)"""
    command = [sys.executable, "-m", "pdtrain.cli", "diag", "reshard", str(source), str(target), "--to", "dcp",
               "--ranks", str(ranks), "--threads", str(threads)]
    start = time.perf_counter()
    peak = _peak(command)
    return time.perf_counter() - start, peak


def _peak(command: list[str]) -> int:
    """Run `command`; its peak resident bytes. A child of a small child: RUSAGE_CHILDREN keeps the largest of all."""
    script = ("import json, resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); "
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)")
    done = subprocess.run([sys.executable, "-c", script, *command], check=True, capture_output=True, text=True)
    return int(done.stdout)


def peer(source: Path, target: Path, threads: int) -> dict[str, float]:
    """The peer's own account: seconds of load and save, peak resident bytes, version."""
    done = subprocess.run([sys.executable, "-c", PEER, str(source), str(target), "-", str(threads)], check=True,
                          capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Both, in turns; what is measured goes to stderr as it comes."""
    total, largest = make(folder, int(options.gigabytes * 1e9))
    rows: dict[str, list[float]] = {"ours": [], "ours_peak": [], "peer": [], "peer_peak": []}
    version = ""
    for turn in range(options.turns):
        for who in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            target = folder / f"{who}-{turn}"
            if who == "ours":
                seconds, peak = ours(folder / "source", target, 8, options.threads)
            else:
                said = peer(folder / "source", target, options.threads)
                seconds, peak, version = said["seconds"], int(said["peak"]), str(said["torch"])
            rows[who].append(seconds)
            rows[f"{who}_peak"].append(peak)
            print(f"{who:>5} {seconds:6.2f} s {total / seconds / 1e6:7.0f} MB/s  peak {peak / 1e6:6.0f} MB",
                  file=sys.stderr)
            shutil.rmtree(target)
            os.sync()
    best = {who: min(rows[who]) for who in ("ours", "peer")}
    limit = 2 * largest + 200_000_000
    return {
        "benchmark": "checkpoint_reshard", "bytes": total, "largest": largest, "turns": options.turns,
        "threads": options.threads, "ours": best["ours"], "peer": best["peer"], "ratio": best["peer"] / best["ours"],
        "ours_peak": max(rows["ours_peak"]), "peer_peak": max(rows["peer_peak"]), "limit": limit,
        "within_limit": max(rows["ours_peak"]) <= limit, "peer_version": f"torch {version}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "self_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
