"""The diagnosis library: discover -> read -> detect -> correlate -> report. Imports neither torch nor pdtrain.

    from diag.diagnose import diagnose
    report = diagnose(["runs/last"])
    print(report.verdict, report.headline)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diag.errors import ArtefactError, MissingExtra, PdtrainError, UsageError
    from diag.schema import Evidence, Finding, Input, Report, Where, to_json

__all__ = ["ArtefactError", "Evidence", "Finding", "Input", "MissingExtra", "PdtrainError", "Report", "UsageError",
           "Where", "to_json"]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: `import diag` stays as light as the command line needs it."""
    if name not in __all__:
        raise AttributeError(f"module 'diag' has no attribute {name!r}")
    import importlib

    home = "diag.errors" if name.endswith(("Error", "Extra")) else "diag.schema"
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
