"""A learning rate that is 0 and stays so: the run costs money and learns nothing.

Sees: the column `lr` of any run that `diag.series` reads and that prints it in full (metrics files, HF Trainer,
Megatron): 0 from the first record on, or 0 since long after a schedule that ran out. Typical origins: fp16 overflow
skips every step, so that the scheduler never moves (HF says "tried to get lr value before scheduler/optimizer started
stepping, returning lr=0"); a warm-up counted in another unit; a schedule that is shorter than the run. Cannot see:
rates printed with few decimals, where 0.000 may be 3e-4; a single frozen parameter group.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import HasSeries
from diag.detectors import NotChecked, detector
from diag.schema import Finding, Where
from diag.series import Run, runs

#: Records with a rate of 0 from the start; a warm-up may print one or a few.
FROM_START = 10
#: After a rate above 0: records, and share of all records, at the end of the run. A schedule's last step is no finding.
RAN_OUT, RAN_OUT_SHARE = 20, 0.1
#: Loops whose consoles print the rate with all its digits.
EXACT_STYLES = {"hf", "megatron"}


@detector("loss", needs=HasSeries, subject="learning rates")
def learning_rate_zero(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """At most one finding per run."""
    told = False
    for run in runs(artefacts):
        if "lr" not in run.columns or (run.format == "log" and run.style not in EXACT_STYLES):
            continue
        told = True
        finding = _judge(run)
        if finding is not None:
            yield finding
    if not told:
        yield NotChecked("learning rate: not recorded, or printed with too few digits")


def _judge(run: Run) -> Finding | None:
    column = run.columns["lr"].finite()
    if any((other.values > 0).any() for name, other in run.columns.items() if name.startswith("lr") and name != "lr"):
        return None  # one group is frozen, others learn
    above = (column.values != 0).nonzero()[0]
    first = int(above[-1]) + 1 if len(above) else 0
    count = len(column) - first
    if count < (RAN_OUT if first else FROM_START) or (first and count < RAN_OUT_SHARE * len(column)):
        return None
    step = run.step(column, first)
    if first:
        what = f"The learning rate is 0 since {f'step {step:,}' if step is not None else f'{count} records'}: the " \
               "schedule is over and the run is not, nothing more is learnt."
    else:
        what = f"The learning rate is 0 in all {count} records: no step changes the weights."
    return Finding(cause="learning_rate_zero", severity="error", confidence=0.85, summary=what, where=Where(step=step),
                   evidence=[run.evidence(column, first, "loss"), run.evidence(column, len(column) - 1, "loss")],
                   numbers={"records": count, "from_start": first == 0})
