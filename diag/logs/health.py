"""When silence is not health: nothing was understood, or the last lines speak of trouble that no rule explains."""

from __future__ import annotations

import re

from diag.artefacts.log_facts import Sample
from diag.logs.endings import exits
from diag.logs.view import View, evidence
from diag.schema import Finding, Where

#: Among so many last lines a warning of the communication library forbids "healthy".
LAST_LINES = 12
_TRAILING = re.compile(r"NCCL (?:WARN|ERROR)|return ?code[ =:]+(?!0\b)-?\d|exited with code (?!0\b)-?\d"
                       r"|exit(?:ed)? (?:with )?(?:code|status)[ :=]+(?!0\b)-?\d")
#: Marks of a regular end beside those of the training loop itself.
_ENDS = ("done-training", "planned-exit", "save-done", "agent-success")


def no_health(view: View) -> Finding | None:
    """Why a log without findings is still no healthy one; None when progress, or a regular end, was understood."""
    last = trailing(view)
    if last is not None:
        index, sample = last
        return _unknown(f"The log ends in trouble that nothing here explains: {sample.text.strip()[:160]}", view, index,
                        sample)
    if view.progress or view.of(*_ENDS):
        return None
    if any(item.code not in (0, -15) for item in exits(view)):
        return _unknown("A process ended with an error, and nothing here says why")
    return _unknown("No progress lines understood: nothing wrong was found, and nothing shows that training ran")


def trailing(view: View) -> tuple[int, Sample] | None:
    """A last line that speaks of trouble, with the number of its log; progress below it shows that it was harmless."""
    last: dict[int, int] = {}  # log -> its last line of progress
    for number, item in view.progress:
        last[number] = max(last.get(number, 0), item.line)
    for index, log in enumerate(view.logs):
        trained = last.get(index, 0)
        for sample in log.tail[-LAST_LINES:]:
            if sample.line > trained and _TRAILING.search(sample.text):
                return index, sample
    return None


def _unknown(summary: str, view: View | None = None, index: int = 0, sample: Sample | None = None) -> Finding:
    proof = []
    if view is not None and sample is not None:
        proof = [evidence(view.logs[index], sample.line, sample.offset, sample.text, sample.speaker.time,
                          sample.speaker.rank)]
    return Finding(cause="unexplained_end", role="context", severity="info", confidence=0.3, where=Where(),
                   summary=summary, evidence=proof)
