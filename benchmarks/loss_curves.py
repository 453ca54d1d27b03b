"""Labelled synthetic loss curves: how many excursions `diag loss` finds, which kind it names, how often it is wrong.

    python benchmarks/loss_curves.py [--curves 400] [--seed 0] [--healthy-points 2000000] [--json]

Every curve is trend x noise x at most one fault. The parameters of the noise were fitted on public series (those of
`FITTED`: residuals of the log loss about a running median of 51 points): a Student t distribution, its scale relative
to the loss, and first-order correlation. Trends are power laws with warm-up and a cosine
or constant schedule, staircases of epochs, and fine-tunes. Some are logged sparsely, some are restarted from an earlier
step. A fault is counted as found when a finding's onset lies within ±2 logged points of the true one and it is at
warning or above; its kind must be the one that was planted. Everything found elsewhere is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import MetricTable
from diag.loss.findings import findings_of
from diag.series import Run, runs

#: name: (scale of the log residual, degrees of freedom, lag-1 correlation), fitted on public series as said above:
#: GPT-2 124M of llm.c (per step), a LLaMA fine-tune with tiny batches, a small model logged every 20 steps, a 350M run
#: that prints bfloat16, and the iteration lines of BLOOM 176B.
FITTED = {
    "llmc-124m": (0.0107, 4.5, 0.0),
    "finetune-small-batch": (0.149, 5.0, 0.02),
    "slm-every-20": (0.035, 30.0, 0.0),
    "spam-350m": (0.016, 8.0, 0.26),
    "bloom-176b": (0.003, 8.0, 0.1),
}
#: Faults and how often each is planted.
KINDS = ("transient", "slow", "divergence", "resume_jump", "nan", "climb", "scale_collapse", "oscillation")
ONSET_POINTS = 2


@dataclass
class Curve:
    """One run: steps, columns, and the truth."""

    kind: str
    onset: int | None
    steps: np.ndarray
    columns: dict[str, np.ndarray]
    resumes: list[tuple[int, int]]
    noise: str


def noise(rng: np.random.Generator, n: int, name: str) -> np.ndarray:
    """Relative log noise [n] of one of the fitted kinds."""
    scale, freedom, rho = FITTED[name]
    x = rng.standard_t(freedom, n) * scale
    if rho:
        for i in range(1, n):
            x[i] += rho * x[i - 1]
    return x


def trend(rng: np.random.Generator, steps: np.ndarray, lr: np.ndarray, *, stairs: bool) -> np.ndarray:
    """Expected loss: a power law, a nearly flat fine-tune, or a staircase of epochs."""
    shape = rng.choice(["pretrain", "pretrain", "pretrain", "finetune", "epochs" if stairs else "finetune"])
    total = steps[-1] + 1
    if shape == "pretrain":
        floor, alpha = rng.uniform(1.7, 3.0), rng.uniform(0.25, 0.6)
        start = rng.uniform(9.5, 11.5)
        scale = rng.uniform(20, 200)
        y = floor + (start - floor) * (1 + steps / scale) ** -alpha
        return y - 0.08 * floor * (1 - lr / lr.max()) * (steps > 0.3 * total)
    y = rng.uniform(0.9, 2.2) * (1 - 0.3 * (1 - np.exp(-steps / (0.2 * total))))
    if shape == "epochs":
        y = y * 0.75 ** np.floor(steps / (total / rng.integers(2, 5)))
    return y


def curve(rng: np.random.Generator, kind: str) -> Curve:
    """A curve with a fault of `kind` ("healthy" for none)."""
    name = str(rng.choice(list(FITTED), p=[0.35, 0.1, 0.2, 0.2, 0.15]))
    n = int(rng.integers(600 if kind in ("slow", "oscillation") else 150, 3000))
    every = int(rng.choice([1, 1, 10, 20, 100]))
    first = 1 if rng.random() < 0.7 else int(rng.integers(1000, 50_000))
    steps = (np.arange(n) * every + first).astype(np.int64)
    age = steps - (0 if first == 1 else first // 2)
    warm = max(int(0.02 * age[-1]), 20)
    lr = 3e-4 * np.minimum(age / warm, 1.0)
    if rng.random() < 0.7:
        lr = lr * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.clip(age / age[-1], 0, 1))))
    expected = trend(rng, age.astype(float), lr, stairs=kind in ("healthy", "transient", "nan", "scale_collapse"))
    y = expected * np.exp(noise(rng, n, name))
    scale = FITTED[name][0]
    norm = rng.uniform(0.2, 2.0) * np.exp(rng.standard_t(6, n) * 0.12)
    onset: int | None = None
    resumes: list[tuple[int, int]] = []
    columns = {"loss": y, "lr": lr, "grad_norm": norm}
    at = int(rng.integers(max(60, n // 5), n - 50))
    height = max(rng.uniform(0.15, 1.2), 16 * scale)
    if kind in ("transient", "slow"):
        rise = int(rng.integers(1, 3))
        length = int(rng.integers(2, 12)) if kind == "transient" else int(rng.integers(45, 120))
        at = min(at, n - int(3.5 * length) - 20)
        k = np.arange(n - at)
        shape = np.minimum((k + 1) / rise, 1.0) * np.exp(-np.maximum(k - rise, 0) / (length / 2.2))
        y[at:] *= np.exp(height * shape)
        onset = at
        if rng.random() < 0.5:
            norm[at - 1 : at + rise] *= 8
    elif kind == "divergence":
        k = np.arange(n - at)
        y[at:] *= np.exp(height * np.minimum((k + 1) / rng.integers(1, 6), 1.0))
        norm[at - 1 :] *= 3
        onset = at
    elif kind == "climb":
        at = min(at, n - 60)
        k = np.arange(n - at) / (n - at)
        y[at:] *= np.exp(max(0.6, 16 * scale) * k)
        onset = at
    elif kind == "resume_jump":
        jump = max(rng.uniform(0.15, 0.6), 16 * scale)
        k = np.arange(n - at)
        y[at:] *= np.exp(jump * np.exp(-k / rng.uniform(30, 200)))
        resumes, onset = [(at + 1, int(steps[at - 1]))], at
    elif kind == "nan":
        y[at:] = np.nan
        onset = at
    elif kind == "scale_collapse":
        scales = np.full(n, 65536.0)
        scales[at:] = 65536.0 / 2.0 ** np.minimum(np.arange(1, n - at + 1), 16)
        columns["loss_scale"], onset = scales, at
    elif kind == "oscillation":
        period = rng.uniform(10, n / 16)
        columns["loss"] = y * np.exp(max(0.08, 2.5 * scale) * np.sin(2 * np.pi * np.arange(n) / period))
    if kind == "healthy" and rng.random() < 0.3:  # restarted from an earlier step, and the steps done again
        back = int(rng.integers(n // 2, n - 10))
        again = int(rng.integers(1, back // 3))
        resumes = []
        order = np.concatenate([np.arange(back), np.arange(back - again, n)])
        steps = steps[order]
        columns = {key: value[order] for key, value in columns.items()}
    if rng.random() < 0.3:
        columns["loss"] = np.round(columns["loss"], int(rng.integers(2, 4)))
    if rng.random() < 0.3:
        del columns["grad_norm"]
    return Curve(kind, onset, steps, columns, resumes, name)


def run_of(item: Curve) -> Run:
    """The curve as a reader would return it."""
    table = MetricTable(path="metrics.jsonl", format="metrics", resumes=item.resumes)
    lines = np.arange(1, len(item.steps) + 1)
    for key, values in item.columns.items():
        table.column(key).extend(item.steps, lines, values)
    return runs(Artefacts([table]))[0]


def kind_of(cause: str, numbers: dict[str, object]) -> str:
    """The planted kind that a finding names."""
    if cause == "loss_divergence":
        return "climb" if numbers.get("climbed") else "divergence"
    return {"loss_nan": "nan", "loss_resume_jump": "resume_jump", "fp16_loss_scale_collapse": "scale_collapse",
            "loss_oscillation": "oscillation"}.get(cause, str(numbers.get("kind")))


def same_kind(planted: str, named: str) -> bool:
    """A climb and a divergence are one kind: both stay up."""
    stay = {"climb", "divergence"}
    return planted == named or (planted in stay and named in stay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--healthy-points", type=int, default=2_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    rng = np.random.default_rng(args.seed)
    tally: dict[str, Counter[str]] = {}
    alarms = 0
    for i in range(args.curves):
        kind = KINDS[i % len(KINDS)]
        item = curve(rng, kind)
        found = [f for f in findings_of(run_of(item)) if f.severity != "info"]
        row = tally.setdefault(kind, Counter())
        row["curves"] += 1
        spots = [(int(np.searchsorted(item.steps, f.where.step or 0)), f) for f in found]
        lax = kind in ("climb", "oscillation")
        hit = [f for place, f in spots if item.onset is None or lax or abs(place - item.onset) <= ONSET_POINTS]
        near = [f for place, f in spots if item.onset is None or lax or abs(place - item.onset) <= 20]
        row["found"] += bool(near)
        row["onset"] += bool(hit)
        row["kind"] += any(same_kind(kind, kind_of(f.cause, f.numbers)) for f in near)
        stray = len(found) - len(near)
        row["stray"] += stray
        if args.verbose and (not hit or stray or not any(same_kind(kind, kind_of(f.cause, f.numbers)) for f in near)):
            print(i, kind, item.noise, len(item.steps), "onset", item.onset,
                  [(p, f.cause, f.numbers.get("kind"), f.summary[:90]) for p, f in spots])
    points = healthy = 0
    while points < args.healthy_points:
        item = curve(rng, "healthy")
        found = [f for f in findings_of(run_of(item)) if f.severity != "info"]
        points += len(item.steps)
        healthy += 1
        alarms += len(found)
        if args.verbose and found:
            print("healthy", item.noise, len(item.steps), [(f.cause, f.summary[:100]) for f in found])
    spikes = Counter()
    for kind in ("transient", "slow", "divergence"):
        spikes += tally[kind]
    total: Counter[str] = sum(tally.values(), Counter())
    result = {
        "curves": total["curves"], "spike_recall": spikes["found"] / spikes["curves"],
        "recall": total["found"] / total["curves"], "kind_right": total["kind"] / max(total["found"], 1),
        "onset_within_2": spikes["onset"] / max(spikes["found"], 1), "stray": total["stray"], "healthy_curves": healthy,
        "healthy_points": points, "false_alarms": alarms,
        "points_per_false_alarm": points / alarms if alarms else None, "seconds": time.perf_counter() - began,
        "by_kind": {kind: dict(row) for kind, row in tally.items()},
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'kind':16}{'curves':>8}{'found':>8}{'onset±2':>9}{'kind':>8}{'stray':>7}")
    for kind, row in tally.items():
        print(f"{kind:16}{row['curves']:8}{row['found']:8}{row['onset']:9}{row['kind']:8}{row['stray']:7}")
    print(f"spike recall {result['spike_recall']:.1%}, kind right {result['kind_right']:.1%}, onset within ±2 points "
          f"{result['onset_within_2']:.1%}")
    print(f"false alarms {alarms} in {points:,} healthy points of {healthy} curves, {total['stray']} beside a fault; "
          f"{result['seconds']:.1f} s")


if __name__ == "__main__":
    main()
