"""`verify` as one answer: of a checkpoint, or of a directory of many steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from diag.checkpoints import formats, steps
from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.report import findings_of, input_of, not_checked_of, report_of, table_of, unread_of
from diag.checkpoints.verify import Options, Outcome, verify
from diag.checkpoints.verify.archives import Progress
from diag.checkpoints.verify.digests import seal as write_seal
from diag.checkpoints.verify.outcome import plural
from diag.diagnose import build_report
from diag.errors import ArtefactError, UsageError
from diag.schema import Evidence, Finding, Input, Report, Where


def verified(path: str, *, deep: bool = False, against: str | None = None, values: bool = True,
             threads: int | None = None, seal: bool = False, progress: Progress | None = None) -> Report:
    """The Report of `diag ckpt verify`. Raises `UsageError` for a path that is not there.

    A path that holds no checkpoint at all, or nothing readable of one, is an input with a problem (exit status 2).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options = Options(deep=deep, against=against, finite=values, threads=threads or min(cores, 8))
    place = formats.place_of(path)
    reader = formats.reader_of(place)
    if reader is None:
        if seal:
            raise UsageError(f"{path}: name one step to be sealed")
        below = _below(place)
        if below is not None:
            return _many(below, options, progress)
    try:
        checkpoint = formats.read(path)
    except ArtefactError as error:
        return _unreadable(path, reader.NAME if reader else "unknown", error)
    report = report_of(checkpoint, verify(checkpoint, options, progress), deep, path if place.file else None)
    if seal and checkpoint.format == "pdtrain":
        raise UsageError(f"{path}: carries digests of its own in manifest.json; nothing to seal")
    if seal and report.verdict == "healthy":
        try:
            count = write_seal(checkpoint)
        except OSError as error:
            raise UsageError(f"{checkpoint.folder.root}/integrity.json: {error.strerror or error}") from None
        report.headline += f" Sealed: integrity.json holds the SHA-256 of {plural(count, 'file')}."
    return report


def _unreadable(path: str, name: str, error: ArtefactError) -> Report:
    """Nothing can be used: exit status 2, and a finding that says what the one file is."""
    problem = str(error).removeprefix(f"{path}: ")
    if name == "unknown":
        return build_report([], inputs=[Input(path=path, format=name, problem=problem, readable=False)])
    cause = "ckpt_hostile" if "hostile" in problem or "outside of the checkpoint" in problem else \
        "ckpt_missing_shard" if "LFS" in problem else "ckpt_corrupt"
    folder = Path(path).is_dir()
    file = problem.partition(": ")[0] if folder else Path(path).name
    where = Path(path) / file if folder else Path(path)
    finding = Finding(cause=cause, severity="error", role="root", confidence=1.0, summary=f"{path}: {problem}",
                      where=Where(file=file if where.exists() else None),
                      evidence=[Evidence(path=str(where), text=problem)], numbers={"check": "metadata"})
    return build_report([finding], inputs=[Input(path=path, format=name, problem=problem)])


def _below(place: formats.Place) -> formats.Place | None:
    """The directory of steps that `place` is or holds (a run directory)."""
    if steps.find(place) or steps.tracker(place) is not None:
        return place
    for name in ("checkpoints", "checkpoint", "ckpt", "global_steps"):
        if name in place.names and (place.folder / name).is_dir():
            found = formats.place_of(place.folder / name)
            if steps.find(found) or steps.tracker(found) is not None:
                return found
    return None


@dataclass(slots=True)
class _Step:
    """One step and what was found in it; `checkpoint` is None when nothing could be read."""

    step: steps.Step
    checkpoint: Checkpoint | None
    outcomes: list[Outcome]
    problem: str = ""

    @property
    def safe(self) -> bool:
        """Whether a resume from it is safe: readable, no error."""
        return self.checkpoint is not None and not any(p.severity == "error" for o in self.outcomes for p in o.problems)

    @property
    def why(self) -> str:
        if self.problem:
            return self.problem
        return next((p.text for o in self.outcomes for p in o.problems if p.severity == "error"), "")


