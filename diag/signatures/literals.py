"""Literals that every match of a regular expression must contain: what the automaton searches for."""

from __future__ import annotations

import re
from typing import Any

#: More alternatives than this are not worth searching one by one.
MAX_ALTERNATIVES = 60
#: Shorter literals hit everywhere.
MIN_LENGTH = 3


def required_literals(pattern: str) -> tuple[list[str], bool]:
    """A set of literals one of which occurs in every match of `pattern`, and whether case is to be ignored.

    The set is empty when no useful one exists.

    >>> required_literals(r'error (?:12|13)\\b.*vendor err 129')
    (['vendor err 129'], False)
    """
    import re._parser as parser  # type: ignore[import-not-found]

    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError):
        return [], False
    caseless = bool(parsed.state.flags & re.IGNORECASE)
    best = _best(list(parsed))
    if not best or min(map(len, best)) < MIN_LENGTH:
        return [], caseless
    return sorted({text.lower() if caseless else text for text in best}), caseless


def _best(items: list[Any]) -> list[str]:
    """The most selective of the candidate sets of a sequence: the one whose shortest member is longest."""
    candidates: list[list[str]] = []
    for texts in _runs(items):
        candidates.append(texts)
    for op, value in items:
        name = str(op)
        if name == "SUBPATTERN":
            if not value[1] & re.IGNORECASE:
                candidates.append(_best(list(value[3])))
        elif name == "BRANCH":
            candidates.append(_branch(value[1]))
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            candidates.append(_best(list(value[2])))
    return max((c for c in candidates if c), key=lambda c: (min(min(map(len, c)), 12), -len(c)), default=[])


def _branch(branches: list[Any]) -> list[str]:
    """One literal set for an alternation: every branch must contribute."""
    sets = [_best(list(branch)) for branch in branches]
    merged = [text for texts in sets for text in texts]
    return merged if all(sets) and len(merged) <= MAX_ALTERNATIVES else []


def _runs(items: list[Any]) -> list[list[str]]:
    """The plain runs of characters of a sequence; a character class of two spells both ("[Kk]illed")."""
    found: list[list[str]] = []
    run = [""]
    for op, value in [*items, (None, None)]:
        name = str(op)
        if name == "LITERAL":
            run = [text + chr(value) for text in run]
        elif name == "IN" and len(run) <= 4 and len(value) == 2 and all(str(o) == "LITERAL" for o, _ in value):
            run = [text + chr(code) for text in run for _, code in value]
        else:
            if run[0]:
                found.append(run)
            run = [""]
    return found
