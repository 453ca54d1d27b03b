"""`pdtrain sweep`: layouts and settings tried for real in short runs; the plan's constants fitted to them."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diag.errors import MissingExtra, UsageError
from pdtrain.commands.plan import finite

if TYPE_CHECKING:
    from pdtrain.plan.hardware import Hardware
    from pdtrain.sweep.calibrate import Calibration
    from pdtrain.sweep.run import Progress
    from pdtrain.sweep.trials import Trial

INTERRUPTED = 130


def _options(command: Callable[..., int]) -> click.Command:
    path = click.Path(path_type=Path)
    for decorate in reversed(
        (
            click.argument("config", required=False, type=path),
            click.option("--preset", metavar="NAME", help="A configuration that ships with pdtrain, by name."),
            click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key; may repeat."),
            click.option("--nproc", metavar="N", type=click.IntRange(min=1, max=64), required=True,
                         help="Processes of every trial, on this machine."),
            click.option("--grid", metavar="KEY=a,b,c", multiple=True,
                         help="Try these values, in every combination; may repeat. Default: the legal layouts."),
            click.option("--trials", metavar="N", type=click.IntRange(min=1, max=1000), default=12, show_default=True,
                         help="Without --grid: how many of the legal layouts."),
            click.option("--steps", metavar="N", type=click.IntRange(min=5), default=12, show_default=True,
                         help="Optimizer steps of a trial; the first three are not measured."),
            click.option("--timeout", metavar="SECONDS", type=click.FloatRange(min=5, max=86_400),
                         default=300.0, callback=finite, show_default=True, help="Longest time of one trial."),
            click.option("--memory", metavar="SIZE", help="Memory of one rank (2GB): what needs more ranks last."),
            click.option("--hardware", metavar="NAME|FILE", help="Device of the plan, and the peak of the MFU."),
            click.option("--probe", metavar="FILE", type=path, help="Measured links (diag comm), for the plan."),
            click.option("--out", metavar="DIR", type=path, help="Where results are kept; default: sweeps/NAME."),
            click.option("--calibrate", metavar="FILE", type=path,
                         help="Fit the plan's constants to the trials and write them for `pdtrain plan --hardware`."),
            click.option("--retry-failed", is_flag=True, help="Try once more what failed or hung before."),
            click.option("--keep", is_flag=True, help="Keep the run directories of trials that went well."),
            click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
        )
    ):  # fmt: skip
        command = decorate(command)
    return click.command()(command)


@_options
def sweep(
    config: Path | None, preset: str | None, overrides: tuple[str, ...], nproc: int, grid: tuple[str, ...],
    trials: int, steps: int, timeout: float, memory: str | None, hardware: str | None, probe: Path | None,
    out: Path | None, calibrate: Path | None, retry_failed: bool, keep: bool, as_json: bool,
) -> int:  # fmt: skip
    """Try layouts or settings for real: short runs, step time, MFU and memory of each, the best first.

    What was measured is kept in --out: the same command continues after an interruption and measures nothing twice.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("pdtrain sweep", "train", "torch")
    from pdtrain.config import read_run
    from pdtrain.plan.hardware import parse_bytes, with_probe
    from pdtrain.plan.sources import read_source
    from pdtrain.sweep import outcome, report, run
    from pdtrain.sweep import trials as trying
    from pdtrain.sweep.book import Book
    from pdtrain.sweep.machine import hardware_of, hardware_row

    if config is None and preset is None:
        raise UsageError("give a CONFIG file or --preset NAME")
    limit = parse_bytes(memory) if memory else None
    values = trying.parse_grid(grid)
    loaded = read_source(config, preset=preset, overrides=overrides, gpus=nproc, free=True)
    if not values:
        read_run(config, preset=preset, overrides=overrides)  # mistakes of the file itself, before anything starts
        if loaded.run.pools.update_ranks:
            raise UsageError("layouts are planned without an update pool; with [pools] give --grid")
    for warning in loaded.warnings:
        print(f"pdtrain: warning: {warning}", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    folder = out or Path("sweeps") / f"{loaded.name}-{nproc}"
    book = Book(folder)
    tried: list[Trial] = []
    try:
        row = run.machine_row(book, nproc, loaded.run.train.threads)
        device = hardware_of(row, hardware)
        if probe is not None:
            device = with_probe(device, probe)
        cpu = row["device"] == "cpu"
        legal = None
        if values:
            tried = trying.from_grid(config, preset, overrides, values, ranks=nproc, steps=steps, timeout=timeout,
                                     cpu=cpu)  # fmt: skip
        else:
            tried, legal = trying.from_layouts(loaded, device, memory=limit, most=trials, steps=steps,
                                               timeout=timeout, cpu=cpu)  # fmt: skip
        rows = run.measure(book, tried, device, timeout=timeout, again=retry_failed, keep=keep, progress=_progress())
    except KeyboardInterrupt:
        _clear()
        done = sum(trial.key in book.rows for trial in tried)
        print(f"pdtrain: interrupted after {done} of {len(tried)} trials; the same command continues", file=sys.stderr)
        return INTERRUPTED
    finally:
        book.close()
    _clear()
    fitted = _fit(tried, rows, device, calibrate)
    convention = outcome.mfu_convention(loaded.run.precision.all, device)
    if as_json:
        answer: dict[str, Any] = {
            "schema": report.SCHEMA, "ranks": nproc, "mfu_convention": convention, "hardware": hardware_row(device),
            "legal_layouts": legal, "trials": report.ranked(rows, limit),
            "not_measured": [row for row in rows if row["status"] != "ok"], "results": str(folder / "trials.jsonl"),
        }  # fmt: skip
        if fitted is not None:
            from pdtrain.sweep.calibrate import as_json as fit_json

            answer["calibration"] = fit_json(fitted)
        click.echo(json.dumps(answer))
    else:
        lines = list(report.text(rows, limit, convention))
        if legal is not None and legal > len(rows):
            lines[0] += f"; of {legal} legal layouts (--trials)"
        if fitted is not None:
            from pdtrain.sweep.calibrate import text as fit_text

            lines += ["", *fit_text(fitted)]
        click.echo("\n".join(lines))
    return 0 if any(row["status"] == "ok" for row in rows) else 1


def _fit(
    tried: list[Trial], rows: list[dict[str, Any]], device: Hardware, path: Path | None
) -> Calibration | None:  # fmt: skip
    """The calibration, written to `path`; None where nobody asked."""
    if path is None:
        return None
    from dataclasses import replace

    from pdtrain.plan.hardware import write_hardware
    from pdtrain.sweep import calibrate as fitting
    from pdtrain.sweep.trials import setup_of

    measured = []
    for trial, row in zip(tried, rows, strict=True):
        setup = setup_of(trial)
        if row["status"] == "ok" and setup is not None:
            measured.append((trial.key, trial.label, setup, row["step_seconds"]))
    if len(measured) < fitting.FEWEST:
        raise UsageError(f"--calibrate needs {fitting.FEWEST} measured trials, there are {len(measured)}")
    found = fitting.calibrate(device, fitting.split(measured))
    write_hardware(replace(found.hardware, key="here"), path)
    print(f"pdtrain: wrote {path}; use it with: pdtrain plan ... --hardware {path}", file=sys.stderr)
    return found


def _progress() -> Progress | None:
    """One line on stderr that is written over, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int, label: str, seconds: float) -> None:
        print(
            f"\r\033[Ktrial {done + 1} of {total}, {seconds:.0f} s: {label}"[:160], end="", file=sys.stderr, flush=True
        )

    return show


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
