"""`pdtrain train`: check everything, then become a rank (under torchrun) or start the ranks on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diag.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from pdtrain.config import Loaded, Run

#: `--resume` without PATH. A directory of that name is `./latest`.
LATEST = "latest"
#: A job of more ranks is not started on one machine unless --nproc says so.
MOST_LOCAL_RANKS = 64


def _options(command: Callable[..., int]) -> click.Command:
    """Every argument of the command, in the order of its help."""
    path, ranks = click.Path(path_type=Path), click.IntRange(min=1)
    for decorate in reversed(
        (
            click.argument("config", required=False, type=path),
            click.option("--preset", metavar="NAME", help="A configuration that ships with pdtrain, by name."),
            click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override a key; may repeat."),
            click.option("--nproc", metavar="N", type=ranks, help="Processes here; parallel.ranks follows."),
            click.option("--run-dir", metavar="DIR", type=path, help="Default: runs/NAME-TIME."),
            click.option(
                "--resume", metavar="[PATH]", is_flag=False, flag_value=LATEST,
                help="Continue from a checkpoint; without PATH, from the newest of --run-dir.",
            ),
            click.option("--print-config", is_flag=True, help="Print the resolved configuration, explained; stop."),
            click.option("--dry-run", is_flag=True, help="Print groups with rank lists and parameter counts; stop."),
            click.option("--world", metavar="N", type=ranks, help="With --dry-run: ranks of the job."),
            click.option("--json", "as_json", is_flag=True, help="With --dry-run: one JSON object."),
        )
    ):  # fmt: skip
        command = decorate(command)
    return click.command()(command)


@_options
def train(
    config: Path | None, preset: str | None, overrides: tuple[str, ...], nproc: int | None, run_dir: Path | None,
    resume: str | None, print_config: bool, dry_run: bool, world: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Train a mixture-of-experts model with separated modules.

    CONFIG is a TOML file (keys: docs/config.md). Under torchrun this process becomes one rank of the job; elsewhere
    --nproc ranks are started here. A run directory knows its configuration: --run-dir DIR --resume needs no CONFIG.
    """
    from pdtrain.config import presets, read_run, resolve, to_toml

    if (as_json or world) and not dry_run:
        raise UsageError(f"{'--json' if as_json else '--world'} goes with --dry-run")
    if world and nproc and world != nproc:
        raise UsageError(f"--world {world} and --nproc {nproc} differ; give one of them")
    if config is None and preset is None and resume and run_dir:
        config = run_dir / "config.toml"
        if not run_dir.is_dir():
            raise UsageError(f"nothing to resume from: no directory {run_dir}")
    if config is None and preset is None and not (overrides or print_config or dry_run or resume):
        raise UsageError(f"give a CONFIG file or --preset NAME; presets: {', '.join(presets())}")
    launcher = _launcher_world()
    ranks = world or nproc or (None if dry_run or print_config else launcher)
    loaded = read_run(config, preset=preset, overrides=overrides, world=ranks, train=not (dry_run or print_config))
    own_copy = launcher is not None and run_dir is not None and config == run_dir / "config.toml"
    if os.environ.get("RANK", "0") == "0" and not own_copy:  # who wrote that copy has said them
        for warning in loaded.warnings:
            print(f"pdtrain: warning: {warning}", file=sys.stderr)
    if print_config:
        click.echo(to_toml(loaded.run), nl=False)
        return 0
    if dry_run:
        from pdtrain.plan import dryrun

        resolved = resolve(loaded.run)
        click.echo(json.dumps(dryrun.as_json(resolved, loaded.warnings)) if as_json else dryrun.as_text(resolved))
        return 0
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("pdtrain train", "train", "torch")
    return start(loaded, run_dir, _checkpoint(resume, run_dir)) if launcher is None else _become_rank(
        loaded.run, run_dir, resume
    )


