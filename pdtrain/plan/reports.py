"""Published training results against the plan: every row of reports.toml, predicted and reported."""

from __future__ import annotations

import importlib.resources
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from pdtrain.config.load import load_run
from pdtrain.config.resolved import fill
from pdtrain.config.schema import Model, Run
from pdtrain.plan.estimate import estimate
from pdtrain.plan.hardware import named
from pdtrain.plan.setup import Options, Setup


@dataclass(frozen=True, slots=True)
class Row:
    """One published result. Tokens per second and device; memory in GiB where the source states it."""

    name: str
    hardware: str
    source: str
    reported: float
    predicted: float
    reported_gib: float | None
    predicted_gib: float
    mfu: float

    @property
    def error(self) -> float:
        """Predicted / reported speed - 1."""
        return self.predicted / self.reported - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.reported_gib is None else self.predicted_gib / self.reported_gib - 1


def rows() -> list[Row]:
    """Every published row, predicted now."""
    text = (importlib.resources.files("pdtrain.plan") / "reports.toml").read_text(encoding="utf-8")
    return [_predict(row) for row in tomllib.loads(text)["row"]]


def _predict(row: dict[str, Any]) -> Row:
    hardware = named(row["hardware"])
    found = estimate(setup_of(row), hardware)
    speed = found.setup.tokens_per_step / found.times.step / found.setup.ranks
    return Row(
        row["name"], row["hardware"], row["source"], row["tokens_per_second"], speed, row.get("memory_gib"),
        found.worst.total / 2**30, found.mfu,
    )  # fmt: skip


def setup_of(row: dict[str, Any]) -> Setup:
    """The layout that a row describes."""
    base = load_run(preset=row["preset"]) if "preset" in row else Run()
    model = base.model
    if "model" in row:
        model = msgspec.convert(row["model"] | {"dense_layers": row["model"]["layers"]}, Model)
    replace = msgspec.structs.replace
    run = replace(
        base,
        model=model,
        parallel=replace(base.parallel, ranks=row["ranks"], pipeline=row.get("pipeline", 1)),
        modules=replace(
            base.modules,
            attention=replace(base.modules.attention, tensor=row.get("tensor", 1)),
            experts=replace(base.modules.experts, expert=row.get("expert", 1)),
        ),
        train=replace(
            base.train, sequence_length=row["sequence_length"], micro_batch=row["micro_batch"],
            train_batch=row["train_batch"], accumulation=None,
        ),
        precision=replace(base.precision, all="bf16"),
    )  # fmt: skip
    options = Options(
        recompute=row["recompute"], schedule=row.get("schedule", "1f1b"), node_limited=row.get("node_limited", False),
        dispatch_bytes=1.03125 if row.get("fp8_dispatch") else None, virtual=row.get("virtual", 1),
    )  # fmt: skip
    return Setup(fill(run), options)


def median_error(found: list[Row]) -> float:
    """Median of the absolute error of the speed."""
    return statistics.median(abs(row.error) for row in found)


def table(found: list[Row]) -> Iterator[str]:
    """Markdown: predicted against reported, every row."""
    yield "| published result | device | reported tok/s | predicted | error | reported GiB | predicted | source |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in found:
        memory = f"{row.reported_gib:g}" if row.reported_gib else "-"
        yield (
            f"| {row.name} | {row.hardware} | {row.reported:,.0f} | {row.predicted:,.0f} | {row.error:+.0%} | {memory} "
            f"| {row.predicted_gib:.1f} | {row.source} |"
        )
    yield ""
    worst = max(abs(row.error) for row in found)
    yield f"Median absolute error of the speed: {median_error(found):.1%}; worst {worst:.0%}."


if __name__ == "__main__":
    print("\n".join(table(rows())))
