"""Finding the lines that signatures match: hyperscan where it is installed, `bytes.find` elsewhere, same results.

Either engine only proposes places where a literal stands that a rule's match must contain; `verify` decides on the
single line, so both agree by construction. (The automaton is built from literals and not from the expressions: with
many expressions together, current hyperscan builds miss matches; `tests/diag/signatures` holds an example.) A
proposal is (offset just past the literal, index of the rule).
"""

from __future__ import annotations

import re
from typing import Protocol

from diag.signatures.schema import Rule


class Matcher(Protocol):
    """Proposes the places in a block of text that some rule may match."""

    def propose(self, block: bytes) -> list[tuple[int, int]]: ...


def _table(rules: list[Rule]) -> tuple[list[tuple[bytes, bool]], list[list[int]], list[int]]:
    """(literal, caseless) in order, the rules behind each, and the rules that have no literal."""
    places: dict[tuple[bytes, bool], list[int]] = {}
    bare: list[int] = []
    for index, rule in enumerate(rules):
        if not rule.literals:
            bare.append(index)
        for text in rule.literals:
            places.setdefault((text.encode(), rule.caseless), []).append(index)
    return list(places), list(places.values()), bare


def _unanchored(block: bytes, patterns: list[tuple[int, re.Pattern[bytes]]]) -> list[tuple[int, int]]:
    """Places of rules without any literal: their expression is searched for over the whole block."""
    return [(found.end(), index) for index, pattern in patterns for found in pattern.finditer(block)]


def _compiled(rules: list[Rule], bare: list[int]) -> list[tuple[int, re.Pattern[bytes]]]:
    return [(index, re.compile(rules[index].pattern.encode(), re.MULTILINE)) for index in bare]


class HyperscanMatcher:
    """All literals in one automaton. A database is compiled once and then read from the cache."""

    def __init__(self, rules: list[Rule], serialised: bytes | None = None) -> None:
        import hyperscan

        literals, self.owners, bare = _table(rules)
        self.bare = _compiled(rules, bare)
        if serialised is not None:
            self.database = hyperscan.loadb(serialised, hyperscan.HS_MODE_BLOCK)
            self.database.scratch = hyperscan.Scratch(self.database)
        else:
            flags = [hyperscan.HS_FLAG_CASELESS if caseless else 0 for _, caseless in literals]
            self.database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
            self.database.compile(expressions=[text for text, _ in literals], ids=list(range(len(literals))),
                                  elements=len(literals), flags=flags, literal=True)

    def serialise(self) -> bytes:
        """The compiled database, for the cache."""
        import hyperscan

        return bytes(hyperscan.dumpb(self.database))

    def propose(self, block: bytes) -> list[tuple[int, int]]:
        """All places in order."""
        raw: list[tuple[int, int]] = []
        keep = raw.append

        def found(literal: int, _start: int, end: int, _flags: int, _context: object) -> None:
            keep((end, literal))

        self.database.scan(block, match_event_handler=found)
        owners = self.owners
        hits = [(end, rule) for end, literal in raw for rule in owners[literal]]
        hits += _unanchored(block, self.bare)
        hits.sort()
        return hits


class ReMatcher:
    """The same with the standard library: one search per literal."""

    def __init__(self, rules: list[Rule]) -> None:
        self.literals, self.owners, bare = _table(rules)
        self.bare = _compiled(rules, bare)

    def propose(self, block: bytes) -> list[tuple[int, int]]:
        """All places in order."""
        lower = block.lower()
        hits: list[tuple[int, int]] = []
        for (text, caseless), owners in zip(self.literals, self.owners, strict=True):
            where = lower if caseless else block
            at = where.find(text)
            while at >= 0:
                end = at + len(text)
                hits.extend((end, rule) for rule in owners)
                at = where.find(text, at + 1)
        hits += _unanchored(block, self.bare)
        hits.sort()
        return hits
