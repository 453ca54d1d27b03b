"""`pdtrain plan`: memory, FLOP, communication and time of a layout before any device is rented. Imports no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diag.errors import UsageError
from diag.lazy import LazyGroup

if TYPE_CHECKING:
    from pdtrain.plan.hardware import Hardware
    from pdtrain.plan.setup import Options, Setup

TABLE = {
    "sweep": ("pdtrain.commands.plan:sweep", "Every legal layout for N devices, ranked; why the others are not."),
    "advise": ("pdtrain.commands.plan:advise", "What to change first, and what it buys."),
    "shrink": ("pdtrain.commands.plan:shrink", "The small model of the same skeleton, as a one-node configuration."),
    "exact": ("pdtrain.commands.plan:exact", "Build the real model on the meta device and count, rank by rank."),
    "budget": ("pdtrain.commands.plan:budget", "Days for a token budget on a cluster of given peak and MFU."),
}
#: What `pdtrain plan CONFIG` without a subcommand runs.
PLAIN = "layout"


class PlanGroup(LazyGroup):
    """`pdtrain plan run.toml` plans a layout; `pdtrain plan sweep ...` is a subcommand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.table and args[0] not in ctx.help_option_names:
            args = [PLAIN, *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return layout if cmd_name == PLAIN else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return (PLAIN, layout, args[1:]) if args and args[0] == PLAIN else super().resolve_command(ctx, args)


def finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Callback of a float option: `nan` and `inf` pass click's ranges."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number to reckon with.", context, option)
    return value


_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.argument("config", required=False, type=click.Path(path_type=Path)),
    click.option("--preset", metavar="NAME", help="A configuration that ships with pdtrain."),
    click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key; may repeat."),
    click.option("--gpus", metavar="N", type=click.IntRange(min=1), help="Devices; default: the configuration's."),
    click.option("--memory", metavar="SIZE", help="Memory of one device (80GB); default: the hardware's."),
    click.option("--hardware", metavar="NAME|FILE",
                 help="Device of the catalogue, or a file of pdtrain sweep --calibrate; default: h100-sxm."),
    click.option("--probe", metavar="FILE", type=click.Path(path_type=Path), help="Measured links (diag comm --save)."),
    click.option("--optimizer-sharding", "sharding", type=click.Choice(["none", "zero1", "zero2", "zero3"]),
                 help="Default: zero3 as pdtrain trains (parallel.fsdp), zero1 with pipeline stages."),
    click.option("--states", type=click.Choice(["fsdp", "megatron"]), help="How weights and master copy are kept."),
    click.option("--recompute", type=click.Choice(["none", "selective", "op", "alternate", "full"]),
                 help="Instead of the rows' own policy; op: every second product; alternate, full: whole blocks."),
    click.option("--recompute-modules", "drop", metavar="A,B",
                 help="Parts computed again one by one: norm, mla-up, moe-act, moe."),
    click.option("--kernels", type=click.Choice(["eager", "fused"]),
                 help="What modules keep and move: as pdtrain's, or as Megatron-LM's and Transformer Engine's."),
    click.option("--schedule", type=click.Choice(["1f1b", "interleaved", "zero-bubble", "dualpipe"]), default="1f1b",
                 show_default=True),
    click.option("--virtual", metavar="N", type=click.IntRange(min=1), default=1, help="Chunks per stage."),
    click.option("--context", metavar="N", type=click.IntRange(min=1), default=1, help="Context-parallel degree."),
    click.option("--overload", metavar="F", type=click.FloatRange(min=1), default=1.0, callback=finite,
                 help="Tokens of the fullest expert rank / balanced."),
    click.option("--gradient-dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True),
    click.option("--moment-dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True),
    click.option("--early-weights", is_flag=True,
                 help="Routed rows are weighted before an expert's last product (Megatron-LM): less is kept."),
    click.option("--fp8-activations", is_flag=True, help="Inputs of matrix products are kept in FP8 (DeepSeek-V3)."),
    click.option("--reduce-each", is_flag=True, help="Gradients are reduced after every micro-batch (FSDP's default)."),
    click.option("--fp8-dispatch", is_flag=True, help="Dispatch to the experts in FP8."),
    click.option("--node-limited", is_flag=True, help="Rows for one node cross the network once (DeepEP)."),
    click.option("--tokens", metavar="T", help="Token budget (14.8T); default: train.steps."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
)  # fmt: skip


def _shared(command: Callable[..., int]) -> Callable[..., int]:
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


def _drops(text: str | None) -> tuple[Any, ...]:
    """`norm,moe-act` as parts that are computed again."""
    from pdtrain.plan.setup import DROPS

    found = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    if unknown := [part for part in found if part not in DROPS]:
        raise UsageError(f"--recompute-modules {unknown[0]!r} is none of {', '.join(DROPS)}")
    return found


class _Request:
    """What the shared options ask for, read once: run, warnings, hardware, options of the plan."""

    def __init__(self, given: dict[str, Any], *, free: bool = False) -> None:
        """`free`: the degrees are to be found, so that the configuration's own need not fit --gpus."""
        from pdtrain.plan.hardware import named, parse_bytes, parse_count, with_probe
        from pdtrain.plan.setup import Options
        from pdtrain.plan.sources import read_source

        if free and given["gpus"] is None:
            raise UsageError("give --gpus N: how many devices")
        self.hardware: Hardware = named(given["hardware"])
        if given["probe"] is not None:
            self.hardware = with_probe(self.hardware, given["probe"])
        self.memory = parse_bytes(given["memory"]) if given["memory"] else self.hardware.memory_bytes
        self.tokens = parse_count(given["tokens"], "--tokens") if given["tokens"] else None
        self.options: Options = Options(
            sharding=given["sharding"], states=given["states"], recompute=given["recompute"],
            schedule="interleaved" if given["virtual"] > 1 and given["schedule"] == "1f1b" else given["schedule"],
            virtual=given["virtual"], context=given["context"], overload=given["overload"],
            gradient_bytes=2 if given["gradient_dtype"] == "bf16" else None,
            moment_bytes=2 if given["moment_dtype"] == "bf16" else 4,
            kernels=given["kernels"], drop=_drops(given["drop"]),
            early_weights=given["early_weights"], reduce_each=given["reduce_each"],
            fp8_activations=given["fp8_activations"],
            dispatch_bytes=1.03125 if given["fp8_dispatch"] else None, node_limited=given["node_limited"],
        )  # fmt: skip
        loaded = read_source(
            given["config"], preset=given["preset"], overrides=given["overrides"], gpus=given["gpus"], free=free
        )
        self.run, self.name = loaded.run, loaded.name
        self.as_json: bool = given["as_json"]
        for warning in loaded.warnings:
            print(f"pdtrain: warning: {warning}", file=sys.stderr)

    def setup(self) -> Setup:
        from pdtrain.plan.setup import Setup

        return Setup(self.run, self.options)


@click.command()
@_shared
def layout(**given: Any) -> int:
    """Memory, FLOP, communication and time of one layout.

    CONFIG is a run's TOML file, a Hugging Face config.json, or a file of Megatron-LM arguments.
    """
    from pdtrain.plan.estimate import as_json, estimate
    from pdtrain.plan.text import text

    asked = _Request(given)
    found = estimate(asked.setup(), asked.hardware, asked.memory, asked.tokens)
    click.echo(json.dumps(as_json(found)) if asked.as_json else text(found))
    return 0


@click.command()
@_shared
@click.option("--trainable", is_flag=True, help="Only layouts that pdtrain trains today.")
@click.option("--rows", metavar="N", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path), help="Step time against memory, as PNG.")
def sweep(trainable: bool, rows: int, plot: Path | None, **given: Any) -> int:
    """Every legal layout for --gpus devices, by predicted step time within memory; why the others are out."""
    from pdtrain.plan import sweep as sweeps

    asked = _Request(given, free=True)
    found = sweeps.sweep(
        asked.run, asked.options, asked.hardware, asked.memory, trainable=trainable, progress=_progress("layouts")
    )
    if plot is not None:
        from pdtrain.plan.plot import pareto

        pareto(found, plot)
    click.echo(json.dumps(sweeps.as_json(found)) if asked.as_json else "\n".join(sweeps.text(found, rows)))
    return 0


@click.command()
@_shared
@click.option("--measured", "runs", metavar="RUN", multiple=True, type=click.Path(path_type=Path),
              help="A run with pools, and runs of the same without: their seconds decide on phase separation.")
def advise(runs: tuple[Path, ...], **given: Any) -> int:
    """What to change first in a layout and what it buys, one change at a time; and when not to separate."""
    from pdtrain.plan import advise as advisor
    from pdtrain.plan.estimate import estimate
    from pdtrain.plan.pools import measured_pools

    asked = _Request(given)
    measured = measured_pools(runs) if runs else []
    found = advisor.advise(estimate(asked.setup(), asked.hardware, asked.memory, asked.tokens), measured)
    click.echo(json.dumps(advisor.as_json(found)) if asked.as_json else "\n".join(advisor.text(found)))
    return 0


@click.command()
@_shared
@click.option("--nproc", metavar="N", type=click.IntRange(min=1, max=128), default=8, show_default=True,
              help="Devices.")  # fmt: skip
def shrink(nproc: int, **given: Any) -> int:
    """Print the configuration of the small model with the same skeleton on one node, ready for `pdtrain train`."""
    import msgspec

    from pdtrain.config import to_toml
    from pdtrain.plan.shrink import comment
    from pdtrain.plan.shrink import shrink as smaller

    asked = _Request(given)
    small = smaller(asked.run, nproc)
    if asked.as_json:
        click.echo(json.dumps({"schema": "pdtrain.shrink/1", "run": msgspec.to_builtins(small)}))
    else:
        click.echo("\n".join([*comment(asked.run, small, asked.name), to_toml(small)]), nl=False)
    return 0


@click.command()
@_shared
def exact(**given: Any) -> int:
    """Build the real model on the meta device for the full world and count parameter bytes, rank by rank.

    Exit status 1 when the estimate differs from the model on any rank.
    """
    import importlib.util
    from dataclasses import asdict

    from diag.errors import MissingExtra

    asked = _Request(given)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("pdtrain plan exact", "train", "torch")
    from pdtrain.plan import exact as counting
    from pdtrain.plan.extras import extras_of, plain
    from pdtrain.plan.setup import Setup

    if left := extras_of(asked.run.model).named():
        print(f"pdtrain: warning: built without what pdtrain's model has not: {', '.join(left)}", file=sys.stderr)
    found = counting.exact(Setup(plain(asked.run), asked.options))
    if asked.as_json:
        click.echo(json.dumps({"schema": "pdtrain.exact/1", "agrees": found.agrees} | asdict(found)))
    else:
        click.echo("\n".join(counting.text(found)))
    return 0 if found.agrees else 1


def _progress(noun: str) -> Callable[[int, int], None] | None:
    """A counter on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        print(f"\r{done + 1:,} of {total:,} {noun}", end="\r" if done + 1 < total else "\r\033[K", file=sys.stderr)

    return show


@click.command()
@click.option("--active", metavar="N", required=True, help="Parameters activated per token (37B).")
@click.option("--tokens", metavar="T", required=True, help="Token budget (5T).")
@click.option("--gpus", metavar="N", type=click.IntRange(min=1), required=True, help="Devices.")
@click.option("--peak", metavar="FLOPS", required=True, help="Peak FLOP/s of one device (500T).")
@click.option("--mfu", type=click.FloatRange(min=0, max=1, min_open=True), required=True, callback=finite,
              help="Utilisation (0.4).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def budget(active: str, tokens: str, gpus: int, peak: str, mfu: float, as_json: bool) -> int:
    """Days for a token budget: 6 x activated x tokens / (devices x peak x MFU)."""
    from pdtrain.plan.hardware import parse_count
    from pdtrain.plan.reliability import days, training_flop

    flop = training_flop(parse_count(active, "--active"), parse_count(tokens, "--tokens"))
    found = days(flop, gpus, parse_count(peak, "--peak"), mfu)
    if as_json:
        click.echo(json.dumps({"schema": "pdtrain.budget/1", "training_flops": flop, "days": found}))
    else:
        click.echo(f"{flop:.3g} FLOP (6 N T, attention scores not counted): {found:,.1f} days")
    return 0


@click.group(cls=PlanGroup, table=TABLE, options_metavar="[CONFIG | --preset NAME] --gpus N --memory 80GB [OPTIONS]")
def plan() -> None:
    """What a run needs and how fast it can be, before a device is rented.

    `pdtrain plan [CONFIG | --preset NAME] --gpus N --memory 80GB [--probe FILE] [--hardware NAME]
    [--optimizer-sharding zero1] [--recompute full] [--json] ...` plans one layout; `pdtrain plan layout --help` lists
    every option.
    """
