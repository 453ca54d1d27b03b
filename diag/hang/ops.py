"""What a recorded operation is: its kind, whether completing it needs everybody, and sizes in elements."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Literal

from diag.artefacts.fr_dump import Entry, Op

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "broadcast", "reduce", "gather",
               "scatter", "send", "recv", "batch", "other"]

#: No member can complete one of these before every member has called it.
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
_BY_WORD: tuple[tuple[str, Kind], ...] = (
    ("all_to_all", "all_to_all"), ("alltoall", "all_to_all"), ("all_gather", "all_gather"),
    ("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter"), ("barrier", "barrier"),
    ("all_reduce", "all_reduce"), ("allreduce", "all_reduce"), ("broadcast", "broadcast"), ("gather", "gather"),
    ("scatter", "scatter"), ("reduce", "reduce"),
)


def kind(op: Op) -> Kind:
    """The kind of collective behind a backend's name for it ("_all_gather_base", "ALLGATHER_coalesced")."""
    return _kind_of(op.name)


@lru_cache(maxsize=1024)
def _kind_of(name: str) -> Kind:
    name = name.lower()
    if name.startswith(("send", "recv")):
        return "send" if name.startswith("send") else "recv"
    if name == "coalesced":
        return "batch"
    return next((kind for word, kind in _BY_WORD if word in name), "other")


def name(op: Op) -> str:
    """The operation without the marks that differ between torch versions for one and the same call."""
    return _name_of(op.name)


@lru_cache(maxsize=1024)
def _name_of(name: str) -> str:
    plain = name.lower().strip("_")
    return "coalesced" if plain.endswith("_coalesced") and name[:1].isupper() else plain


def closes_batch(entry: Entry) -> bool:
    """True for the entry that ends a coalesced batch; it has no tensors of its own."""
    return entry.op.name == "coalesced" or (entry.op.name.endswith("_coalesced") and entry.op.name[:1].isupper())


def elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Elements of all tensors together; the empty shape is a scalar."""
    return sum(prod(shape) for shape in shapes)


def peer(op: Op) -> tuple[int, int] | None:
    """(source, destination) of a send or receive as ranks inside its group; None for other names.

    >>> peer(Op("nccl", "recv 1<-0"))
    (0, 1)
    """
    what, _, ends = op.name.partition(" ")
    left, arrow, right = ends.partition("->" if what == "send" else "<-")
    if what not in ("send", "recv") or not arrow or not left.strip().isdecimal() or not right.strip().isdecimal():
        return None
    return (int(left), int(right)) if what == "send" else (int(right), int(left))


def in_words(entry: Entry) -> str:
    """One call for a reader: "all_reduce #12 of 2048x5120 BFloat16"."""
    op = entry.op
    shapes = op.input_sizes or op.output_sizes
    dtypes = op.input_dtypes or op.output_dtypes
    text = f"{op.name} #{entry.seq}"
    if shapes and any(shapes):
        shown = ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:3])
        text += f" of {shown}{', ...' if len(shapes) > 3 else ''}"
    return f"{text} {dtypes[0]}" if dtypes else text
