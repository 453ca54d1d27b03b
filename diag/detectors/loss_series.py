"""Loss and gradient norm over the steps of a run: NaN, spikes, divergence, jumps at a resume, fp16, plateau, swings.

Sees: excursions above a robust local course of the log loss, their kind, and whether the gradient norm rose first
(`diag.loss`, docs/loss.md). Cannot see: anything slower than the logging interval, or why a batch was bad. Console logs
among other logs are judged with them (`diag.logs.numerics` calls the same analysis), so that one fault is one finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.log_facts import Log
from diag.artefacts.metric_table import HasSeries
from diag.detectors import NotChecked, detector
from diag.schema import Finding, Where


@detector("loss", needs=HasSeries, subject="metrics or progress lines")
def loss_series(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """The findings of every run; one line about each that is well."""
    from diag.loss.findings import findings_of
    from diag.loss.words import well_of
    from diag.series import runs

    judged = False
    for run in runs(artefacts):
        if all(isinstance(item, Log) and item.table is None for item in run.artefacts):
            judged = True  # by the detector of logs
            continue
        losses = run.losses()
        points = sum(len(column) for column in losses)
        if not losses and run.get("grad_norm") is None:
            continue
        judged = True
        found = findings_of(run)
        yield from found
        if points and not any(f.severity != "info" for f in found):
            yield Finding(cause="healthy", role="context", severity="info", confidence=0.9, where=Where(),
                          summary=well_of(run, losses[0]), numbers={"points": points, "run": run.label})
    if not judged:
        yield NotChecked("no column that looks like a loss; name it with --column loss=<its name>")