def _many(place: formats.Place, options: Options, progress: Progress | None) -> Report:
    """Newest first until one is safe; with --deep all of them. The rest is named as not looked at."""
    listed = steps.find(place)
    tracker = steps.tracker(place)
    found: list[_Step] = []
    safe: _Step | None = None
    for step in sorted((s for s in listed if not s.leftover), key=lambda s: s.step or 0, reverse=True):
        if safe is not None and not options.deep:
            break
        one = _one(step, options, progress)
        found.append(one)
        if one.safe and safe is None:
            safe = one
    findings: list[Finding] = []
    for one in found:
        if one.checkpoint is None:
            name = one.step.path.name
            findings.append(Finding(cause="ckpt_incomplete", severity="error", confidence=1.0,
                                    summary=f"{name} cannot be read: {one.problem}",
                                    where=Where(file=name, step=one.step.step),
                                    evidence=[Evidence(path=str(one.step.path), text=one.problem)]))
            continue
        for finding in findings_of(one.outcomes, one.checkpoint):
            finding.role = "symptom"
            if finding.where.file and not finding.where.file.startswith(one.step.path.name):
                finding.where.file = f"{one.step.path.name}/{finding.where.file}"
            findings.append(finding)
    findings += _tracker_findings(place, tracker, listed, found)
    for step in (s for s in listed if s.leftover):
        findings.append(Finding(cause="ckpt_incomplete", severity="info", role="context", confidence=1.0,
                                summary=f"{step.path.name} is what an interrupted save left; no resume reads it",
                                where=Where(file=step.path.name, step=step.step)))
    findings.sort(key=lambda f: {"fatal": 0, "error": 1, "warning": 2, "info": 3}[f.severity])
    if findings and findings[0].severity != "info":
        findings[0].role = "root"
    rows = [{"step": one.step.path.name, "safe to resume": "yes" if one.safe else "no",
             "why": one.why} for one in found]
    if safe is not None and safe.checkpoint is not None:
        table = table_of(safe.outcomes, safe.checkpoint)
        table.numbers = {"steps": rows, **table.numbers}
        findings.append(table)
    inputs = [input_of(o.checkpoint, o.problem or None) if o.checkpoint is not None else
              Input(path=str(o.step.path), format="unknown", problem=o.problem, readable=False) for o in found]
    notes = not_checked_of(safe.outcomes) if safe is not None else []
    if safe is not None and safe.checkpoint is not None:
        notes += unread_of(safe.checkpoint)
    unseen = [s.path.name for s in listed if not s.leftover and all(s is not o.step for o in found)]
    if unseen:
        notes.append(f"{len(unseen)} older steps: a newer one is safe; --deep checks all")
    if not inputs:
        inputs = [Input(path=str(place.folder), format="directory of steps", problem=None if findings else "no "
                                                                                                           "step in it",
                        readable=bool(findings))]
    report = build_report(findings, inputs=inputs, not_checked=notes)
    report.headline = _headline(place, safe, found, tracker, report.headline)
    return report


def _one(step: steps.Step, options: Options, progress: Progress | None) -> _Step:
    try:
        checkpoint = formats.read(step.path)
    except ArtefactError as error:
        return _Step(step, None, [], str(error).removeprefix(f"{step.path}: "))
    if checkpoint.meta.step is None:
        checkpoint.meta.step = step.step
    return _Step(step, checkpoint, verify(checkpoint, options, progress))


def _headline(place: formats.Place, safe: _Step | None, found: list[_Step], tracker: steps.Tracker | None,
              otherwise: str) -> str:
    if not found:
        return otherwise
    if safe is None:
        return f"No step of {place.folder} is safe to resume from; the newest: {found[0].why or 'not readable'}"
    name = safe.step.path.name
    newer = [one.step.path.name for one in found if one is not safe and (one.step.step or 0) > (safe.step.step or 0)]
    said = f"Resume from {name}: the newest step that is safe."
    if newer:
        said += f" {', '.join(newer[:3])} {'is' if len(newer) == 1 else 'are'} newer and damaged."
    elif tracker is not None and tracker.target != name and tracker.text != "release":
        said += f" {tracker.file} names {tracker.target}."
    return said


def _tracker_findings(place: formats.Place, tracker: steps.Tracker | None, listed: list[steps.Step],
                      found: list[_Step]) -> list[Finding]:
    """The tracker must name a step that is there and safe; an older one than the newest is only said."""
    if tracker is None:
        return []
    where = Where(file=tracker.file)
    evidence = [Evidence(path=str(place.folder / tracker.file), line=1, text=tracker.text[:200])]
    there = {s.path.name: s for s in listed if not s.leftover}

    def finding(text: str, severity: str = "error", cause: str = "ckpt_incomplete") -> Finding:
        return Finding(cause=cause, severity=severity, confidence=1.0, summary=text, where=where,  # type: ignore[arg-type]
                       evidence=evidence, numbers={"check": "tracker"})

    if not tracker.text:
        return [finding(f"{tracker.file} is empty: no resume finds a step by it")]
    if "/" in tracker.target or "\\" in tracker.target or tracker.target in (".", ".."):
        return [finding(f"{tracker.file} names {tracker.target!r}, which leaves the folder; refused",
                        cause="ckpt_hostile")]
    if tracker.target not in there and not (place.folder / tracker.target).is_dir():
        ahead = f"; the newest there is {list(there)[-1]}" if there else "; there is no step at all"
        return [finding(f"{tracker.file} names {tracker.target}, which is not there: the mark was set before the save "
                        f"was finished, or the step was deleted{ahead}")]
    damaged = next((o for o in found if o.step.path.name == tracker.target and not o.safe), None)
    if damaged is not None:
        return [finding(f"{tracker.file} names {tracker.target}, which is not safe to resume from: {damaged.why}")]
    return []

