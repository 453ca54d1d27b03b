"""Loss and gradient norm over the steps of a run: NaN, spikes, divergence, jumps at a resume, fp16, plateau, swings.

Sees: excursions above a robust local course of the log loss, their kind, and whether the gradient norm rose first
(`diag.loss`, docs/loss.md). Cannot see: anything slower than the logging interval, or why a batch was bad. Console logs
among other logs are judged with them (`diag.logs.numerics` calls the same analysis), so that one fault is one finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefact, Artefacts, Unreadable
from diag.artefacts.log_facts import Log
from diag.artefacts.metric_table import HasSeries, MetricTable
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_events import EventLog
from diag.detectors import NotChecked, detector
from diag.schema import Finding, Where

#: With fewer points nothing can be said but what a NaN says.
LEAST_POINTS = 4


@detector("loss", needs=HasSeries, wants=(RunConfig, EventLog), subject="metrics or progress lines")
def loss_series(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """The findings of every run; one line about each that is well."""
    from diag.loss.batches import know_batches
    from diag.loss.findings import findings_of
    from diag.loss.words import well_of
    from diag.series import runs

    judged = False
    few: list[str] = []
    for run in runs(artefacts):
        if all(isinstance(item, Log) and item.table is None for item in run.artefacts):
            judged = True  # by the detector of logs
            continue
        losses = run.losses()
        points = sum(len(column) for column in losses)
        if not losses and run.get("grad_norm") is None:
            continue
        know_batches(run, artefacts)
        found = findings_of(run)
        if not found and points < LEAST_POINTS:
            few.append(f"{run.label} has {points} loss point{'s' if points != 1 else ''}")
            continue
        judged = True
        yield from found
        if points and not any(f.severity != "info" for f in found):
            yield Finding(cause="healthy", role="context", severity="info", confidence=0.9, where=Where(),
                          summary=well_of(run, losses[0]), numbers={"points": points, "run": run.label})
    if judged:
        return
    reason = f"too few points to judge: {'; '.join(few[:3])}" if few else \
        "no column that looks like a loss; name it with --column loss=<its name>"
    if all(_only_numbers(item) for item in artefacts.items):
        yield Finding(cause="unexplained_end", role="context", severity="info", confidence=0.3, where=Where(),
                      summary=reason[0].upper() + reason[1:])  # nothing else was given that could be judged
    else:
        yield NotChecked(reason)


def _only_numbers(item: Artefact) -> bool:
    """Whether nothing but the numbers of a run can be learnt from `item`."""
    if isinstance(item, MetricsLog):
        return not item.routers
    return isinstance(item, (MetricTable, Unreadable)) or isinstance(item, Log) and item.table is not None
