"""What is wrong with a configuration, as values: collected first, shown all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

#: Values longer than this are cut in messages.
SHOWN = 80


@dataclass(frozen=True, slots=True)
class Mistake:
    """One fault of a configuration. Reads as: "`where`: `key` = `value` `what`; use `legal`".

    Args:
        key: full dotted key; empty when the fault belongs to no key (a file that cannot be read).
        value: what came; `NOTHING` when the message needs no value.
        what: the fault as a predicate, in the user's words ("does not divide 64 heads").
        legal: the legal values, or one phrase that says what to do.
        where: file, preset or option that set the key; filled in by the loader where a rule does not know it.
        warning: the run may go on.
    """

    key: str
    value: Any
    what: str
    legal: Sequence[Any] | str = ()
    where: str = ""
    warning: bool = False

    def line(self, sources: Mapping[str, str] | None = None, default: str = "") -> str:
        """The mistake as one line. `sources` maps a dotted key to the place that set it."""
        where = self.where or (sources or {}).get(self.key, default)
        value = "" if self.value is NOTHING else f" = {show(self.value)}"
        text = " ".join(part for part in (f"{printable(self.key)}{value}", self.what) if part)
        advice = self.legal if isinstance(self.legal, str) else one_of(self.legal)
        return ": ".join(part for part in (printable(where), text) if part) + (f"; {advice}" if advice else "")


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class UnknownValue(Exception):
    """A rule looked at a key whose value is already known to be wrong: it cannot be judged yet."""


class _Unknown:
    """Stands for the value of such a key; every use of it ends the rule, so that no mistake is reported twice."""

    def _raise(self, *_: object) -> NoReturn:
        raise UnknownValue

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __format__ = __index__ = _raise
    __add__ = __radd__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _raise
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __neg__ = __int__ = __float__ = __iter__ = __len__ = _raise
    __getattr__ = _raise


UNKNOWN: Any = _Unknown()


def one_of(values: Iterable[Any]) -> str:
    """`[1, 2, 4]` as "use 1, 2 or 4"."""
    texts = [show(value) for value in values]
    if not texts:
        return ""
    return f"use {', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else f"use {texts[0]}"


def show(value: Any) -> str:
    """A value as TOML would write it, cut at `SHOWN` characters, control characters escaped."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = printable(text)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def shown_path(path: Path) -> str:
    """A path, whole: its end is what tells it apart."""
    return f'"{printable(str(path))}"'


def printable(text: str) -> str:
    """`text` with everything that could move the cursor or break the line shown as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def divisors(number: int, limit: int = 4096) -> list[int]:
    """The divisors of `number` up to `limit`, ascending: the legal degrees of a parallel dimension."""
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


def around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, without 0."""
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]
