"""What a rank needs in memory with and without pools: the peak of resident memory before the last checkpoint.

    python benchmarks/pool_memory.py [--steps 12] [--hidden 1024] [--layers 8] [--modes off,sync,stream] [--keep DIR]

Whole runs of `pdtrain train`: one rank that does everything, then one compute and one update rank. Peaks are the
kernel's own (VmHWM), read all along; a row per rank, then one line of JSON. Some 250 MB of each are Python and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = """
[model]
hidden = {hidden}
layers = {layers}
dense_layers = {layers}
heads = 8
kv_heads = 8
head_dim = {head}
ffn_hidden = {ffn}
[train]
steps = {steps}
sequence_length = 64
micro_batch = 1
train_batch = 1
val_sequences = 0
[optimizer]
warmup_steps = 1
[recorder]
tensorboard = false
[pools]
mode = "{mode}"
update_ranks = {update}
timeout_seconds = 120
"""
ROOT = Path(__file__).parents[1]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an events file so far."""
    try:
        return [json.loads(text) for text in path.read_text().split("\n")[:-1]]
    except OSError:
        return []


def peak_of(pid: int) -> int | None:
    """The peak of resident memory of a process in bytes; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def train(folder: Path, options: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """One run, watched: per rank its role and its peak of resident memory."""
    update = 0 if mode == "off" else 1
    config, run_dir = folder / f"{mode}.toml", folder / mode
    config.write_text(CONFIG.format(mode=mode, update=update, hidden=options.hidden, layers=options.layers,
                                    head=options.hidden // 8, ffn=4 * options.hidden, steps=options.steps))
    command = [sys.executable, "-m", "pdtrain.cli", "train", str(config), "--run-dir", str(run_dir)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    events = [run_dir / "events" / f"rank_{rank}.jsonl" for rank in range(1 + update)]
    pids: dict[int, int] = {}
    seen: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(1 + update)}
    try:
        until = time.monotonic() + options.timeout
        while process.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"{mode}: no end within {options.timeout:g} s")
            for rank, path in enumerate(events):
                if rank not in pids and (started := rows_of(path)):
                    pids[rank] = started[0]["pid"]
                if rank in pids and (peak := peak_of(pids[rank])) is not None:
                    seen[rank].append((time.time(), peak))
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{mode}: the run ended with status {process.returncode}")
    found = []
    for rank, path in enumerate(events):
        rows = rows_of(path)
        saving = min((row["start"] for row in rows if row.get("span") == "checkpoint"), default=time.time())
        steps = [row for row in rows if row.get("event") == "pool_step"]
        role = steps[-1]["role"] if steps else "both"
        found.append({"mode": mode, "rank": rank, "role": role,
                      "peak_bytes": max(peak for moment, peak in seen[rank] if moment < saving),
                      "state_bytes": steps[-1]["state_bytes"] if steps else None})
    return found


def main() -> None:
    """Print a row per rank and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--modes", default="off,sync,stream")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds that one run may take")
    parser.add_argument("--keep", metavar="DIR", help="leave the runs there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for mode in options.modes.split(","):
            rows += train(folder, options, mode)
        done = subprocess.run([sys.executable, "-m", "pdtrain.cli", "train", str(folder / f"{rows[-1]['mode']}.toml"),
                               "--dry-run", "--json"], check=True, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        parameters = sum(module["parameters"] for module in json.loads(done.stdout)["modules"].values())
    print(f"{parameters:,} parameters; FP32 weights, gradients and moments are 16 B each", file=sys.stderr)
    print(f"{'mode':8}{'rank':>5}{'role':>9}{'peak MB':>9}{'B/parameter':>12}", file=sys.stderr)
    for row in rows:
        row["bytes_per_parameter"] = round(row["peak_bytes"] / parameters, 2)
        print(f"{row['mode']:8}{row['rank']:>5}{row['role']:>9}{row['peak_bytes'] / 1e6:>9,.0f}"
              f"{row['bytes_per_parameter']:>12}", file=sys.stderr)
    print(json.dumps({"benchmark": "pool_memory", "parameters": parameters, "rows": rows,
                      "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
