"""A sweep's table: what was measured, best first, what was not and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from pdtrain.plan.memory import WATERMARK

SCHEMA = "pdtrain.sweep_measured/1"


def ranked(rows: list[dict[str, Any]], memory: float | None) -> list[dict[str, Any]]:
    """Trials by tokens per second; those beyond the watermark of `memory`, or with wrong losses, behind the others.

    Where all trials have the same batch this is the order of their step times.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    return sorted(measured, key=lambda row: (bool(why_not(row, memory)), -row["tokens_per_second"]))


def why_not(row: dict[str, Any], memory: float | None) -> str:
    """Why a measured trial cannot be the answer; empty: it can."""
    if row["loss"] != "ok":
        return f"loss: {row['loss']}"
    if memory is not None and row["peak_bytes"] > WATERMARK * memory:
        return f"above {WATERMARK:.0%} of --memory"
    return ""


def text(rows: list[dict[str, Any]], memory: float | None, convention: str) -> Iterator[str]:
    """For people."""
    found = ranked(rows, memory)
    others = [row for row in rows if row["status"] != "ok"]
    yield f"{len(rows)} trials: {len(found)} measured, {len(others)} not"
    if found:
        yield ""
        yield f"  {'step':>10} {'tokens/s':>9} {'MFU':>6} {'peak':>10} {'plan: step':>11}  trial"
    for row in found:
        no = why_not(row, memory)
        planned = row.get("predicted_step_seconds")
        yield (
            f"  {row['step_seconds']:>8.3f} s {row['tokens_per_second']:>9,.0f} {row['mfu']:>6.1%} "
            f"{row['peak_bytes'] / 1e6:>7,.1f} MB {f'{planned:.3f} s' if planned else '-':>11}  {row['label']}"
            f"{f'  [{no}]' if no else ''}"
        )
    yield from _memory(found)
    if others:
        yield ""
        yield "not measured:"
        for row in others:
            cause = f" [{row['cause']}]" if row.get("cause") else ""
            yield f"  {row['status']:<8} {row['label']}: {row['reason']}{cause}"
    yield ""
    yield "conventions:"
    yield "  - step: median of the steps after the warm-up, wall time, data included, checkpoints and validation not"
    yield f"  - MFU: {convention}"
    yield (
        "  - peak: tensors of the fullest rank at its fullest moment (MemTracker) on CPUs, allocated on GPUs; "
        "not the process"
    )
    yield "  - states: weights and moments that a rank keeps between steps; step counters of the optimizer included"
    yield "  - overload: tokens of the fullest expert rank / balanced, as routed in that step; see `plan --overload`"
    yield "  - plan: with the constants in force before this sweep; memory has none that is fitted"
    uneven = [row for row in found if row["step_seconds_most"] > 2 * row["step_seconds"]]
    if uneven:
        yield (f"  - {len(uneven)} of {len(found)} trials had a step of more than twice their median: something else "
               "used the machine, repeat before trusting small differences")  # fmt: skip


def _memory(found: list[dict[str, Any]]) -> Iterator[str]:
    """Predicted against measured, every trial whose tensors were counted."""
    rows = [row for row in found if row.get("states_bytes") and row.get("predicted_states_bytes")]
    if not rows:
        return
    yield ""
    yield (
        f"  {'peak':>10} {'plan':>10} {'error':>7} {'overload':>8} {'plan':>10} {'error':>7} {'states':>11} "
        f"{'plan':>11} {'error':>8}  trial"
    )
    errors: dict[str, list[float]] = {"peak": [], "peak at the overload": [], "states": []}
    for row in rows:
        balanced = row["predicted_peak_bytes"]
        predicted = balanced, row.get("predicted_peak_at_overload_bytes", balanced)
        peak, uneven = (size / row["peak_bytes"] - 1 for size in predicted)
        held = row["predicted_states_bytes"] / row["states_bytes"] - 1
        for name, error in zip(errors, (peak, uneven, held), strict=True):
            errors[name].append(abs(error))
        yield (
            f"  {row['peak_bytes'] / 1e6:>7,.1f} MB {predicted[0] / 1e6:>7,.1f} MB {peak:>+7.1%} "
            f"{row.get('overload', 1):>8.2f} {predicted[1] / 1e6:>7,.1f} MB {uneven:>+7.1%} "
            f"{row['states_bytes'] / 1e6:>8,.2f} MB {row['predicted_states_bytes'] / 1e6:>8,.2f} MB {held:>+8.3%}  "
            f"{row['label']}"
        )
    digits = {"states": 4}
    parts = (
        f"{name} {statistics.median(found):.{digits.get(name, 1)}%} (worst {max(found):.{digits.get(name, 1)}%})"
        for name, found in errors.items()
    )
    yield f"  median error: {', '.join(parts)}"
