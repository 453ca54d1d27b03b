"""Is the exchange between the pools hidden? Step times over a throttled link, and what crossed it.

    python benchmarks/pool_overlap.py [--shares 0.3,0.7,1.5] [--steps 10] [--keep DIR] [--svg FILE]

A compute rank in one network namespace, an update rank in another, one thread each, the link between them shaped by
`tc tbf`. First the job runs without pools; then, at rates at which gradients and weights alone would take the given
shares of its forward and backward pass, in the modes `sync` and `stream`. Printed: seconds of a usual step, exposed
exchange (benchmarks/pool_timeline.py), bytes by the plan, by the run's own counters and by the interface's, a timeline
in characters; last one line of JSON. `--keep`: leave the runs in DIR and do not repeat those that are there.
Needs root, iproute2 and torch; where hosts cannot be made it says so and ends with status 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pool_timeline as timeline

from tests.netns.hosts import Network, missing
from tests.netns.training import HEADERS, Crossed, account, train_across

CONFIG = """
[model]
vocab_size = 256
hidden = 256
layers = 6
dense_layers = 6
heads = 4
kv_heads = 4
head_dim = 64
ffn_hidden = 1024
[train]
steps = {steps}
sequence_length = 256
micro_batch = {micro_batch}
train_batch = {micro_batch}
val_sequences = 0
[optimizer]
warmup_steps = 1
[recorder]
tensorboard = false
"""
POOLS = """
[pools]
mode = "{mode}"
update_ranks = 1
bucket_mb = {bucket_mb}
timeout_seconds = 60
"""


def alone(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """The job without pools: seconds of a step, and of its forward and backward pass."""
    run_dir = folder / "off"
    if not (run_dir / "metrics.jsonl").exists():
        config = folder / "off.toml"
        config.write_text(CONFIG.format(**vars(options)))
        command = [sys.executable, "-m", "pdtrain.cli", "train", str(config), "--run-dir", str(run_dir)]
        root = str(Path(__file__).parents[1])
        subprocess.run(command, check=True, capture_output=True, timeout=150,
                       env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root})
    rank = timeline.read(run_dir, 0)
    starts = timeline.begins(rank)
    steps = sorted(starts)[timeline.SETTLING :]
    windows = [(starts[a], starts[b]) for a, b in zip(steps, steps[1:], strict=False)]
    work = rank.of("forward", "backward")
    return {"step": timeline.median(b - a for a, b in windows),
            "compute": timeline.median(timeline.length(timeline.clip(work, window)) for window in windows),
            "optimizer": timeline.median(timeline.length(timeline.clip(rank.of("optimizer"), w)) for w in windows)}


def separated(folder: Path, options: argparse.Namespace, mode: str, rate: float) -> dict[str, Any]:
    """One run with pools over a link of `rate` Mbit/s: what it took, what crossed, and its timeline."""
    run_dir = folder / f"{mode}-{rate:.0f}"
    seen = run_dir / "link.json"
    if not seen.exists():
        config = folder / f"{mode}.toml"
        config.write_text(CONFIG.format(**vars(options)) + POOLS.format(mode=mode, **vars(options)))
        samples: list[tuple[float, Crossed]] = []
        with Network(2, rate, options.mtu) as network:
            train_across(network, config, run_dir, timeout=options.timeout, tick=0.01, during=samples)
        rows = [(time, c.sent_bytes, c.sent_packets, c.received_bytes, c.received_packets) for time, c in samples]
        seen.write_text(json.dumps(rows))
    compute, update = timeline.read(run_dir, 0), timeline.read(run_dir, 1)
    samples = [(time, Crossed(*counts)) for time, *counts in json.loads(seen.read_text())]
    link = [(a, b, *((y - x) * 8e-6 / rate / (b - a) for x, y in ((p.sent_bytes, q.sent_bytes),
                                                                  (p.received_bytes, q.received_bytes))))
            for (a, p), (b, q) in zip(samples, samples[1:], strict=False)]
    starts = timeline.begins(compute)
    steps = sorted(starts)
    window = (starts[steps[-4]], starts[steps[-2]])
    lanes = timeline.lanes(compute, update, link, window)  # type: ignore[arg-type]
    return {"mode": mode, "rate_mbit": rate, **timeline.per_step(compute, update), "window": window, "lanes": lanes,
            "bytes": account(run_dir, samples[-1][1])}


def main() -> None:
    """Print the table, the timelines and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", default="0.3,0.7,1.5", help="seconds on the link over seconds of compute")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--mtu", type=int, default=9000, help="bytes of an IP packet; 1500 costs more processor time")
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--modes", default="sync,stream")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one run may take")
    parser.add_argument("--keep", metavar="DIR")
    parser.add_argument("--svg", metavar="FILE", help="draw the timelines of the middle rate")
    options = parser.parse_args()
    if why := missing():
        print(json.dumps({"benchmark": "pool_overlap", "skipped": why}))
        return
    with tempfile.TemporaryDirectory() as scratch:
        report(options, Path(options.keep or scratch))


def report(options: argparse.Namespace, folder: Path) -> None:
    """Run what is not there yet, and print."""
    folder.mkdir(parents=True, exist_ok=True)
    off = alone(folder, options)
    print(f"without pools: {off['step']:.3f} s per step, {off['compute']:.3f} s forward and backward", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    panels = []
    shares = [float(share) for share in options.shares.split(",")]
    bits = 2 * 32 * parameters(folder)
    for share in shares:
        rate = round(bits * (1 + HEADERS / (options.mtu - 52)) / (share * off["compute"]) / 1e6)
        for mode in options.modes.split(","):
            row = separated(folder, options, mode, rate)
            rows.append({"share": share, **{k: v for k, v in row.items() if k not in ("lanes", "window")}})
            title = f"{mode}, {rate} Mbit/s"
            print(f"\n{title}: one character is {(row['window'][1] - row['window'][0]) / 88 * 1e3:.0f} ms",
                  timeline.as_text(row["lanes"], row["window"]), sep="\n", file=sys.stderr)
            if share == shares[len(shares) // 2]:
                panels.append((title, row["lanes"], row["window"]))
    if options.svg:
        Path(options.svg).write_text(timeline.as_svg(panels))
    print(f"\n{'link/compute':>12}{'Mbit/s':>8}{'mode':>8}{'step s':>8}{'exposed s':>10}{'off by %':>9}{'TCP/IP %':>9}",
          file=sys.stderr)
    print(f"{'':20}{'off':>8}{off['step']:>8.3f}", file=sys.stderr)
    for row in rows:
        print(f"{row['share']:>12}{row['rate_mbit']:>8.0f}{row['mode']:>8}{row['step']:>8.3f}{row['exposed']:>10.3f}"
              f"{row['bytes']['off_percent']:>9}{row['bytes']['tcp_ip_percent']:>9}", file=sys.stderr)
    hidden = {}
    for share in shares:
        by_mode = {row["mode"]: row["exposed"] for row in rows if row["share"] == share}
        if {"sync", "stream"} <= set(by_mode):
            hidden[str(share)] = round(1 - by_mode["stream"] / by_mode["sync"], 3)
    print(json.dumps({"benchmark": "pool_overlap", "without": off, "rows": rows, "hidden": hidden,
                      "load": os.getloadavg()[0], "processors": os.cpu_count()}))


def parameters(folder: Path) -> int:
    """Parameters of the model, from the dry run of its configuration."""
    command = [sys.executable, "-m", "pdtrain.cli", "train", str(folder / "off.toml"), "--dry-run", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    return sum(module["parameters"] for module in json.loads(done.stdout)["modules"].values())


if __name__ == "__main__":
    main()
