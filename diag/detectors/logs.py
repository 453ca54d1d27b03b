"""What console logs say about the end of a run: every kind of failure that lines can show, before correlation."""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts, Unreadable
from diag.artefacts.log_facts import Log
from diag.detectors import NotChecked, detector
from diag.logs.assemble import findings_of
from diag.logs.health import no_health
from diag.logs.view import view_of
from diag.schema import SEVERITY_ORDER, Finding


@detector("logs", needs=Log, subject="logs")
def log_failures(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Signatures, exceptions, timeouts, missing ranks, printed numbers, silence and the way the run ended.

    Sees what lines say; does not see the state of ranks that printed nothing, or causes without any wording.
    """
    view = view_of(artefacts)
    found = findings_of(view)
    yield from found
    if all(isinstance(item, (Log, Unreadable)) for item in artefacts.items) and not \
            any(SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["warning"] or f.cause == "healthy" for f in found):
        doubt = no_health(view)
        if doubt is not None:
            yield doubt
