"""Literals that every match of a regular expression must contain: the prefilter of the `re` scanner."""

from __future__ import annotations

import re
from typing import Any

#: More alternatives than this are not worth searching one by one.
MAX_ALTERNATIVES = 24
#: Shorter literals hit everywhere.
MIN_LENGTH = 4


def required_literals(pattern: str) -> list[str]:
    """A set of literals one of which occurs in every match of `pattern`; [] when no useful set exists.

    >>> required_literals(r'error (?:12|13)\\b.*vendor err 129')
    ['vendor err 129']
    """
    import re._parser as parser  # type: ignore[import-not-found]

    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError):
        return []
    if parsed.state.flags & re.IGNORECASE:
        return []
    best = _best(list(parsed))
    return best if best and min(map(len, best)) >= MIN_LENGTH else []


def _best(items: list[Any]) -> list[str]:
    """The most selective of the candidate sets of a sequence: the one whose shortest member is longest."""
    candidates: list[list[str]] = []
    run = ""
    for op, value in [*items, (None, None)]:
        name = str(op)
        if name == "LITERAL":
            run += chr(value)
            continue
        if run:
            candidates.append([run])
        run = ""
        if name == "SUBPATTERN":
            candidates.append(_best(list(value[3])) if not value[1] & re.IGNORECASE else [])
        elif name == "BRANCH":
            branches = [_best(list(branch)) for branch in value[1]]
            merged = [text for branch in branches for text in branch]
            if all(branches) and len(merged) <= MAX_ALTERNATIVES:
                candidates.append(merged)
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            candidates.append(_best(list(value[2])))
    return max((c for c in candidates if c), key=lambda c: (min(map(len, c)), -len(c)), default=[])
