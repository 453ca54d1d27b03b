"""A probe as a report, live or saved, and every form in which it is given: tables, heat map, JSON, HTML, PNG, file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diag.artefacts import Artefacts
from diag.artefacts.comm_probe import CommProbe
from diag.commands.output import Output, width
from diag.correlate import correlate
from diag.detectors import detectors
from diag.diagnose import build_report, detect, diagnose
from diag.errors import UsageError
from diag.probes.comm.records import Probe, encode
from diag.schema import Input, Report
from diag.whole_file import write_whole

if TYPE_CHECKING:
    from diag.probes.comm.rank import Shown


def report_of(probe: Probe) -> Report:
    """The report of a probe that was made just now."""
    item = CommProbe(path="probe", format="live probe", probe=probe, ranks=list(range(probe.world)))
    artefacts = Artefacts([item])
    findings, notes, ran = detect(artefacts, [d for d in detectors("comm") if CommProbe in d.needs])
    inputs = [Input(path=item.path, format="live probe", ranks=item.ranks)]
    return _worded(build_report(correlate(findings, artefacts), inputs=inputs, not_checked=notes, checked=ran > 0))


def emit_live(probe: Probe, shown: Shown) -> int:
    """Print and save everything asked for; the exit status.

    Raises:
        UsageError: a file could not be written. What was measured has been printed by then: it took minutes.
    """
    report, output = report_of(probe), shown.output
    try:
        status = emit(report, [probe], output, None)
    except UsageError:
        if output.file or output.html or output.markdown:
            Output(json=output.json).emit(report, more=measurements([probe]))
        raise
    if shown.save is not None:
        save(probe, shown.save, force=True)
    if shown.png is not None:
        from diag.probes.comm import picture

        picture.png(probe, Path(shown.png))
    return status


def saved(paths: Iterable[str], output: Output, png: str | None) -> int:
    """Show saved probes again. Raises UsageError for what is none."""
    probes: list[Probe] = []

    def keep(artefacts: Artefacts) -> None:
        probes.extend(item.probe for item in artefacts.of(CommProbe))

    return emit(_worded(diagnose(paths, only="comm", inspect=keep)), probes, output, png)


def emit(report: Report, probes: list[Probe], output: Output, png: str | None) -> int:
    """The tables of `probes` above the report; with --json the measurements as further keys beside the report's."""
    from diag.probes.comm import picture

    if output.to_terminal():
        from diag.probes.comm.table import text

        for probe in probes:
            sys.stdout.write(text(probe, width()) + picture.terminal(probe, width()))
    if png is not None and probes:
        picture.png(probes[0], Path(png))
    return output.emit(report, page=lambda found: picture.page(found, probes), more=measurements(probes))


def measurements(probes: list[Probe]) -> dict[str, Any]:
    """What `--json` has beside the report: of the first probe, links, rows, extras, and what a plan can use."""
    if not probes:
        return {}
    probe = msgspec.to_builtins(probes[0])
    keys = ("links", "rows", "extras", "rates", "rounds", "ranks_per_node", "hosts", "backend", "world")
    return {"links": []} | {key: probe[key] for key in keys if key in probe}


def save(probe: Probe, target: str, *, force: bool) -> None:
    """Write probe.json. Raises UsageError when it exists or cannot be written."""
    path = Path(target)
    if path.exists() and not force:
        raise UsageError(f"--save {target}: exists; choose another name, or overwrite it with --force")
    try:
        write_whole(path, encode(probe))
    except OSError as error:
        raise UsageError(f"--save {target}: {error.strerror or error}") from None


def _worded(report: Report) -> Report:
    if report.verdict == "healthy":
        found = next((f.summary for f in report.findings if f.cause == "link_measured"), "")
        report.headline = f"Every result was right, and nothing stands out: {found}."
    return report
