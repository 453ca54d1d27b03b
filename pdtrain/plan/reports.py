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
from pdtrain.config.schema import Model, Moe, Run
from pdtrain.plan.estimate import estimate
from pdtrain.plan.hardware import named
from pdtrain.plan.setup import Options, Setup


@dataclass(frozen=True, slots=True)
class Row:
    """One published result. Tokens per second and device, memory in GiB, where the source states them.

    blind_speed, blind_gib: what was predicted before anything was changed for the row, for rows that came after the
    constants.
    """

    name: str
    hardware: str
    source: str
    reported: float | None
    predicted: float
    reported_gib: float | None
    predicted_gib: float
    mfu: float
    blind_speed: float | None = None
    blind_gib: float | None = None

    @property
    def blind(self) -> bool:
        return self.blind_speed is not None or self.blind_gib is not None

    @property
    def error(self) -> float | None:
        """Predicted / reported speed - 1."""
        return None if self.reported is None else self.predicted / self.reported - 1

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
        row["name"], row["hardware"], row["source"], row.get("tokens_per_second"), speed, row.get("memory_gib"),
        found.worst.total / 2**30, found.mfu, row.get("blind_speed"), row.get("blind_gib"),
    )  # fmt: skip


def setup_of(row: dict[str, Any]) -> Setup:
    """The layout that a row describes."""
    base = load_run(preset=row["preset"]) if "preset" in row else Run()
    model = base.model
    if "model" in row:
        changed = row["model"] if "preset" in row else {"dense_layers": row["model"]["layers"]} | row["model"]
        model = msgspec.convert(msgspec.to_builtins(model) | changed, Model)
        if "moe" in changed:
            moe = msgspec.to_builtins(base.model.moe) | changed["moe"]
            model = msgspec.structs.replace(model, moe=msgspec.convert(moe, Moe))
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
        sharding=row.get("sharding"), states=row.get("states"), kernels=row.get("kernels"),
        drop=tuple(row.get("drop", ())), gradient_bytes=row.get("gradient_bytes"),
        moment_bytes=row.get("moment_bytes", 4), early_weights=row.get("early_weights", False),
        reduce_each=row.get("reduce_each", False), fp8_activations=row.get("fp8_activations", False),
    )  # fmt: skip
    return Setup(fill(run), options)


def median_error(found: list[Row]) -> float:
    """Median of the absolute error of the speed, of the rows that state one."""
    return statistics.median(abs(row.error) for row in found if row.error is not None)


def blind_table(found: list[Row]) -> Iterator[str]:
    """Markdown: the rows that came after the constants, with what was predicted before any change for them."""
    yield "| published result | device | what | reported | blind | error | now | error | source |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---|"
    errors: dict[str, list[tuple[float, float]]] = {"speed": [], "memory": []}
    for row in found:
        for what, reported, then, now in (
            ("speed", row.reported, row.blind_speed, row.predicted),
            ("memory", row.reported_gib, row.blind_gib, row.predicted_gib),
        ):
            if reported is None or then is None:
                continue
            unit, digits = ("tok/s", 0) if what == "speed" else ("GiB", 1)
            errors[what].append((abs(then / reported - 1), abs(now / reported - 1)))
            yield (
                f"| {row.name} | {row.hardware} | {unit} | {reported:,.{digits}f} | {then:,.{digits}f} | "
                f"{then / reported - 1:+.0%} | {now:,.{digits}f} | {now / reported - 1:+.0%} | {row.source} |"
            )
    yield ""
    parts = []
    for what, pairs in errors.items():
        then, now = (statistics.median(column) for column in zip(*pairs, strict=True))
        worst = max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
        parts.append(
            f"{what}: {then:.0%} blind (worst {worst[0]:.0%}), {now:.0%} after the changes (worst {worst[1]:.0%})"
        )
    yield f"Median absolute error of these, {'; '.join(parts)}."


def table(found: list[Row]) -> Iterator[str]:
    """Markdown: predicted against reported, every row that the constants were set on."""
    found = [row for row in found if not row.blind]
    yield "| published result | device | reported tok/s | predicted | error | reported GiB | predicted | source |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in found:
        memory = f"{row.reported_gib:g}" if row.reported_gib else "-"
        speed = f"{row.reported or 0:,.0f} | {row.predicted:,.0f} | {row.error or 0:+.0%}"
        yield (
            f"| {row.name} | {row.hardware} | {speed} | {memory} | {row.predicted_gib:.1f} | {row.source} |"
        )
    yield ""
    worst = max(abs(row.error or 0) for row in found)
    yield f"Median absolute error of the speed: {median_error(found):.1%}; worst {worst:.0%}."


if __name__ == "__main__":
    print("\n".join([*table(rows()), "", *blind_table(rows())]))