def _launcher_world() -> int | None:
    """WORLD_SIZE where torchrun (or another launcher that speaks its variables) started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise UsageError(f"WORLD_SIZE = {os.environ['WORLD_SIZE']!r} in the environment is not a number") from None


def _checkpoint(resume: str | None, run_dir: Path | None) -> str | None:
    """`resume` once it is known to exist.

    Raises:
        UsageError: there is nothing to resume from.
    """
    if resume is None:
        return None
    if resume == LATEST and run_dir is None:
        raise UsageError("--resume without PATH continues the run in --run-dir; give --run-dir, or a checkpoint's path")
    folder = Path(resume) if resume != LATEST or run_dir is None else run_dir
    if not folder.is_dir():
        hint = f"; --resume took {resume} as its PATH" if folder.is_file() else ""
        raise UsageError(f"nothing to resume from: no directory {folder}{hint}")
    return resume


def start(loaded: Loaded, run_dir: Path | None, resume: str | None) -> int:
    """Start every rank on this machine and wait for the job."""
    from pdtrain import in_use
    from pdtrain.config import to_toml
    from pdtrain.data import open_data
    from pdtrain.launch import launch
    from pdtrain.recorder.environment import write_config

    run = loaded.run
    ranks = run.parallel.ranks + run.pools.update_ranks
    if ranks > MOST_LOCAL_RANKS:
        raise UsageError(
            f"parallel.ranks = {run.parallel.ranks} on one machine; give --nproc, or start it under torchrun on every "
            "node"
        )
    open_data(run)  # once and here: a wrong path is one line, and a tokenised corpus is cached before the ranks ask
    run_dir = _run_directory(run_dir, loaded.name, resume)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = in_use.take(run_dir)
        # The ranks read this copy: a file edited while they start must not give them different configurations.
        config = write_config(run_dir, to_toml(run))
    except OSError as error:
        raise UsageError(f"cannot write to --run-dir {run_dir}: {error.strerror}") from None
    of_them = f" ({run.pools.update_ranks} of them update)" if run.pools.update_ranks else ""
    print(f"pdtrain: {ranks} rank{'s' if ranks > 1 else ''}{of_them}, recorded in {run_dir}", file=sys.stderr)

    def command(config: Path, resume: str | None) -> list[str]:
        words = ["-P", "-m", "pdtrain.cli", "train", str(config), "--run-dir", str(run_dir)]
        return words + ([f"--resume={resume}"] if resume else [])

    again: dict[str, Any] = {}
    if run.pools.rebalance == "auto":
        from pdtrain.pools.regroup import Relaunch

        relaunch = Relaunch(run, run_dir, command)
        again = {"again": relaunch.again, "environment": relaunch.environment}
    try:
        return launch(
            command(config, resume),
            processes=ranks,
            run_dir=run_dir,
            threads=run.train.threads,
            flight_recorder_entries=run.recorder.flight_recorder_entries,
            restarts=run.pools.restarts,
            **again,
        )
    finally:
        if run.pools.keep is not None:
            from pdtrain.pools.keep import remove_all

            remove_all(Path(run.pools.keep), run_dir)
        if lock >= 0:
            os.close(lock)


def _run_directory(given: Path | None, name: str, resume: str | None) -> Path:
    """Where to record: `given`, or a new directory named after the configuration and the time.

    Raises:
        UsageError: `given` holds a run that would be overwritten.
    """
    if given is None:
        stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        taken = sum(1 for path in Path("runs").glob(f"{stem}*"))
        return Path("runs") / (f"{stem}-{taken + 1}" if taken else stem)
    if resume is None and any((given / part).exists() for part in ("metrics.jsonl", "checkpoints")):
        raise UsageError(f"{given} already holds a run; --resume continues it, another --run-dir starts a new one")
    if given.exists() and not given.is_dir():
        raise UsageError(f"--run-dir {given} is a file")
    return given


def _become_rank(run: Run, run_dir: Path | None, resume: str | None) -> int:
    """Train as the rank that the environment names."""
    if run_dir is None:
        raise UsageError("under torchrun give --run-dir: all ranks must record in the same place")
    from torch.distributed.elastic.multiprocessing.errors import record

    import pdtrain.restart  # noqa: F401  # it remembers who has started this process, before torch takes its seconds
    from pdtrain.in_use import share

    share(run_dir)  # until this process ends
    target: Any = Path(resume) if resume and resume != LATEST else resume

    @record  # an exception leaves error.json for the launcher
    def train_here() -> None:
        from pdtrain.trainer import train

        train(run, run_dir, target)

    train_here()
    return 0
