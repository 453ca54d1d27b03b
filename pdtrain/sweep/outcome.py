"""What a trial has shown: numbers from its run directory, or the reason why there are none."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from diag.errors import PdtrainError
from pdtrain.plan import memory
from pdtrain.plan.estimate import MFU_CONVENTION
from pdtrain.plan.flops import per_token
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.setup import Setup
from pdtrain.plan.timing import times
from pdtrain.sweep.execute import Ended
from pdtrain.sweep.trials import WARM_UP, WATCHED_STEP, Trial, setup_of

#: Causes that a post-mortem names when memory ran out.
OUT_OF_MEMORY = ("cuda_oom", "cuda_oom_fragmentation", "cuda_oom_optimizer", "cuda_oom_shared_gpu", "host_oom")
#: How far the first loss of a layout may lie from that of the others. Layouts sum in another order, no more.
LOSS_TOLERANCE = 0.02
#: Largest metrics.jsonl of a trial that is read.
LIMIT_BYTES = 64 << 20


def outcome(trial: Trial, ended: Ended, run_dir: Path, hardware: Hardware) -> dict[str, Any]:
    """The row of a trial that ran, without schema and time."""
    assert trial.run is not None
    row: dict[str, Any] = {"status": "ok", "seconds": round(ended.seconds, 2)}
    steps = _steps(run_dir / "metrics.jsonl")
    if ended.status == 0 and len(steps) <= WARM_UP:
        return row | {"status": "failed", "reason": f"ended after {len(steps)} steps: too few to measure"}
    if ended.status != 0:
        return row | _failure(ended, run_dir, len(steps))
    measured = [step["step_seconds"] for step in steps[WARM_UP:]]
    seconds = statistics.median(measured)
    setup = setup_of(trial)
    length, ranks = trial.run.train.sequence_length, trial.run.parallel.ranks
    tokens = (trial.run.train.train_batch or 0) * length
    flop = per_token(trial.run.model, length) * tokens
    watched = _watched(run_dir / "dumps")
    peaks, held = [peak for peak, _ in watched], [states for _, states in watched]
    resident = max((step.get("memory_bytes", 0) for step in steps), default=0)
    row |= {
        "steps": len(measured),
        "step_seconds": seconds,
        "step_seconds_least": min(measured),
        "step_seconds_most": max(measured),
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / seconds,
        "model_flops_per_second_per_rank": flop / seconds / ranks,
        "mfu": flop / (seconds * ranks * hardware.peak(trial.run.precision.all)),
        "peak_bytes": max(peaks) if peaks else resident,
        "peak_bytes_per_rank": peaks,
        "states_bytes": max(held, default=None),
        "resident_bytes": resident,
        "loss_first": steps[0].get("loss"),
        "loss_last": steps[-1].get("loss"),
        "loss": _sane(steps),
    }
    if setup is not None:
        planned, _ = times(setup, hardware)
        _, worst = memory.peak(setup, device="cpu" if peaks else "gpu")
        row |= {"predicted_step_seconds": planned.step, "predicted_peak_bytes": worst.total,
                "predicted_states_bytes": worst.parameters + worst.optimizer}  # fmt: skip
        if peaks and (overload := _overload(steps, setup)):
            uneven = replace(setup, options=replace(setup.options, overload=overload))
            _, worst = memory.peak(uneven, device="cpu")
            row |= {"overload": overload, "predicted_peak_at_overload_bytes": worst.total}
    return row


def mfu_convention(dtype: str, hardware: Hardware) -> str:
    """What the MFU of a sweep means."""
    return f"{MFU_CONVENTION.format(dtype=dtype)}; peak of {hardware.name}: {hardware.peak(dtype) / 1e12:,.3g} TFLOP/s"


def _steps(path: Path) -> list[dict[str, Any]]:
    """The lines of steps, in order; of a cut last line nothing."""
    try:
        if path.stat().st_size > LIMIT_BYTES:
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("step", 0) > 0 and isinstance(row.get("step_seconds"), float):
            found.append(row)
    return found


def _watched(dumps: Path) -> list[tuple[int, int]]:
    """(bytes of tensors at the fullest moment of the watched step, of weights and moments), by rank; empty on a GPU.

    The root module's parameters are this rank's shards; what is gathered at the peak does not count among them.
    """
    found: dict[int, tuple[int, int]] = {}
    for path in dumps.glob("memory_rank*_step*.json"):
        try:
            data = json.loads(path.read_bytes())
            root = next(module for module in data["modules"] if "." not in module["module"])
            states = int(root["parameter_bytes"]) + int(data["by_kind"].get("Optstate", 0))
            found[int(data["rank"])] = int(data["peak_bytes"]), states
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
            continue
    return [found[rank] for rank in sorted(found)]


def _overload(steps: list[dict[str, Any]], setup: Setup) -> float:
    """Tokens of the fullest expert rank / balanced in the watched step, mean over layers: what its memory grows by.

    0 where it is not known, or where every rank holds all experts.
    """
    watched = next((step for step in steps if step.get("step") == WATCHED_STEP), {})
    layers = [counts for key, counts in watched.items() if key.startswith("router/") and key.endswith("/counts")]
    experts = setup.run.model.moe.experts
    if setup.ep == 1 or not layers or any(len(counts) != experts or not sum(counts) for counts in layers):
        return 0.0
    each = experts // setup.ep
    return max(
        statistics.mean(sum(counts[rank * each : (rank + 1) * each]) * setup.ep / sum(counts) for counts in layers)
        for rank in range(setup.ep)
    )


def _sane(steps: list[dict[str, Any]]) -> str:
    """ "ok", or what is wrong with the losses of one trial alone."""
    losses = [step.get("loss") for step in steps]
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        return "not finite"
    return "an update was skipped" if any(step.get("skipped") for step in steps) else "ok"


def compare_losses(rows: list[dict[str, Any]], group: dict[str, str]) -> None:
    """Marks trials whose first loss is not that of the others: same model, weights and batch, another layout.

    `group`: trial -> what must be equal for losses to be comparable.
    """
    first: dict[str, list[float]] = {}
    for row in rows:
        if row["status"] == "ok" and row["loss"] == "ok":
            first.setdefault(group[row["trial"]], []).append(row["loss_first"])
    for row in rows:
        peers = first.get(group[row["trial"]], [])
        if row["status"] == "ok" and row["loss"] == "ok" and len(peers) >= 3:
            usual = statistics.median(peers)
            if abs(row["loss_first"] - usual) > LOSS_TOLERANCE * abs(usual):
                row["loss"] = f"starts at {row['loss_first']:.4f}, the others at {usual:.4f}"


def _failure(ended: Ended, run_dir: Path, steps: int) -> dict[str, Any]:
    cause, summary = _verdict(run_dir)
    if ended.status is None:
        status, reason = "timeout", f"not done after {ended.seconds:.0f} s, at step {steps}"
    else:
        status, reason = "failed", ended.said or f"exit status {ended.status}"
    if cause in OUT_OF_MEMORY or "can't allocate memory" in reason or "out of memory" in reason.lower():
        status = "oom"
    row: dict[str, Any] = {"status": status, "reason": reason, "exit_status": ended.status}
    return row | ({"cause": cause, "verdict": summary} if cause else {})


def _verdict(run_dir: Path) -> tuple[str, str]:
    """(cause, summary) of the post-mortem's root; empty where it has none or cannot be made."""
    from diag.diagnose import diagnose

    try:
        report = diagnose([run_dir])
    except (PdtrainError, OSError):
        return "", ""
    for finding in report.findings:
        if finding.role == "root" and finding.severity in ("fatal", "error"):
            return finding.cause, finding.summary
    return "", ""
