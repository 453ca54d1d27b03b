"""What a run leaves behind, one reader per format. This folder is the registry: a new format is a new file here.

A reader is a module with

    NAME       the format as users see it, for example "flight-recorder"
    ARTEFACT   the class (a subclass of `Artefact`) that `read` returns; detectors ask for it
    sniff(head: bytes, name: str) -> float
               0 (not mine) to 1 (certain), from the first bytes (decompressed) and the file's bare name, without
               .gz/.zst. Decide by content; the name may only break a tie. Bools are welcome. Never raises.
    read(source: Source) -> Artefact | Unreadable
               streams `source.open()`. Damage is a value: return `Unreadable` (or raise `ArtefactError`, which the
               reading stage turns into one) when nothing can be used; set `.problem` when a part can.
    read_many(sources: Sequence[Source], progress: Progress) -> list[Artefact | Unreadable]
               optional; for readers that use several processes. One result per source, in order.

Modules without these names are helpers and are ignored. Module level imports stay light: no torch, and numpy only
inside functions.
"""

from __future__ import annotations

import builtins
import importlib
import io
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Protocol, TypeVar, cast

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What every reader is told: the user's options, and what is to be done beside the reading."""

    signatures: Path | None = None
    #: of console logs every number with a step is wanted, and nothing else
    series: bool = False
    #: (canonical name, name in the source): which column is meant (`--column`)
    columns: tuple[tuple[str, str], ...] = ()
    #: bytes of memory of one GPU (`--device-memory`), for what a snapshot does not say
    device_memory: int | None = None
    #: what the process may do while children read for it: imports that it will need
    meanwhile: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file found by `diag.discover`, not read yet.

    `path` is what the user gave (or it joined with the names below it) and is what evidence must show. `bytes` is the
    size on disk; `head` the first 64 KiB after decompression. `open()` may be called any number of times and yields
    the decompressed bytes; it raises `ArtefactError` while reading when the data is damaged or expands absurdly.
    `given` says that the user named this very file.
    """

    path: str
    name: str
    bytes: int
    head: builtins.bytes
    open: Callable[[], BinaryIO]
    real: Path | None = None
    compression: str | None = None
    given: bool = True
    options: ReadOptions = ReadOptions()

    @property
    def directory(self) -> str:
        """The folder that holds it, as the user gave it; artefacts of one run share it."""
        return str(Path(self.path).parent)


@dataclass(kw_only=True)
class Artefact:
    """Base of what readers return. Fields a reader cannot know stay empty: an unknown rank is never guessed.

    `problem` says what part could not be read; `problem_severity` is "info" for what a killed run leaves normally
    (a torn last line) and "warning" where evidence may be missing.
    """

    path: str
    format: str
    bytes: int = 0
    ranks: list[int] = field(default_factory=list)
    lines: int | None = None
    problem: str | None = None
    problem_severity: str = "info"

    @property
    def directory(self) -> str:
        """The folder that holds it; artefacts of one run share it."""
        return str(Path(self.path).parent)


@dataclass(kw_only=True)
class Unreadable(Artefact):
    """A source nothing of which can be used. A third state: neither healthy nor faulty, and always shown."""

    problem_severity: str = "warning"


class Reader(Protocol):
    """The interface of a reader module; see the module docstring."""

    NAME: str
    ARTEFACT: type[Artefact]

    def sniff(self, head: bytes, name: str) -> float: ...

    def read(self, source: Source) -> Artefact: ...


_A = TypeVar("_A", bound=Artefact)


class Artefacts:
    """Everything that was read, grouped by type; what a detector gets."""

    def __init__(self, items: Iterable[Artefact] = ()) -> None:
        self.items: list[Artefact] = list(items)
        #: the user's own names of columns, (canonical name, name in the source)
        self.columns: tuple[tuple[str, str], ...] = ()

    def of(self, kind: type[_A]) -> list[_A]:
        """All artefacts of class `kind`, in reading order; empty when there are none."""
        return [item for item in self.items if isinstance(item, kind)]

    def beside(self, item: Artefact, kind: type[_A]) -> _A | None:
        """The artefact of class `kind` in the same folder as `item` (a run's config beside its metrics), if any."""
        return next((other for other in self.of(kind) if other.directory == item.directory), None)


@cache
def readers() -> tuple[Reader, ...]:
    """Every reader module of this folder, sorted by module name."""
    found: list[ModuleType] = []
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        source = Path(__path__[0], f"{name}.py")
        if source.is_file() and "\ndef sniff(" not in source.read_text("utf-8"):
            continue  # a helper, which may take long to import
        module = importlib.import_module(f"{__name__}.{name}")
        if all(hasattr(module, wanted) for wanted in ("NAME", "ARTEFACT", "sniff", "read")):
            found.append(module)
    return tuple(cast(Reader, module) for module in found)


def recognise(source: Source, among: Sequence[Reader] | None = None) -> Reader | None:
    """The reader that is most certain about `source`, or None. Ties go to the first by module name.

    A reader of columns may have `named(head, columns)` beside `sniff`: how certain it is when the user named columns.
    """
    best, best_score = None, 0.0
    for reader in readers() if among is None else among:
        score = float(reader.sniff(source.head, source.name))
        if source.options.columns and (named := getattr(reader, "named", None)) is not None:
            score = max(score, float(named(source.head, [column for _, column in source.options.columns])))
        if score > best_score:
            best, best_score = reader, score
    return best


def memory_source(data: bytes, name: str = "memory", *, options: ReadOptions | None = None) -> Source:
    """A `Source` over bytes in memory: for tests and for embedding."""
    return Source(path=name, name=Path(name).name, bytes=len(data), head=data[:65_536],
                  open=lambda: io.BytesIO(data), options=options or ReadOptions())
