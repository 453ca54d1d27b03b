"""Whole post-mortems of labelled near-real logs: the cause, and who is guilty where the log can show it.

Beside the plain text each log is read again as other systems would have stored it: the verdict must not change.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from diag.artefacts import Artefacts, memory_source
from diag.artefacts import log as log_reader
from diag.correlate import correlate
from diag.detectors import detectors
from diag.schema import SEVERITY_ORDER, Finding
from tests.diag.incident_files import Incident, incidents

ALL = incidents()


def findings(text: str, name: str = "run.log") -> list[Finding]:
    """The correlated findings of one log."""
    artefacts = Artefacts([log_reader.read(memory_source(text.encode(), name))])
    found = [f for d in detectors("logs") for f in d.run(artefacts) if isinstance(f, Finding)]
    return correlate(found, artefacts)


def check(incident: Incident, text: str) -> None:
    """Assert the incident's label on `text`."""
    found = findings(text)
    root = next((f for f in found if f.role == "root"), None)
    if incident.causes == ["healthy"]:
        assert [f.summary for f in found if SEVERITY_ORDER[f.severity] > 0] == []
        return
    assert root is not None and root.cause in incident.causes, root
    if incident.ranks is not None:
        assert root.where.ranks == incident.ranks
    if incident.hosts is not None:
        assert root.where.hosts == incident.hosts
    assert all(1 <= e.line <= text.count("\n") for e in root.evidence if e.line is not None)


@pytest.mark.parametrize("incident", ALL, ids=lambda i: i.name)
def test_the_labelled_root_is_found(incident):
    check(incident, incident.text)


def _stamped(lines: list[str]) -> list[str]:
    start = datetime(2024, 5, 1, 10)
    return [f"{(start + timedelta(seconds=n)).isoformat()}Z {line}" for n, line in enumerate(lines)]


DRESSES = {
    "stamped": _stamped,
    "windows": lambda lines: [line + "\r" for line in lines],
    "coloured": lambda lines: [f"\x1b[33m{line}\x1b[0m" for line in lines],
    "compose": lambda lines: [f"trainer_1  | {line}" for line in lines],
    "quoted": lambda lines: [f"> {line}" for line in lines],
    "shell": lambda lines: ["$ sbatch run.slurm", "Submitted batch job 4711", *lines, "", "[user@login ~]$ "],
    "ray": lambda lines: [f"(TrainWorker pid=4242) {line}" for line in lines],
}
#: Silence is judged by time: a log stamped anew, line by line, tells another story.
TIMED = {"endings/silent-pulse", "endings/silent-ctrl-c", "kinds/late-but-another-day"}
#: Their hosts stand only in pdsh's prefix, which is recognised at the front of lines.
PREFIXED = {"second/optim-missing-node2", "eighth/compiler-is-missing-on-one-host"}


@pytest.mark.parametrize("dress", DRESSES)
def test_the_verdict_does_not_depend_on_how_lines_are_dressed(dress):
    wrong = []
    for incident in ALL:
        if incident.name in PREFIXED or (dress == "stamped" and incident.name in TIMED):
            continue
        text = "\n".join(DRESSES[dress](incident.text.rstrip("\n").split("\n"))) + "\n"
        try:
            check(incident, text)
        except AssertionError as error:
            wrong.append((incident.name, str(error)[:200]))
    assert wrong == []


def test_the_confidence_of_a_root_is_honest():
    """In each bucket of confidence the share that is right is not far below what was claimed."""
    buckets: dict[int, list[tuple[float, bool]]] = {}
    for incident in ALL:
        root = next((f for f in findings(incident.text) if f.role == "root"), None)
        if root is not None:
            buckets.setdefault(min(int(root.confidence * 5), 4), []).append(
                (root.confidence, root.cause in incident.causes))
    for pairs in buckets.values():
        claimed = sum(c for c, _ in pairs) / len(pairs)
        assert sum(r for _, r in pairs) / len(pairs) >= claimed - 0.1
