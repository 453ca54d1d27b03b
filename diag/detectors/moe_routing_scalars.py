"""Router health of trainers that log one scalar per expert, or this trainer's TensorBoard files: as `moe_routing`.

Sees: columns per layer and expert of event files, CSV and W&B files (`diag.routing_columns`). Cannot see: shares
without numbers of tokens; balancing losses alone; console logs, which do not print the load of every expert.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import MetricTable
from diag.artefacts.run_config import RunConfig
from diag.detectors import NotChecked, detector
from diag.detectors.moe_routing import routing_findings
from diag.routing_columns import router_logs
from diag.schema import Finding
from diag.series import runs


@detector("router", needs=MetricTable, wants=RunConfig, subject="tables with scalars per expert")
def moe_routing_scalars(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """As `moe_routing`, for each run whose router values are scalars."""
    logs = list(router_logs(runs(artefacts)))
    for log in logs:
        yield from routing_findings(log, artefacts)
    if not logs:
        yield NotChecked("no tokens per expert in the tables")
