"""Loss curves of phase separation on real text: payloads, stale weights and Muon, side by side.

    python benchmarks/pool_curves.py --out DIR [--steps 500] [--seed 0] [--only NAME,...] [--svg FILE] [--json]

Every variant is one `pdtrain train` job of 1 compute rank (and 1 update rank) on the text of the demo: a MoE of the
`tiny` preset's kind with hidden 64, 2 layers, 8 experts and 512 tokens per step. Same seed, same data, same order. A
variant whose run is already complete in DIR is not run again, so the work can be cut into pieces. Printed: the mean
loss of the last 50 steps, the validation loss, how far the curve strays from its reference, and the bytes that
travelled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

#: `tiny`, smaller: 500 steps take half a minute on one core.
MODEL = (
    "model.hidden=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.head_dim=16",
    "model.ffn_hidden=128", "model.moe.expert_hidden=32", "modules.attention.tensor=1", "modules.experts.expert=1",
    "parallel.ranks=1", "train.sequence_length=64", "train.micro_batch=8", "train.train_batch=8", "train.val_every=0",
    "train.val_sequences=64", "checkpoint.every=0", "recorder.tensorboard=false", "recorder.spans=false",
    "recorder.flight_recorder_entries=0", "recorder.module_times_every=1000000",
)  # fmt: skip
STREAM = ("pools.mode=stream", "pools.update_ranks=1")
ASYNC = ("pools.mode=async", "pools.update_ranks=1")
BF16 = ("pools.payload=bf16",)
FEEDBACK = ("pools.error_feedback=true",)
MUON = ("optimizer.name=muon",)
#: Steps of which a point of the plot is the mean, and of which the last figure is.
POINT, LAST = 10, 50


@dataclass(frozen=True)
class Variant:
    """One curve. `reference`: the variant from which its deviation is measured."""

    title: str
    settings: tuple[str, ...]
    reference: str = "unseparated"


VARIANTS = {
    "unseparated": Variant("unseparated, AdamW", ()),
    "stream": Variant("stream, FP32", STREAM),
    "bf16": Variant("stream, BF16", STREAM + BF16),
    "bf16-ef": Variant("stream, BF16 + feedback", STREAM + BF16 + FEEDBACK),
    "topk-ef": Variant("stream, top 5 % + feedback", (*STREAM, *FEEDBACK, "pools.top_k=0.05")),
    "async1": Variant("async s=1, AdamW", ASYNC),
    "async1-ef": Variant("async s=1, AdamW, BF16 + feedback", ASYNC + BF16 + FEEDBACK),
    "async4": Variant("async s=4, AdamW", (*ASYNC, "pools.staleness=4")),
    "muon": Variant("unseparated, Muon", MUON, "muon"),
    "muon-stream": Variant("stream, FP32, Muon", STREAM + MUON, "muon"),
    "muon-async1": Variant("async s=1, Muon", ASYNC + MUON, "muon"),
    "muon-async4": Variant("async s=4, Muon", (*ASYNC, *MUON, "pools.staleness=4"), "muon"),
}
COLOURS = ("#000000", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#f0a8a8", "#d55e00", "#7f7f7f", "#b0b0b0",
           "#8c564b", "#5e3c99")


def run(name: str, folder: Path, steps: int, seed: int) -> float:
    """Run a variant in `folder`; seconds. Nothing is left behind when this process is told to end."""
    settings = [*MODEL, f"train.steps={steps}", f"train.seed={seed}", *VARIANTS[name].settings]
    ranks = "2" if "pools.update_ranks=1" in settings else "1"
    command = [sys.executable, "-m", "pdtrain", "train", "--preset", "tiny", "--run-dir", str(folder), "--nproc", ranks]
    command += [part for setting in settings for part in ("--set", setting)]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        try:
            _, said = job.communicate(timeout=1200)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
                try:
                    job.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
    if job.returncode:
        sys.exit(f"{name} failed:\n{said[-2000:]}")
    return time.perf_counter() - began


def curve(folder: Path, steps: int) -> tuple[list[float], float] | None:
    """Losses by step, and the validation loss at the end; None where the run is not complete."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row and row["step"] > 0}
    ends = [row["val_loss"] for row in rows if "val_loss" in row and row["step"] == steps]
    return ([losses[step] for step in range(1, steps + 1)], ends[-1]) if len(losses) == steps and ends else None


