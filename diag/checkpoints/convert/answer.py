"""`diag reshard` as a report: what went over, what could not, how fast; and its progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diag.checkpoints.convert.contents import parse_facts
from diag.checkpoints.convert.engine import SUFFIX, Limits, Progress
from diag.checkpoints.convert.reshard import Done, Wish, parse_bytes, reshard
from diag.checkpoints.convert.targets import Options
from diag.errors import UsageError
from diag.schema import Finding, Input, Report

_LAYOUT_OF = {"dcp": ("ranks",), "hf": (), "universal": (), "zero1": ("dp",), "zero2": ("dp",),
              "megatron": ("tp", "pp", "ep"), "megatron-legacy": ("tp", "pp", "ep")}


def resharded(source: Path, destination: Path, *, to: str, facts: tuple[str, ...], max_shard_size: str,
              max_memory: str | None, threads: int | None, from_format: str | None, force: bool, quiet: bool,
              **rest: Any) -> Report:
    """Convert and say what was done. Raises `UsageError`, `ArtefactError`; on Ctrl-C says what is left behind."""
    layout = {key: rest.pop(key) for key in ("ranks", "dp", "tp", "pp", "ep")}
    for key, value in layout.items():
        if value is not None and key not in _LAYOUT_OF[to]:
            raise UsageError(f"--{key} means nothing to --to {to}"
                             + (f"; it takes --{', --'.join(_LAYOUT_OF[to])}" if _LAYOUT_OF[to] else ""))
    options = Options(to=to, shard=parse_bytes(max_shard_size), **{k: v for k, v in layout.items() if v is not None})
    limits = Limits(threads or min(len(os.sched_getaffinity(0)), 8), parse_bytes(max_memory) if max_memory else None)
    wish = Wish(source=source, destination=destination, options=options, facts=parse_facts(facts), limits=limits,
                from_format=from_format, **rest)
    try:
        with bar(quiet) as progress:
            done = reshard(wish, progress)
    except KeyboardInterrupt:
        left = destination.with_name(destination.name + SUFFIX)
        if left.exists():
            print(f"{left} keeps what is done; the same command goes on from there", file=sys.stderr)
        raise
    return _report(wish, done)


@contextmanager
def bar(quiet: bool) -> Iterator[Progress | None]:
    """Bytes, rate and time left on a terminal's standard error."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}

        def progress(done: int, total: int, phase: str) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=total)
            shown.update(tasks[phase], completed=done, total=total)

        yield progress


def _report(wish: Wish, done: Done) -> Report:
    contents, plan, result = done.contents, done.plan, done.result
    what = f"{done.parameters:,} parameters"
    what += " with optimizer states" if contents.has_optimizer() else ", weights only"
    home = wish.destination / plan.home
    files = len(plan.files) + len(plan.marks)
    verb = "would become" if result is None else "is now"
    headline = (f"{wish.source} ({contents.format}) {verb} {home} ({wish.options.to}): {what}, "
                f"{plan.total / 1e9:,.3f} GB in {files:,} files")
    numbers: dict[str, Any] = {"bytes": plan.total, "files": files, "tensors": done.tensors,
                               "parameters": done.parameters, "names": done.names, "destination": str(home),
                               "seconds": round(done.seconds, 3)}
    findings = []
    if result is None:
        said = f"Nothing was written. Names: {done.names}."
    else:
        rate = result.written / done.seconds / 1e6 if done.seconds else 0.0
        said = (f"Every file was read back and equals what was read from the source, to the byte. Names: {done.names}. "
                f"{done.seconds:.1f} s, {rate:,.0f} MB/s.")
        if result.resumed:
            said += f" {result.resumed / 1e9:,.3f} GB were there from an interrupted run."
        numbers |= {"written": result.written, "resumed": result.resumed}
    said += "".join(f" {note[0].upper()}{note[1:]}." for note in (*contents.notes, *plan.notes))
    if plan.carried:
        said += " Also there: " + "; ".join(plan.carried) + "."
    dropped = contents.dropped + plan.dropped
    numbers["not_carried"] = dropped
    findings.append(Finding(cause="ckpt_checked", summary=said, severity="info", role="context", confidence=1.0,
                            numbers=numbers))
    for problem in plan.objections:
        findings.append(Finding(
            cause=problem.cause, severity="warning", role="symptom", confidence=1.0,
            summary=f"The source is not whole, nor is the result: {problem.text}. `pdtrain diag ckpt verify {home}` "
                    "says all."))
    size = sum(c.folder.size(f) or 0 for c in contents.source.checkpoints for f in c.files)
    return Report(verdict="degraded" if plan.objections else "healthy", headline=headline, findings=findings,
                  inputs=[Input(path=str(wish.source), format=contents.format, bytes=size)],
                  not_checked=[f"not carried over: {text}" for text in dropped])
