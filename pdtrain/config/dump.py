"""A run as TOML with every default written out and every key explained; it reloads to an equal run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import tomli_w

from pdtrain.config import keys
from pdtrain.config.load import ABSENT
from pdtrain.config.schema import Run

#: Column at which the explanations start.
COMMENT_COLUMN = 36


def to_toml(run: Run, header: str = "") -> str:
    """`run` as a documented TOML file. `header` is put before it as comment lines."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    return "\n".join([*lines, *_table(run, keys.tree())]).strip("\n") + "\n"


def _table(values: msgspec.Struct, table: keys.Table) -> Iterator[str]:
    if table.keys:
        yield f"\n# {table.description}" if table.description else ""
        yield f"[{table.name}]"
    for name, key in table.keys.items():
        yield _line(name, getattr(values, name), key)
    for name, sub in table.tables.items():
        yield from _table(getattr(values, name), sub)


def _line(name: str, value: Any, key: keys.Key) -> str:
    if value is not None:
        setting = scalar(name, value)
    elif key.default is None:
        setting = f"# {name} ="  # TOML has no null: an absent value is an absent key
    else:
        setting = scalar(name, ABSENT)
    choices = f" ({key.expected})" if key.expected.startswith('"') else ""
    return f"{setting:<{COMMENT_COLUMN}}  # {key.description}{choices}"


def scalar(name: str, value: Any) -> str:
    """`name = value` as TOML."""
    return tomli_w.dumps({name: value}).rstrip("\n")
