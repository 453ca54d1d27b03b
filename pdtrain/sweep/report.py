"""A sweep's table: what was measured, best first, what was not and why."""

from __future__ import annotations

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
        yield (
            f"  {'step':>10} {'tokens/s':>9} {'MFU':>6} {'peak':>10} {'plan: step':>11} {'peak':>10}  trial "
            "(peak: fullest rank)"
        )
    for row in found:
        no = why_not(row, memory)
        planned = row.get("predicted_step_seconds")
        peak = row.get("predicted_peak_bytes")
        yield (
            f"  {row['step_seconds']:>8.3f} s {row['tokens_per_second']:>9,.0f} {row['mfu']:>6.1%} "
            f"{row['peak_bytes'] / 1e6:>7,.1f} MB {f'{planned:.3f} s' if planned else '-':>11} "
            f"{f'{peak / 1e6:,.1f} MB' if peak else '-':>10}  {row['label']}{f'  [{no}]' if no else ''}"
        )
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
    yield "  - peak: tensors at the fullest moment of a step (MemTracker) on CPUs, allocated on a GPU; not the process"
    yield "  - plan: with the constants in force before this sweep"
    uneven = [row for row in found if row["step_seconds_most"] > 2 * row["step_seconds"]]
    if uneven:
        yield (f"  - {len(uneven)} of {len(found)} trials had a step of more than twice their median: something else "
               "used the machine, repeat before trusting small differences")  # fmt: skip
