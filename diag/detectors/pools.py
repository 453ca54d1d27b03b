"""Phase separation: pools out of balance, late weights or gradients, a slow exchange, and what was wrong with it.

Sees: what every rank of a separated run records (`diag.artefacts.pool_records`): how long it was busy and waited, what
crossed each link, versions, damage, peers that went away. Cannot see: why a rank is slow, or a link; ranks that left no
events. A run without pools has nothing to be judged here, and nothing is said. Thresholds: `diag.pools`.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_environment import RunEnvironment
from diag.artefacts.run_events import EventLog
from diag.detectors import NotChecked, detector
from diag.detectors.step_stragglers import waiting_modules
from diag.pools.against import against, verdict_finding
from diag.pools.balance import balance
from diag.pools.exchange import communication, queues
from diag.pools.gather import COMPUTE, LEAST_STEPS, NOUN, UPDATE, Job, separated
from diag.pools.members import lost, restarted, slow_compute, slow_update
from diag.pools.tables import side_by_side
from diag.pools.versions import corrupt, delivered, mismatched, stale
from diag.schema import Finding, Where


@detector("pools", needs=EventLog, wants=(RunConfig, RunEnvironment, MetricsLog),
          subject="events of the ranks (events/rank_R.jsonl)")
def pools(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """For each separated run: at most one finding of each cause, and both pools side by side."""
    for job in separated(artefacts):
        if not job.members:
            yield NotChecked(f"{job.directory} is separated (pools.mode = \"{job.mode}\"), but its ranks recorded no "
                             "pool events")
            continue
        found = [*lost(job), *restarted(job), *corrupt(job), *mismatched(job), *stale(job), *delivered(job)]
        missing = [role for role in (COMPUTE, UPDATE) if not job.measured(role)]
        if missing:
            yield _unmeasured(job, missing)
        else:
            waiting = waiting_modules(job.pool(COMPUTE)[0].log, artefacts)
            found += [*communication(job), *balance(job, slow_compute(job, waiting), slow_update(job)), *queues(job)]
        if job.bound is None:
            yield NotChecked(f"staleness: {job.directory} does not say how old its weights may be")
        yield from found
        if not found and not missing:
            yield Finding(cause="healthy", role="context", severity="info", confidence=0.9, where=Where(module="pools"),
                          summary="The pools are balanced, the exchange takes little of a step, and every message was "
                                  "whole and of the right version.")
        yield side_by_side(job)
        yield from map(verdict_finding, against(job, artefacts)[:4])


def _unmeasured(job: Job, missing: list[str]) -> NotChecked:
    seen = {role: max((m.steps for m in job.pool(role)), default=0) for role in missing}
    words = []
    for role, steps in seen.items():
        if not job.pool(role):
            words.append(f"no {NOUN[role]} rank left pool records")
        else:
            words.append(f"{steps} measured steps of the {NOUN[role]} pool, {LEAST_STEPS} are needed")
    return NotChecked(f"balance and exchange of {job.directory}: {'; '.join(words)}")
