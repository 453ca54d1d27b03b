"""The configuration keys as a flat table: dotted name, meaning, default, limits in words.

Made from the schema, so that error texts, `--print-config` and docs/config.md say the same as the types.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from pdtrain.config.schema import Run


@dataclass(frozen=True, slots=True)
class Key:
    """One settable value: `name` is dotted (`train.steps`), `expected` its type and limits in the user's words."""

    name: str
    description: str
    type: Any  #: what msgspec.convert checks a value against
    expected: str
    optional: bool
    text: bool  #: takes any text, so that a bare word or number of `--set` is taken literally
    default: Any


@dataclass(frozen=True, slots=True)
class Table:
    """One table: `name` is dotted, empty for the root; `keys` and `tables` by their last name."""

    name: str
    description: str
    defaults: msgspec.Struct
    keys: dict[str, Key]
    tables: dict[str, Table]


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _bare(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """`kind` without its metadata, and its description."""
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return kind, description


def _limits(kind: inspect.IntType | inspect.FloatType, noun: str) -> str:
    low, high = kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
    low, high = (int(end) if isinstance(end, float) and end.is_integer() else end for end in (low, high))
    if kind.ge is not None and kind.le is not None:
        return f"{noun} from {low} to {high}"
    parts = []
    if low is not None:
        parts.append(f"{'at least' if kind.ge is not None else 'above'} {low:g}")
    if high is not None:
        parts.append(f"{'at most' if kind.le is not None else 'below'} {high:g}")
    return " ".join([noun, " and ".join(parts)]).strip()


def in_words(kind: inspect.Type) -> str:
    """What a value of `kind` looks like, in words that follow "expected"."""
    match kind := _bare(kind)[0]:
        case inspect.UnionType():
            return in_words(next(part for part in kind.types if not isinstance(part, inspect.NoneType)))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return _limits(kind, "a whole number")
        case inspect.FloatType():
            return _limits(kind, "a number")
        case inspect.LiteralType():
            *rest, last = [f'"{value}"' for value in kind.values]
            return f"{', '.join(rest)} or {last}" if rest else last
        case _:
            return "text"


@functools.cache
def tree() -> Table:
    """The whole configuration as nested tables, in the order of the schema."""
    return _table(Run(), "")


def _table(defaults: msgspec.Struct, name: str) -> Table:
    # The defaults come from the instance, not from its type: a row of the policy table may start from other values.
    keys: dict[str, Key] = {}
    tables: dict[str, Table] = {}
    struct = type(defaults)
    hints = {field.name: field.type for field in msgspec.structs.fields(struct)}
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        kind, description = _bare(field.type)
        dotted = _join(name, field.name)
        if isinstance(kind, inspect.StructType):
            tables[field.name] = _table(getattr(defaults, field.name), dotted)
            continue
        options = [_bare(part)[0] for part in kind.types] if isinstance(kind, inspect.UnionType) else [kind]
        keys[field.name] = Key(
            name=dotted,
            description=description,
            type=hints[field.name],
            expected=in_words(kind),
            optional=any(isinstance(option, inspect.NoneType) for option in options),
            text=any(isinstance(option, inspect.StrType) for option in options),
            default=getattr(defaults, field.name),
        )
    return Table(name, " ".join((struct.__doc__ or "").split()), defaults, keys, tables)


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every settable key of a run by its dotted name, in schema order."""

    def walk(table: Table) -> dict[str, Key]:
        found = {key.name: key for key in table.keys.values()}
        for sub in table.tables.values():
            found |= walk(sub)
        return found

    return walk(tree())


#: What other trainers call our keys: a name learnt elsewhere is answered with ours.
ALIASES = {
    "tp": "tensor", "tp_size": "tensor", "tensor_parallel": "tensor", "tensor_model_parallel_size": "tensor",
    "ep": "expert", "ep_size": "expert", "expert_parallel": "expert", "expert_model_parallel_size": "expert",
    "pp": "pipeline", "pipeline_parallel": "pipeline", "world_size": "ranks", "world": "ranks", "nproc": "ranks",
    "hidden_size": "hidden", "dim": "hidden", "num_layers": "layers", "num_heads": "heads", "num_experts": "experts",
    "num_experts_per_tok": "top_k", "topk": "top_k", "moe_ffn_hidden_size": "expert_hidden",
    "aux_loss_coeff": "aux_loss",
    "max_steps": "steps", "train_iters": "steps", "seq_len": "sequence_length", "seq_length": "sequence_length",
    "global_batch_size": "train_batch", "batch_size": "train_batch", "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation", "grad_accum": "accumulation",
    "learning_rate": "lr", "grad_clip": "clip", "max_grad_norm": "clip", "wd": "weight_decay",
}  # fmt: skip


def nearest(dotted: str) -> str | None:
    """The legal key or table that `dotted` most likely meant; None when nothing is near.

    In this order: a path that lacks its beginning (`moe.top_k`), a similar name in the same section, another
    trainer's name for it (`tp`), the same name in exactly one other section (`train.lr`), a misspelt section.
    """
    names = [*all_keys(), *(name for name in _tables(tree()) if name)]
    section, _, last = dotted.rpartition(".")
    for name in (last, ALIASES.get(last.lower(), last)):
        wanted = _join(section, name)
        if wanted in names:
            return wanted
        if len(ends := [legal for legal in names if legal.endswith(f".{wanted}")]) == 1:
            return ends[0]
        siblings = {legal.rpartition(".")[2]: legal for legal in names if legal.rpartition(".")[0] == section}
        if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
            return siblings[near[0]]
        same = [legal for legal in names if legal.rpartition(".")[2] == name]
        below = [legal for legal in same if section and legal.startswith(f"{section}.")]
        if len(same) == 1 or len(below) == 1:
            return (below or same)[0]
    if find_table(section) is None:
        near = difflib.get_close_matches(dotted, names, n=1, cutoff=0.7)
        return near[0] if near else None
    return None


def _tables(table: Table) -> list[str]:
    return [table.name, *(name for sub in table.tables.values() for name in _tables(sub))]


def find_table(dotted: str) -> Table | None:
    """The table of that dotted name; the root for an empty name."""
    table: Table | None = tree()
    for part in dotted.split(".") if dotted else []:
        table = table.tables.get(part) if table else None
    return table
