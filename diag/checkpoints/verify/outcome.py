"""Checks and their outcomes. A check passes, fails with problems, or does not apply, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from diag.checkpoints.canonical import Checkpoint, Problem

Status = Literal["PASS", "FAIL", "n/a"]


class NotApplicable(Exception):
    """Raised by a check whose subject is not there; the text says what is absent."""


@dataclass(slots=True)
class Outcome:
    """What one check said. `note` is what was looked at ("1,204 chunks"), or why it does not apply."""

    check: str
    status: Status
    note: str = ""
    problems: list[Problem] = field(default_factory=list)


@dataclass(slots=True)
class Options:
    """What the user asked for. `deep` reads every byte; `against` is a config to hold names and shapes to.

    Without `bytes` no tensor is looked at at all.
    """

    deep: bool = False
    against: str | None = None
    threads: int = 2
    finite: bool = True
    seed: int = 0
    bytes: bool = True


@dataclass(slots=True)
class Check:
    """`run(checkpoint, options)` yields problems and returns the note; readers' problems of the same name join it.

    `reads`: whether it looks at the bytes of tensors or whole files.
    """

    name: str
    run: Callable[[Checkpoint, Options, list[Problem]], str]
    reads: bool = False


def perform(check: Check, checkpoint: Checkpoint, options: Options) -> Outcome:
    """Run one check; what the reader has already seen under its name counts."""
    problems = [p for p in checkpoint.problems if p.check == check.name]
    if check.name in checkpoint.not_applicable and not problems:
        return Outcome(check.name, "n/a", checkpoint.not_applicable[check.name])
    try:
        note = check.run(checkpoint, options, problems)
    except NotApplicable as why:
        if not problems:
            return Outcome(check.name, "n/a", str(why))
        note = ""
    return Outcome(check.name, "FAIL" if problems else "PASS", note, problems)


def plural(count: int, word: str, plural_word: str = "") -> str:
    """ "1,204 chunks", "1 chunk" """
    return f"{count:,} {word if count == 1 else plural_word or word + 's'}"


def some(names: Iterable[str], limit: int = 4) -> str:
    """The first few of `names`, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - limit:,} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
