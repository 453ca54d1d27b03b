"""The findings of all ranks and artefacts -> roles: one root cause first, what it explains beneath it."""

from __future__ import annotations

from diag.artefacts import Artefacts
from diag.causes import CAUSES, EXPLAINS
from diag.schema import SEVERITY_ORDER, Finding


def correlate(findings: list[Finding], artefacts: Artefacts) -> list[Finding]:
    """`findings` with roles assigned, root first, `explains` filled with indexes into the returned list.

    A finding at warning or above that no other explains, whose cause can lead a report, is a candidate; the most
    severe, most confident one becomes the root. Findings of role "context" and of severity "info" keep their role.
    """
    candidates = [f for f in findings if _can_lead(f)]
    roots = [f for f in candidates if not any(_explains(other, f) for other in candidates if other is not f)]
    roots = roots or candidates
    root = max(roots, key=lambda f: (SEVERITY_ORDER[f.severity], f.confidence), default=None)
    if root is None:
        return findings
    root.role = "root"
    victims = [f for f in candidates if f is not root and _explains(root, f)]
    for finding in victims:
        finding.role = "victim"
    others = [f for f in findings if f is not root and f not in victims]
    ordered = [root, *victims, *others]
    root.explains = list(range(1, 1 + len(victims)))
    return ordered


def _can_lead(finding: Finding) -> bool:
    cause = CAUSES.get(finding.cause)
    leads = cause is None or cause.verdict in ("failed", "degraded")
    return leads and finding.role != "context" and SEVERITY_ORDER[finding.severity] >= SEVERITY_ORDER["warning"]


def _explains(a: Finding, b: Finding) -> bool:
    return any(link.cause == b.cause for link in EXPLAINS.get(a.cause, ()))
