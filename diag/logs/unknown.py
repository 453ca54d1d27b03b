"""When nothing known explains the end of a log: the most suspicious lines, said to be just that."""

from __future__ import annotations

import re

from diag.artefacts.log_facts import Log, Sample
from diag.artefacts.traceback import exception_line
from diag.logs.endings import finished_at
from diag.logs.view import View, evidence
from diag.schema import Evidence, Finding, Where

#: Words with which programs say that they failed, unlike words that merely occur in notices.
_STRONG = re.compile(r"\b(?:ERROR|FATAL|CRITICAL|PANIC)\b|\b[A-Za-z]*(?:Error|Exception)\b:|\berror:|fatal:"
                     r"|failed with|exit(?:ed)? (?:with )?(?:code|status)[ :=]+(?!0\b)-?\d|aborted|core dumped"
                     r"|unhandled exception|unrecoverable|giving up|job failed|FAILED\b", re.I)
_WEAK_LEVEL = re.compile(r"\b(?:WARN(?:ING)?|INFO|DEBUG)\b|\bwarning:", re.I)
#: Lines this near to the end of the log speak of its end.
NEAR_END = 40
SHOWN = 8


def unexplained(view: View) -> list[Finding]:
    """One finding with the lines to look at, if the logs look like the end of something; else nothing."""
    if finished_at(view) is not None:
        return []
    shown: list[tuple[float, Evidence]] = []
    strong = False
    complaints = [i for i in view.items if i.rule.role == "victim" and not i.event.quoted
                  and i.rule.severity in ("error", "fatal") and not _trained_after(view, i.place.log, i.line)]
    for index, log in enumerate(view.logs):
        for sample in suspicious(view, index, log):
            if _trained_after(view, index, sample.line):
                continue
            certain = bool(_STRONG.search(sample.text)) and not _WEAK_LEVEL.search(sample.text[:120])
            near = (log.lines or sample.line) - sample.line < NEAR_END
            strong |= certain and near
            score = 2.0 * certain + near + 1.0 / sample.count + (exception_line(sample.text.strip()) is not None)
            shown.append((score, evidence(log, sample.line, sample.offset, sample.text, sample.speaker.time,
                                          sample.speaker.rank)))
    if not strong and not complaints:
        return []
    best = sorted(shown, key=lambda entry: -entry[0])[: SHOWN - 2 * bool(complaints)]
    lines = [e for _, e in sorted(best, key=lambda entry: (entry[1].path, entry[1].line or 0))]
    lines += [i.evidence() for i in complaints[:2] if all((e.path, e.line) != (i.log.path, i.line) for e in lines)]
    what = "Only ranks that suffer from it speak" if complaints and not strong else "Nothing known explains it"
    last = lines[-1].text if lines else ""
    return [Finding(cause="unexplained_end", severity="error", confidence=0.3, where=Where(),
                    summary=f"The run ended in an error. {what}; the most suspicious line: {last[:160]}",
                    evidence=lines)]


def suspicious(view: View, index: int, log: Log) -> list[Sample]:
    """Rare error-shaped lines near the end of a log, without those known to mean nothing."""
    noise = {i.line for i in view.items if i.place.log == index and i.rule.role == "noise"}
    return [s for s in log.rare if s.line not in noise]


def _trained_after(view: View, log: int, line: int) -> bool:
    return len({p.step for number, p in view.progress if number == log and p.line > line}) > 1
