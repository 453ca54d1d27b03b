"""discover -> read -> detect -> correlate -> report: the one function behind every passive `pdtrain diag` command."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from diag.artefacts import Artefact, Artefacts, Progress, Reader, ReadOptions, Source, Unreadable, recognise
from diag.artefacts.log_facts import Log
from diag.causes import CAUSES
from diag.checkpoints.beside import beside, step_directories
from diag.correlate import correlate
from diag.detectors import Detector, NotChecked, detectors
from diag.discover import discover
from diag.errors import ArtefactError, UsageError
from diag.playbooks import fill, for_cause
from diag.schema import SEVERITY_ORDER, Finding, Input, Report, Severity, Verdict
from diag.starts import last_starts

log = logging.getLogger(__name__)

#: Inputs of formats nobody asked about are counted, not listed, beyond this many names.
NAMED_SKIPS = 3


def diagnose(
    paths: Iterable[str | Path],
    *,
    only: str | tuple[str, ...] | None = None,
    signatures: Path | None = None,
    progress: Progress | None = None,
    columns: tuple[tuple[str, str], ...] = (),
    inspect: Callable[[Artefacts], object] | None = None,
    device_memory: int | None = None,
) -> Report:
    """Diagnose what lies under `paths`; `only` restricts the detectors to a topic ("router", "hang", ...).

    `columns` are the user's own names of metrics, (canonical name, name in the source).
    `device_memory` is the size of one GPU in bytes, which memory snapshots do not say.
    `inspect` is given everything that was read, before the report is made: for pictures.
    `signatures` is a folder with the user's own log signatures. `progress(done, total)` is called in bytes while
    reading. Raises `UsageError` for a path that does not exist or when nothing at all was found; damaged inputs are
    findings and `inputs[].problem`.
    """
    names = [str(path) for path in paths]
    wanted = None if only is None else detectors(only)  # all of them are imported while children read
    numbers_only = wanted is not None and not any(Log in (*d.needs, *d.wants) for d in wanted)
    sources = discover(names, options=ReadOptions(signatures=signatures, series=numbers_only, columns=columns,
                                                 device_memory=device_memory, meanwhile=partial(detectors, only)))
    items, notes = read(sources, wanted, progress=progress)
    steps = step_directories((source.path for source in sources), names) if only is None else []
    if not items:
        advice = f"; its checkpoints: pdtrain diag ckpt verify {steps[0]}" if steps else ""
        raise UsageError(f"{', '.join(names[:5])}: {_nothing_to_use(notes)}{advice}")
    judged, earlier = last_starts(items)
    notes = [*earlier, *notes]
    artefacts = Artefacts(judged)
    artefacts.columns = columns
    if inspect is not None:
        inspect(artefacts)
    findings, not_checked, ran = detect(artefacts, detectors(only))
    findings = correlate(findings, artefacts) + list(_damage(items))
    if steps:
        findings, notes = _with_checkpoints(findings, steps, notes)
    return build_report(findings, inputs=[_input(item) for item in items], not_checked=[*not_checked, *notes],
                        checked=ran > 0)


def _with_checkpoints(findings: list[Finding], steps: list[Path], notes: list[str]) -> tuple[list[Finding], list[str]]:
    """What lies beside the logs: context of a failure; where nothing else is wrong, the one thing to know."""
    found, unchecked = beside(steps)
    if found and not any(finding.role == "root" for finding in findings):
        found[0].role = "root"
        return [*found, *findings], [*unchecked, *notes]
    return [*findings, *found], [*unchecked, *notes]


def read(
    sources: list[Source | Unreadable],
    chosen: list[Detector] | None,
    *,
    progress: Progress | None = None,
) -> tuple[list[Artefact], list[str]]:
    """Read what the `chosen` detectors ask for, all for None; the rest of a folder is only counted, in the notes
    returned.

    A file that the user named himself is always answered for, readable or not.
    """
    wanted = tuple({kind for d in chosen or () for kind in (*d.needs, *d.wants)})
    items: list[Artefact] = []
    batches: dict[str, tuple[Reader, list[Source], list[int]]] = {}
    skipped: list[str] = []
    empty: list[str] = []
    for source in sources:
        if isinstance(source, Unreadable):
            items.append(source)
            continue
        reader = recognise(source)
        if reader is not None and (chosen is None or issubclass(reader.ARTEFACT, wanted)):
            batch = batches.setdefault(reader.NAME, (reader, [], []))
            batch[1].append(source)
            batch[2].append(len(items))
            items.append(Unreadable(path=source.path, format=reader.NAME, bytes=source.bytes, problem="not read"))
        elif source.given:
            items.append(_refused(source, reader))
        else:
            (skipped if source.bytes else empty).append(source.path)
    total, done = sum(s.bytes for _, batch, _ in batches.values() for s in batch), 0
    for reader, batch_sources, places in batches.values():

        def advance(part: int, _total: int, base: int = done) -> None:
            if progress is not None:
                progress(base + part, total)

        for place, item in zip(places, _read_batch(reader, batch_sources, advance), strict=True):
            items[place] = item
        done += sum(s.bytes for s in batch_sources)
    return items, [*_listed(skipped, "not used"), *_listed(empty, "empty")]


def _read_batch(reader: Reader, sources: list[Source], progress: Progress) -> Iterator[Artefact]:
    many = getattr(reader, "read_many", None)
    if many is not None:
        try:
            results = list(many(sources, progress))
        except UsageError:  # a signature of the user's that cannot be used is his to correct
            raise
        except Exception as error:
            if os.environ.get("PDTRAIN_STRICT"):
                raise
            results = [_our_fault(reader, source, error) for source in sources]
        yield from results
        return
    done, total = 0, sum(s.bytes for s in sources)
    for source in sources:
        try:
            yield reader.read(source)
        except ArtefactError as error:
            yield Unreadable(path=source.path, format=reader.NAME, bytes=source.bytes, problem=str(error))
        except Exception as error:
            if os.environ.get("PDTRAIN_STRICT"):
                raise
            yield _our_fault(reader, source, error)
        done += source.bytes
        progress(done, total)


def _our_fault(reader: Reader, source: Source, error: Exception) -> Unreadable:
    """A bug of a reader costs one input, not the diagnosis; PDTRAIN_STRICT=1 shows it instead."""
    log.info("reader %s failed on %s", reader.NAME, source.path, exc_info=error)
    problem = f"pdtrain's {reader.NAME} reader failed on it ({type(error).__name__}); please report this"
    return Unreadable(path=source.path, format=reader.NAME, bytes=source.bytes, problem=problem)


def _refused(source: Source, reader: Reader | None) -> Unreadable:
    if not source.head:
        problem = "is empty"
    elif source.head.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem = "is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8"
    elif reader is None:
        problem = "is in no format that is known here"
    else:
        problem = f"is a {reader.NAME} file, which this command does not use"
    name = reader.NAME if reader else "unknown"
    return Unreadable(path=source.path, format=name, bytes=source.bytes, problem=problem)


def _nothing_to_use(notes: list[str]) -> str:
    return f"nothing here is in a format that this command reads; {notes[0]}" if notes else "empty; nothing to read"


def _listed(paths: list[str], what: str) -> list[str]:
    """"3 files not used: a, b, c"; nothing for no path."""
    if not paths:
        return []
    names = ", ".join(Path(path).name for path in paths[:NAMED_SKIPS])
    more = f" and {len(paths) - NAMED_SKIPS:,} more" if len(paths) > NAMED_SKIPS else ""
    return [f"{len(paths):,} file{'s' if len(paths) > 1 else ''} {what}: {names}{more}"]


def detect(artefacts: Artefacts, chosen: list[Detector]) -> tuple[list[Finding], list[str], int]:
    """Run the `chosen` detectors: what they found, in words what could not be checked and why, and how many had
    something to check."""
    findings: list[Finding] = []
    ran = 0
    missing: dict[str, list[str]] = {}
    absent_inputs: set[str] = set()
    for entry in chosen:
        if not all(artefacts.of(kind) for kind in entry.needs):
            reason = f"no {entry.subject} among the inputs"
            absent_inputs.add(reason)
            missing.setdefault(reason, []).append(entry.topic)
            continue
        try:
            said = list(entry.run(artefacts))
        except Exception as error:
            if os.environ.get("PDTRAIN_STRICT"):
                raise
            log.info("detector %s failed", entry.name, exc_info=error)
            missing.setdefault(f"pdtrain's {entry.name} failed ({type(error).__name__}); please report this",
                               []).append(entry.topic)
            continue
        findings += [item for item in said if isinstance(item, Finding)]
        absent = [item for item in said if isinstance(item, NotChecked)]
        for note in absent:
            missing.setdefault(note.reason, []).append(entry.topic)
        ran += not said or len(absent) < len(said)
    if not ran:  # what the inputs lack leads, not what else could have been given
        missing = dict(sorted(missing.items(), key=lambda item: item[0] in absent_inputs))
    return findings, [f"{', '.join(sorted(set(topics)))}: {reason}" for reason, topics in missing.items()], ran


def build_report(
    findings: list[Finding], *, inputs: list[Input], not_checked: list[str] | None = None, checked: bool = True
) -> Report:
    """The report of correlated `findings`: verdict, headline, playbooks and fix steps filled in.

    `checked` is false when no detector had anything to look at: silence is not health.
    """
    for finding in findings:
        page = for_cause(finding.cause)
        if page is not None:
            finding.playbook = finding.playbook or page.id
            if not finding.fix and finding.severity != "info":
                finding.fix = [fill(step, finding.where) for step in page.fix]
    verdict = verdict_of(findings, inputs)
    headline = headline_of(verdict, findings, inputs)
    if verdict == "healthy" and not checked:
        verdict, headline = "unknown", f"Nothing was checked: {(not_checked or ['no detector applies'])[0]}."
    return Report(verdict=verdict, headline=headline, inputs=inputs, findings=findings, not_checked=not_checked or [])


def verdict_of(findings: list[Finding], inputs: list[Input]) -> Verdict:
    """A root decides: "failed" when its cause ends runs, else "degraded". Without one: "unknown" when something is
    unexplained or nothing could be read, else "healthy"."""
    root = next((f for f in findings if f.role == "root"), None)
    if root is not None:
        cause = CAUSES.get(root.cause)
        if root.numbers.get("standing") and root.severity == "warning":
            return "degraded"  # a machine that wants mending: nothing has failed of it yet
        ended = cause is None or cause.verdict == "failed" or root.severity == "fatal"
        return "failed" if ended else "degraded"
    unexplained = any(f.cause in CAUSES and CAUSES[f.cause].verdict == "unknown" for f in findings)
    if unexplained or not any(item.readable for item in inputs):
        return "unknown"
    return "unknown" if any(f.severity in ("error", "fatal") for f in findings) else "healthy"


def headline_of(verdict: Verdict, findings: list[Finding], inputs: list[Input]) -> str:
    """One sentence a tired person understands: the leading finding's own summary where there is one."""
    if verdict in ("failed", "degraded"):
        return next(f.summary for f in findings if f.role == "root")
    readable = sum(item.readable for item in inputs)
    if not readable:
        first = next((item for item in inputs if item.problem), None)
        return f"Nothing could be read: {first.path}: {first.problem}" if first else "Nothing could be read."
    if verdict == "unknown":
        leading = next((f for f in findings if f.cause in CAUSES and CAUSES[f.cause].verdict == "unknown"), None)
        return leading.summary if leading else "Something is wrong, and what was found does not say what."
    files = f"{readable:,} input{'s' if readable > 1 else ''}"
    damaged = sum(f.cause == "input_unreadable" and SEVERITY_ORDER[f.severity] > 0 for f in findings)
    if damaged:
        return f"Nothing wrong was found in what could be read; {damaged:,} input{'s' if damaged > 1 else ''} could " \
               "not be read, or only in part."
    return f"Nothing wrong was found in {files}."


def _input(item: Artefact) -> Input:
    return Input(path=item.path, format=item.format, bytes=item.bytes, ranks=sorted(item.ranks), lines=item.lines,
                 problem=item.problem, readable=not isinstance(item, Unreadable))


def _damage(items: list[Artefact]) -> Iterator[Finding]:
    for item in items:
        if item.problem:
            severity: Severity = "warning" if item.problem_severity == "warning" else "info"
            what = "could not be read" if isinstance(item, Unreadable) else "was read in part"
            yield Finding(cause="input_unreadable", role="context", severity=severity, confidence=1.0,
                          summary=f"{item.path} {what}: {item.problem}")
