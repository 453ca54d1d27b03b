"""One watch: files in, alarms out, a tick at a time. No clock of its own: the caller says what time it is.

Cost. A tick without news is a `stat` per file. With news the whole pipeline runs on what there is (`diagnose` without
the reading), but only so often that it takes a few per cent of a core. What must be known at once does not wait for
that: a loss that is not finite, an exception, the end of a rank.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable

import numpy as np

from diag.artefacts import Artefacts, ReadOptions
from diag.artefacts.log_facts import Log
from diag.correlate import correlate
from diag.detectors import detectors
from diag.diagnose import build_report, detect
from diag.logs.endings import finished_at
from diag.logs.view import view_of
from diag.schema import Evidence, Finding, Where
from diag.series import Run, runs
from diag.starts import last_starts
from diag.steps.ranks import Job
from diag.watch.alarms import Alarms, Change
from diag.watch.follow import Follower
from diag.watch.formats import EventsTail
from diag.watch.online import OnlineDetector
from diag.watch.pulse import Pulse
from diag.watch.ranks import recent_jobs, slow_now

log = logging.getLogger(__name__)

#: Judging may take this share of a core, but news wait at most `LONGEST` seconds, or four times what judging takes.
JUDGE_SHARE, LONGEST = 0.05, 5.0
#: What cannot wait may take this share.
URGENT_SHARE = 0.25
#: Verdicts on how a run ended, which nobody asks of one that goes on.
OF_THE_END = frozenset({"unexplained_end", "hang_silent", "teardown_hang", "input_unreadable", "healthy"})
#: A log that says that training is done is believed when nothing came for so long.
QUIET_SECONDS = 10.0
#: NaN is over when so many finite losses have followed it.
FINITE_POINTS = 100


class Watch:
    """A run, or several logs of one, while it goes. Call `tick` now and then; look at the attributes to show them."""

    def __init__(self, paths: Iterable[str], *, options: ReadOptions | None = None, wait: bool = False,
                 silence_seconds: float | None = None,
                 stopwatch: Callable[[], float] = time.perf_counter) -> None:
        self.options = options or ReadOptions()
        self.follower = Follower(paths, options=self.options, wait=wait, stopwatch=stopwatch)
        self.stopwatch = stopwatch
        self.alarms = Alarms()
        self.pulse = Pulse(silence_seconds)
        self.findings: list[Finding] = []
        self.run: Run | None = None
        self.artefacts = Artefacts()
        self.jobs: list[Job] = []
        self.finished = False
        self.grown = False
        """Whether the last tick found anything new."""
        self.judgements = 0
        self.problem: str | None = None
        """A bug of ours, in words."""
        self._online: dict[str, OnlineDetector] = {}
        self._nan: dict[str, int | None] = {}  # path -> step of a loss that is not finite, while it is the last one
        self._dirty = self._urgent = False
        self._due = self._due_urgent = self._due_ranks = float("-inf")
        self._slow: list[Finding] = []
        self._settled = 0

    # -- a tick ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Change]:
        """Read what is new, judge it if it is time to, and return the alarms that were raised or cleared."""
        growth = self.follower.poll(now)
        self.grown = growth.changed
        self._dirty |= growth.changed
        self._urgent |= growth.urgent
        for path, point in growth.news:
            self._urgent |= self._surprising(path, point.step, point.loss, point.grad_norm)
        if growth.news:
            self.pulse.beat(now, self._moment(now), [point for _, point in growth.news])
        if not self.follower.behind:
            self.pulse.live = True
        self._settled = 0 if growth.changed else self._settled + 1
        quiet = now - self.pulse.changed(growth.changed, now) >= QUIET_SECONDS
        if growth.changed and self.judgements and now >= self._due_ranks:
            self._urgent |= self._compare(now)
        judged = False
        if self._dirty and not self.follower.behind and now >= (self._due_urgent if self._urgent else self._due):
            self._judge(now)
            judged = True
        elif quiet and not self.finished and not self._dirty:
            self.finished = self._says_done()
        found = [*self.findings]
        silent = None if self.finished or self.follower.behind else self.pulse.silence(now, self._events())
        if silent is not None:
            found.append(build_report([silent], inputs=[]).findings[0])
        return self.alarms.update(found, now, judged=judged, since=self._points_since)

    @property
    def ended(self) -> str | None:
        """"finished" when the run has said so and everything is read and judged, "gone" when its files are; or None."""
        if self.follower.gone and self._settled > 2:
            return "gone"
        return "finished" if self.finished and not self._dirty and self._settled >= 2 else None

    @property
    def reading(self) -> bool:
        """Whether what was there before is still being read."""
        return self.follower.behind > 0

    def exit_status(self) -> int:
        """1 while an alarm stands, else 0."""
        return int(bool(self.alarms.active))

    # -- what cannot wait ------------------------------------------------------------------------------------------

    def _surprising(self, path: str, step: int | None, loss: float | None, norm: float | None) -> bool:
        """Whether a new point should be judged at once: it is the first that is not finite, or jumps."""
        if loss is None:
            return False
        online = self._online.setdefault(path, OnlineDetector())
        onset = not online.rejected
        (verdict,) = online.feed([(loss, norm)])
        if loss != loss or abs(loss) == float("inf"):
            new = path not in self._nan
            self._nan.setdefault(path, step)
            return new
        self._nan.pop(path, None)
        return verdict is not None and onset

    def _not_finite(self) -> list[Finding]:
        """A loss that is NaN at this moment, in case the curve as a whole is not yet called that."""
        found = []
        for path, step in self._nan.items():
            at = f" at step {step}" if step is not None else ""
            found.append(Finding(cause="loss_nan", severity="error", confidence=0.8, where=Where(step=step),
                                 summary=f"The loss is not finite{at}.",
                                 evidence=[Evidence(path=path, text="the last loss written is NaN or infinite")]))
        return found

    # -- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        began = self.stopwatch()
        self._dirty = self._urgent = False
        try:
            self._diagnose()
            self.problem = None
        except Exception as error:  # the watch must outlive a bug of one of its parts
            if os.environ.get("PDTRAIN_STRICT"):
                raise
            log.info("judging failed", exc_info=error)
            self.problem = f"pdtrain's own error while judging ({type(error).__name__}); please report this"
        cost = self.stopwatch() - began
        self.judgements += 1
        self._due = now + min(cost / JUDGE_SHARE, max(LONGEST, 4 * cost))
        self._due_urgent = now + cost / URGENT_SHARE

    def _diagnose(self) -> None:
        items, _ = last_starts(self.follower.artefacts())
        self.artefacts = Artefacts(items)
        self.artefacts.columns = self.options.columns
        found = runs(self.artefacts)
        self.run = found[0] if found else None
        self.finished = self._ranks_ended()
        findings, _, _ = detect(self.artefacts, detectors())
        self._compare(None)
        causes = {finding.cause for finding in self._slow}
        findings = [*self._slow, *(f for f in findings if f.cause not in causes and self._current(f))]
        if not any(f.cause == "loss_nan" for f in findings):
            findings += self._not_finite()
        self.findings = build_report(correlate(findings, self.artefacts), inputs=[]).findings
        self.pulse.learn(self.run)

    def _compare(self, now: float | None) -> bool:
        """Compare the ranks over their latest steps; whether others are slow than before. Cheap, unlike judging."""
        began = self.stopwatch()
        before = [(finding.cause, finding.where.ranks) for finding in self._slow]
        self.jobs = recent_jobs(self.follower.tails.values(), self.artefacts)
        self._slow = slow_now(self.jobs, self.artefacts)
        if now is not None:
            self._due_ranks = now + (self.stopwatch() - began) / JUDGE_SHARE
        return before != [(finding.cause, finding.where.ranks) for finding in self._slow]

    def _current(self, finding: Finding) -> bool:
        """Whether a finding about everything so far still says something about now."""
        if finding.cause in OF_THE_END:
            return False
        if finding.cause == "loss_nan" and self.run is not None and self.run.losses():
            latest = self.run.losses()[0].values[-FINITE_POINTS:]
            return len(latest) < FINITE_POINTS or not bool(np.isfinite(latest).all())
        return True

    def _points_since(self, step: int) -> int | None:
        if self.run is None or not self.run.losses():
            return None
        steps = self.run.losses()[0].steps
        return int(len(steps) - np.searchsorted(steps, step, side="right"))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _events(self) -> list[EventsTail]:
        return [tail for tail in self.follower.tails.values() if isinstance(tail, EventsTail)]

    def _ranks_ended(self) -> bool:
        """Whether every rank of the last start has said "finished" or "end"."""
        names = [[event.name for event in item.events] for item in self.artefacts.items
                 if item.format == "run-events" and hasattr(item, "events")]
        over = bool(names) and all("end" in said or "finished" in said for said in names)
        return over and not any("regrouping" in said for said in names)  # the launcher starts all ranks again

    def _says_done(self) -> bool:
        """Whether console logs without events say that training is done."""
        if self._events() or not self.artefacts.of(Log):
            return False
        return finished_at(view_of(self.artefacts)) is not None

    def _moment(self, now: float) -> float:
        """When what is read was written: now, or for what was there before, when its files were last written."""
        if self.pulse.live:
            return now
        return min(now, max((tail.seen[1] / 1e9 for tail in self.follower.tails.values()), default=now))
