"""What will be written, to the byte, before anything is: files made of literal bytes, tensor bytes and late headers.

Every size is known from shapes alone, so the free space can be checked first, any thread can write any piece in any
order, and an interrupted conversion goes on where it stopped. Only checksums come late: headers that hold them are
`Late`, written when the file's tensors are.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from diag.checkpoints.canonical import Problem
from diag.checkpoints.convert.recipe import Ints, Recipe
from diag.errors import ArtefactError


@dataclass(frozen=True, slots=True)
class Span:
    """Elements first..last, in row-major order, of the box [offsets, offsets + sizes) of a recipe."""

    recipe: Recipe
    offsets: Ints
    sizes: Ints
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * (self.recipe.nbytes // max(self.recipe.elements, 1))


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes of a source file, copied as they are; `which` is the index of the source checkpoint."""

    which: int
    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding."""

    nbytes: int


Segment = Span | Raw | Zeros


def all_of(recipe: Recipe) -> Span:
    """The whole of a recipe."""
    return Span(recipe, (0,) * len(recipe.shape), recipe.shape, 0, recipe.elements)


def box_of(recipe: Recipe, offsets: Ints, sizes: Ints) -> Span:
    """A box of a recipe."""
    return Span(recipe, offsets, sizes, 0, math.prod(sizes))


@dataclass(slots=True)
class Payload:
    """Tensor bytes at `at` of a file, from segments that follow each other."""

    at: int
    nbytes: int
    segments: tuple[Segment, ...]
    label: str = ""


@dataclass(slots=True)
class Late:
    """Bytes that depend on the CRC32s of the file's payloads, in their order."""

    at: int
    nbytes: int
    make: Callable[[list[int]], bytes]


@dataclass(slots=True)
class OutFile:
    """One file under construction. `add` and `raw` append; `size` is where the next byte goes."""

    name: str
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)
    lates: list[Late] = field(default_factory=list)
    size: int = 0
    finished: Callable[[Path], bytes] | None = None  # of a mark: its content, of as many bytes as the literals have

    def raw(self, data: bytes) -> None:
        """Append literal bytes."""
        if data:
            self.literals.append((self.size, data))
            self.size += len(data)

    def add(self, segments: Iterable[Segment], label: str = "") -> int:
        """Append tensor bytes; the index of the payload."""
        listed = tuple(segments)
        payload = Payload(self.size, sum(s.nbytes for s in listed), listed, label)
        self.payloads.append(payload)
        self.size += payload.nbytes
        return len(self.payloads) - 1

    def late(self, nbytes: int, make: Callable[[list[int]], bytes]) -> None:
        """Append bytes that are known only after the tensors."""
        self.lates.append(Late(self.size, nbytes, make))
        self.size += nbytes


@dataclass(slots=True)
class Plan:
    """The files of a conversion. `marks` are written last, in their order: they say that the rest is complete.

    `home`: the folder below the destination that is the checkpoint itself ("" when the destination is).
    `carried`, `dropped`: what went over and what the target has no place for, in words. `objections`: what
    is wrong with the content of the result, and came with the source.
    """

    files: list[OutFile] = field(default_factory=list)
    marks: list[OutFile] = field(default_factory=list)
    home: str = ""
    carried: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    objections: list[Problem] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def file(self, name: str) -> OutFile:
        """A new file of the checkpoint. Raises `ArtefactError` for a name that leaves it: names come from strangers."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or "\\" in name:
            raise ArtefactError(f"{name!r} would be written outside of the checkpoint; refused")
        made = OutFile(f"{self.home}/{name}" if self.home else name)
        if made.name in self._names:
            raise ArtefactError(f"{name}: two tensors would be written to the same file")
        self._names.add(made.name)
        self.files.append(made)
        return made

    def mark(self, name: str, data: bytes, *, at_root: bool = False,
             finished: Callable[[Path], bytes] | None = None) -> None:
        """A commit mark or tracker. `finished` makes its content from the written folder of the checkpoint, where all
        else is in its place; `data` is then a stand-in of the same size."""
        made = OutFile(name if at_root or not self.home else f"{self.home}/{name}", finished=finished)
        made.raw(data)
        self.marks.append(made)

    @property
    def total(self) -> int:
        return sum(file.size for file in (*self.files, *self.marks))

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor that is written."""
        spans = (s.recipe.nbytes for f in self.files for p in f.payloads for s in p.segments if isinstance(s, Span))
        return max(spans, default=0)

    def fingerprint(self, extra: Any) -> str:
        """Equal for plans that write the same bytes from the same source; `extra` identifies the source."""
        crc = zlib.crc32(json.dumps(extra, sort_keys=True, default=str).encode())
        known: dict[int, int] = {}
        for file in (*self.files, *self.marks):
            crc = zlib.crc32(f"{file.name}\0{file.size}".encode(), crc)
            for at, data in file.literals:
                crc = zlib.crc32(data, zlib.crc32(str(at).encode(), crc))
            for payload in file.payloads:
                crc = zlib.crc32(f"{payload.label}\0{payload.at}\0{payload.nbytes}".encode(), crc)
                for segment in payload.segments:
                    if isinstance(segment, Span):
                        key = id(segment.recipe)
                        if key not in known:
                            known[key] = zlib.crc32(repr([(p.at, p.sizes, p.source.name, p.start, p.axes, p.steps)
                                                          for p in segment.recipe.parts]).encode())
                        where = (known[key], segment.offsets, segment.sizes, segment.first, segment.last)
                        crc = zlib.crc32(repr(where).encode(), crc)
        return f"{crc:08x}"
