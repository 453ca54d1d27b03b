"""What a rank needs in memory with and without pools: the peak of resident memory over some steps.

    python benchmarks/pool_memory.py [--steps 4] [--hidden 1024] [--layers 8] [--modes off,sync,stream] [--keep DIR]

Runs of `pdtrain train`, stopped after so many steps: one rank that does everything, then one compute and one update
rank. Peaks are the kernel's own (VmHWM), read all along; a row per rank, then one line of JSON. Some 250 MB of each are
Python and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
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
steps = 100000
log_every = 1
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


def done(path: Path) -> int:
    """Steps that a rank has finished."""
    return max((row["step"] for row in rows_of(path) if row.get("span") == "backward" and "step" in row), default=0)


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
                                    head=options.hidden // 8, ffn=4 * options.hidden))
    command = [sys.executable, "-m", "pdtrain.cli", "train", str(config), "--run-dir", str(run_dir)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    events = [run_dir / "events" / f"rank_{rank}.jsonl" for rank in range(1 + update)]
    pids: dict[int, int] = {}
    peaks: dict[int, int] = {}
    until = time.monotonic() + options.timeout
    try:
        while done(events[0]) < options.steps:
            if time.monotonic() > until:
                raise TimeoutError(f"{mode}: no {options.steps} steps within {options.timeout:g} s")
            if process.poll() is not None:
                raise RuntimeError(f"{mode}: the run ended with status {process.returncode}")
            for rank, path in enumerate(events):
                if rank not in pids and (started := rows_of(path)):
                    pids[rank] = started[0]["pid"]
                if rank in pids and (peak := peak_of(pids[rank])) is not None:
                    peaks[rank] = max(peak, peaks.get(rank, 0))
            time.sleep(0.05)
    finally:
        for pid in (*pids.values(), process.pid):  # the launcher's ranks have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    found = []
    for rank, path in enumerate(events):
        steps = [row for row in rows_of(path) if row.get("event") == "pool_step"]
        found.append({"mode": mode, "rank": rank, "role": steps[-1]["role"] if steps else "both",
                      "peak_bytes": peaks[rank], "state_bytes": steps[-1]["state_bytes"] if steps else None})
    return found


def main() -> None:
    """Print a row per rank and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--modes", default="off,sync,stream")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds that one run may take")
    parser.add_argument("--keep", metavar="DIR", help="leave the runs there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for mode in options.modes.split(","):
            for row in train(folder, options, mode):
                rows.append(row)
                state = "" if row["state_bytes"] is None else f", optimizer state {row['state_bytes'] / 1e6:,.0f} MB"
                print(f"{mode:8} rank {row['rank']} {row['role']:8} peak {row['peak_bytes'] / 1e6:,.0f} MB{state}",
                      file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", "pdtrain.cli", "train", str(folder / f"{rows[-1]['mode']}.toml"),
                               "--dry-run", "--json"], check=True, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        parameters = sum(module["parameters"] for module in json.loads(done.stdout)["modules"].values())
    for row in rows:
        row["bytes_per_parameter"] = round(row["peak_bytes"] / parameters, 2)
    print(f"{parameters:,} parameters; FP32 weights, gradients and moments are 16 B each", file=sys.stderr)
    print(json.dumps({"benchmark": "pool_memory", "parameters": parameters, "rows": rows,
                      "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