def gradient_bytes(folder: Path) -> int:
    """Payload of the gradients of one step."""
    path = folder / "events" / "rank_0.jsonl"
    sent = [event["bytes_sent"] for event in map(json.loads, path.read_bytes().splitlines())
            if event["event"] == "pool_step"]
    return sent[len(sent) // 2] if sent else 0


def smooth(losses: list[float]) -> list[float]:
    """Means of POINT steps each."""
    return [sum(part) / len(part) for part in (losses[i : i + POINT] for i in range(0, len(losses), POINT))]


def figures(curves: dict[str, tuple[list[float], float]], out: Path) -> dict[str, dict[str, float]]:
    """Per variant: what the table shows."""
    found = {}
    for name, (losses, validation) in curves.items():
        row = {"last": sum(losses[-LAST:]) / len(losses[-LAST:]), "val_loss": validation,
               "gradient_bytes": gradient_bytes(out / name)}
        if VARIANTS[name].reference in curves:
            other, other_validation = curves[VARIANTS[name].reference]
            row["largest"] = max(abs(a - b) for a, b in zip(losses, other, strict=True))
            row["largest_mean"] = max(
                (abs(a - b) / b for a, b in zip(smooth(losses), smooth(other), strict=True)), default=0.0
            )
            row["val_difference"] = validation / other_validation - 1
        found[name] = row
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """The figures as Markdown."""
    lines = ["| variant | last 50 steps | validation | against reference | largest deviation, 10-step means "
             "(one step) | gradients per step |", "|---|---|---|---|---|---|"]
    for name, row in found.items():
        strays = f"{row['largest_mean']:.2%} ({row['largest']:.3f})" if row.get("largest") else "0, bit for bit"
        if VARIANTS[name].reference == name or "largest" not in row:
            strays = against = "–"
        else:
            against = f"{row['val_difference']:+.2%}"
        size = f"{row['gradient_bytes'] / 1e6:.2f} MB" if row["gradient_bytes"] else "–"
        lines.append(f"| {VARIANTS[name].title} | {row['last']:.4f} | {row['val_loss']:.4f} | {against} | {strays} "
                     f"| {size} |")
    return "\n".join(lines)


def svg(curves: dict[str, tuple[list[float], float]]) -> str:
    """Left: the losses. Right: each minus its reference."""
    width, height, left, top = 480, 330, 50, 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width + 20} {height + 130}" '
             'font-family="sans-serif" font-size="11">', f'<rect width="{2 * width + 20}" height="{height + 130}" '
             'fill="#ffffff"/>']
    panels = []
    for relative in (False, True):
        lines = {}
        for name, (losses, _) in curves.items():
            reference = VARIANTS[name].reference
            if not relative:
                lines[name] = smooth(losses)
            elif reference in curves and reference != name:
                other = smooth(curves[reference][0])
                lines[name] = [a - b for a, b in zip(smooth(losses), other, strict=True)]
        panels.append(lines)
    for number, lines in enumerate(panels):
        if not lines:
            continue
        x0, titles = left + number * (width + 10), ("loss, nat per byte", "difference from the reference")
        values = [value for line in lines.values() for value in line[(1 if number else 0):]]
        low, high = min(values), max(values)
        high += (high - low or 1) * 0.03
        low -= (high - low) * 0.03
        across, down = width - left - 20, height - top - 20

        def at(index: float, value: float, x0: int = x0, low: float = low, high: float = high, across: int = across,
               down: int = down, points: int = max(len(line) for line in lines.values())) -> tuple[float, float]:
            return x0 + across * index / max(1, points - 1), top + down * (high - value) / (high - low)

        parts.append(f'<text x="{x0}" y="{top - 12}">{titles[number]} (means of {POINT} steps)</text>')
        points = max(len(line) for line in lines.values())
        for tick in range(5):
            value = low + (high - low) * tick / 4
            _, y = at(0, value)
            parts.append(f'<line x1="{x0}" x2="{x0 + across}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>'
                         f'<text x="{x0 - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
            x, _ = at((points - 1) * tick / 4, low)
            parts.append(f'<text x="{x:.1f}" y="{top + down + 15}" text-anchor="middle">'
                         f"{round(points * POINT * tick / 4)}</text>")
        for name, line in lines.items():
            path = " ".join("{:.1f},{:.1f}".format(*at(i, min(max(v, low), high))) for i, v in enumerate(line))
            dash = ' stroke-dasharray="5 3"' if VARIANTS[name].reference == "muon" else ""
            parts.append(f'<polyline fill="none" stroke="{colour(name)}" stroke-width="1.4"{dash} points="{path}"/>')
    for number, name in enumerate(curves):
        x, y = left + (number % 3) * 310, height + 25 + (number // 3) * 20
        dash = ' stroke-dasharray="5 3"' if VARIANTS[name].reference == "muon" else ""
        parts.append(f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{colour(name)}" '
                     f'stroke-width="2"{dash}/><text x="{x + 32}" y="{y}">{VARIANTS[name].title}</text>')
    return "\n".join([*parts, "</svg>\n"])


def colour(name: str) -> str:
    return COLOURS[list(VARIANTS).index(name) % len(COLOURS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in VARIANTS]:
        parser.error(f"no variant {unknown[0]}; use {', '.join(VARIANTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    curves = {}
    for name in chosen:
        folder = args.out / name
        if curve(folder, args.steps) is None:
            if folder.exists():
                parser.error(f"{folder} holds a run that is not complete, or of other length: remove it")
            print(f"{name}: {run(name, folder, args.steps, args.seed):.0f} s", file=sys.stderr, flush=True)
        found = curve(folder, args.steps)
        if found is None:
            sys.exit(f"{name}: {folder / 'metrics.jsonl'} lacks steps")
        curves[name] = found
    rows = figures(curves, args.out)
    if args.svg:
        args.svg.write_text(svg(curves), encoding="utf-8")
    print(json.dumps({"steps": args.steps, "seed": args.seed, "variants": rows}) if args.json else table(rows))


if __name__ == "__main__":
    main()
