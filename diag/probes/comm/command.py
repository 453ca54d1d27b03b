"""From the options of `pdtrain diag comm` to a job: checks everything before a rank is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diag.commands.output import Output
from diag.errors import UsageError
from diag.probes.comm.ask import OPERATIONS, Ask, absolute, parse_size

if TYPE_CHECKING:
    from diag.probes.comm.rank import Shown

#: Seconds for all sweeps.
BUDGET, QUICK_BUDGET = 30.0, 5.0


def run(paths: tuple[str, ...], output: Output, given: dict[str, Any]) -> int:
    """Show saved probes, be a rank of a job, or start one here. Raises UsageError for options that do not fit."""
    if paths:
        if any(given[name] for name in ("nproc", "mode", "config", "save", "baseline", "operations", "budget",
                                        "concurrent", "ranks_per_node", "overrides", "no_extras")):
            raise UsageError("a saved probe is shown as it is; --nproc, --quick, --thorough, --op, --save and the like "
                             "measure: leave out the PATHs")
        from diag.probes.comm.report import saved

        return saved(paths, output, _target("--png", given["png"], output))
    ask = asked(given)
    from diag.probes.comm.rank import Shown, run_rank
    from diag.probes.launched import job

    shown = Shown(output, _target("--save", given["save"], output), _target("--png", given["png"], output))
    if given["png"]:
        if not ask.mode:
            raise UsageError("--png draws links: add --quick or --thorough")
        from diag.probes.comm.picture import need_matplotlib

        need_matplotlib()
    _apart(output, shown)
    place = job()
    world = place[1] if place is not None else given["nproc"]
    if ask.ranks_per_node and world and world % ask.ranks_per_node:
        raise UsageError(f"--ranks-per-node {ask.ranks_per_node}: {world} ranks are no whole number of such nodes")
    if place is not None:
        if given["nproc"]:
            raise UsageError("--nproc starts a job and this process is a rank of one already; leave it out")
        return run_rank(ask, shown) or 0
    if not given["nproc"]:
        raise UsageError("say among whom: --nproc N starts N ranks here, `torchrun ... --no-python -- pdtrain diag "
                         "comm` measures between hosts, PROBE.json shows a saved probe")
    if ask.config is not None:
        from diag.probes.comm.groups import check_world

        check_world(ask.config, ask.overrides, given["nproc"])
    from diag.probes.comm.start import run_local

    return run_local(ask, shown, given["nproc"])


def asked(given: dict[str, Any]) -> Ask:
    """The options as what every rank gets. Raises UsageError."""
    operations = tuple(dict.fromkeys(given["operations"]))
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise UsageError(f"--op {unknown[0]!r} is not measured; use {', '.join(OPERATIONS)}")
    low, high = parse_size(given["smallest"], "--min"), parse_size(given["largest"], "--max")
    if low > high:
        raise UsageError(f"--min {given['smallest']} is larger than --max {given['largest']}")
    if given["baseline"] and not given["mode"]:
        raise UsageError("--baseline compares links: add --quick or --thorough")
    if given["passes"] and given["mode"] != "thorough":
        raise UsageError("--passes repeats the rounds of --thorough: add it")
    if given["config"] is None and (given["overrides"] or given["concurrent"]):
        raise UsageError("--set and --concurrent belong to --config RUN.toml")
    for name in ("budget", "timeout"):
        if given[name] != given[name]:
            raise UsageError(f"--{name} nan is no number of seconds")
    for name in ("baseline", "config"):
        if given[name] and not Path(given[name]).is_file():
            raise UsageError(f"--{name} {given[name]}: no such file")
    budget = given["budget"] or (QUICK_BUDGET if given["mode"] == "quick" else BUDGET)
    return Ask(operations=operations or OPERATIONS, chosen=bool(operations), min_bytes=low, max_bytes=high,
               iterations=given["iterations"], budget=budget, timeout=given["timeout"], mode=given["mode"] or "",
               passes=given["passes"] or 1,
               extras=not (given["no_extras"] or given["mode"] == "quick"), config=absolute(given["config"]),
               overrides=tuple(given["overrides"]), concurrent=given["concurrent"],
               ranks_per_node=given["ranks_per_node"], baseline=absolute(given["baseline"]))


def _apart(output: Output, shown: Shown) -> None:
    """Refuse one name for two files: the second would overwrite the first without a word."""
    names = (output.file, output.html, output.markdown, shown.save, shown.png)
    files = [Path(name).absolute() for name in names if name is not None and name != "-"]
    if len(set(files)) < len(files):
        raise UsageError("two outputs have the same file name")


def _target(option: str, name: str | None, output: Output) -> str | None:
    """`name` as an absolute path that may be written, checked before the minutes of measuring."""
    if name is None:
        return None
    path = Path(name).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{option} {name}: {'is a directory' if path.is_dir() else 'its directory does not exist'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {name}: cannot be written here: read-only, or not permitted")
    if path.exists() and not output.force and os.environ.get("RANK", "0") == "0":
        raise UsageError(f"{option} {name}: exists; choose another name, or overwrite it with --force")
    return str(path)
