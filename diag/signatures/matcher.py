"""Finding the lines that signatures match: hyperscan where it is installed, `re` elsewhere, with the same results.

Either engine only proposes places; `verify` decides on the single line, so both agree by construction. A proposal is
(offset just past the hit, index of the rule).
"""

from __future__ import annotations

import re
from typing import Protocol

from diag.signatures.schema import Rule


class Matcher(Protocol):
    """Proposes the places in a block of text that some rule may match."""

    def propose(self, block: bytes) -> list[tuple[int, int]]: ...


class HyperscanMatcher:
    """All rules in one automaton. A database is compiled once and then read from the cache."""

    def __init__(self, rules: list[Rule], serialised: bytes | None = None) -> None:
        import hyperscan

        if serialised is not None:
            self.database = hyperscan.loadb(serialised, hyperscan.HS_MODE_BLOCK)
            self.database.scratch = hyperscan.Scratch(self.database)
        else:
            # PREFILTER lets rules use look-arounds: the automaton then matches a superset, and `verify` the rest.
            flags = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER | hyperscan.HS_FLAG_ALLOWEMPTY
            expressions = [_plain(rule.pattern).encode() for rule in rules]
            self.database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
            self.database.compile(expressions=expressions, ids=list(range(len(rules))), elements=len(rules),
                                  flags=[flags] * len(rules))

    def serialise(self) -> bytes:
        import hyperscan

        return bytes(hyperscan.dumpb(self.database))

    def propose(self, block: bytes) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []
        keep = hits.append

        def found(rule: int, _start: int, end: int, _flags: int, _context: object) -> None:
            keep((end, rule))

        self.database.scan(block, match_event_handler=found)
        hits.sort()
        return hits


class ReMatcher:
    """The same with the standard library: a literal search per rule, then the expression on the lines hit."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self.needles = [[text.encode() for text in rule.literals] for rule in rules]

    def propose(self, block: bytes) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []
        for index, needles in enumerate(self.needles):
            if needles:
                hits.extend((end, index) for needle in needles for end in _ends(block, needle))
            else:
                pattern = re.compile(self.rules[index].pattern.encode(), re.MULTILINE)
                hits.extend((found.end(), index) for found in pattern.finditer(block))
        hits.sort()
        return hits


def _ends(block: bytes, needle: bytes) -> list[int]:
    """Just past each occurrence of `needle`, once per line."""
    ends = []
    at = block.find(needle)
    while at >= 0:
        ends.append(at + len(needle))
        line_end = block.find(b"\n", at)
        cr = block.find(b"\r", at, line_end if line_end >= 0 else len(block))
        stop = cr if cr >= 0 else line_end
        if stop < 0:
            break
        at = block.find(needle, stop)
    return ends


def _plain(pattern: str) -> str:
    """`pattern` in the dialect of hyperscan: groups without names."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)
