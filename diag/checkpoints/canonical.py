"""The one form that every checkpoint is read into: name -> global tensor, in chunks that lie somewhere in files.

A reader fills a `Checkpoint` from structure alone (pickles through the restricted unpickler, zip and safetensors
headers); no tensor byte is touched until `Checkpoint.view` maps it. What it notices on the way (a shard that is not
there, a header that lies) it keeps as `Problem`s: `verify` reports them, other commands decide whether to go on.

Names. `Tensor.name` is unique and is the source's own key. `Tensor.fqn` is the parameter that the tensor belongs to,
without the container prefixes ("optimizer.state.", "model.", ".exp_avg"), so that a weight and its moments share it:
`checkpoint.states_of(fqn)` -> {"parameter": ..., "exp_avg": ..., "master": ...}.

Geometry. A chunk covers the box [offsets, offsets + sizes) of the global tensor, row-major. With `flat = (a, b)` it
holds only elements a..b of that box's row-major order: DeepSpeed's and Megatron's flat partitions split tensors at any
element. `strides` (in elements) is present only where the bytes are not row-major, which torch.save allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from diag.checkpoints.dtypes import DTYPES, Dtype
from diag.checkpoints.files import Folder
from diag.errors import ArtefactError

Role = Literal["parameter", "buffer", "master", "exp_avg", "exp_avg_sq", "step", "state"]
Kind = Literal["zip", "safetensors", "raw", "transformed"]


@dataclass(slots=True)
class Container:
    """A byte range of a file that carries its own structure: `file[offset : offset + length]`.

    kind: "zip" (what torch.save writes: a whole .pt file, or one slice of a .distcp), "safetensors" (a whole file),
    "raw" (bytes without structure), "transformed" (DCP with a compression extension: its bytes cannot be mapped).
    """

    file: str
    offset: int
    length: int
    kind: Kind
    owner: str = ""


@dataclass(slots=True)
class Chunk:
    """A box of a global tensor and where its bytes are: `file[begin : begin + nbytes]`.

    `begin` is -1 until `Checkpoint.locate` has looked into the container; `rank` is who wrote it, where that is known.
    `file` is relative to the checkpoint's folder, with forward slashes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    container: Container
    begin: int = -1
    nbytes: int = -1
    flat: tuple[int, int] | None = None
    strides: tuple[int, ...] | None = None
    rank: int | None = None

    @property
    def file(self) -> str:
        return self.container.file

    @property
    def elements(self) -> int:
        return math.prod(self.sizes) if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def byte_range(self) -> tuple[int, int]:
        """[first, last + 1) in `file`: of the payload when located, else of the container."""
        if self.begin < 0:
            return self.container.offset, self.container.offset + self.container.length
        return self.begin, self.begin + self.nbytes

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for chunks that hold the same elements: copies of each other."""
        return self.offsets, self.sizes, self.flat


@dataclass(slots=True)
class Tensor:
    """A global tensor. `chunks` tile it when the checkpoint is whole; `copies` are further chunks (replicas on other
    ranks) that must hold the same bytes as the chunk of the same `key`.

    expert_axis: dimension that counts experts in a stacked tensor; expert: the id when each has its own tensor.
    `split_unknown`: pieces of several tensor-parallel ranks whose split axis the checkpoint does not record; then the
    name carries the rank and `shape` is the piece's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)
    role: Role = "parameter"
    fqn: str = ""
    expert_axis: int | None = None
    expert: int | None = None
    copies: list[Chunk] = field(default_factory=list)
    split_unknown: bool = False

    def __post_init__(self) -> None:
        self.fqn = self.fqn or self.name

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> Dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].nbytes(self.elements) if self.dtype in DTYPES else 0


@dataclass(slots=True)
class Item:
    """Something that is no tensor: RNG state, loader state, arguments. `value` where it was plain data and small."""

    name: str
    container: Container | None = None
    value: Any = None
    rank: int | None = None


@dataclass(slots=True)
class Meta:
    """What the checkpoint says about the run. Absent means not recorded, never a guess.

    layout: degrees by axis ("tp", "pp", "dp", "ep", ...); rng, loader: ranks whose state is there (empty: none found);
    rows: for this trainer, policy row -> step its tensors were saved at; args: recorded hyper-parameters.
    """

    framework: str = ""
    step: int | None = None
    world: int | None = None
    layout: dict[str, int] = field(default_factory=dict)
    rng: set[int] = field(default_factory=set)
    loader: set[int] = field(default_factory=set)
    consumed: int | None = None
    rows: dict[str, int] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    version: str = ""


@dataclass(slots=True)
class Problem:
    """A defect that a reader saw: `check` is the verify check that it fails, `cause` a slug of diag/causes.py."""

    check: str
    text: str
    file: str | None = None
    tensor: str | None = None
    byte_range: tuple[int, int] | None = None
    cause: str = "ckpt_corrupt"
    severity: Literal["error", "warning"] = "error"


@dataclass(slots=True)
class Checkpoint:
    """One checkpoint: everything that a reader found under `folder.root`.

    `format` is the reader's name; `expected` the files that the metadata or the recorded world call for, `files` those
    that are there and belong to the checkpoint; `committed` is None where the format has no commit mark.
    """

    folder: Folder
    format: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    meta: Meta = field(default_factory=Meta)
    problems: list[Problem] = field(default_factory=list)
    expected: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    committed: bool | None = None
    commit_mark: str = ""
    #: file -> (algorithm, hex digest): what a manifest or integrity.json promises
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: checks that do not exist for this format: name -> why
    not_applicable: dict[str, str] = field(default_factory=dict)
    #: fqn -> the weights in another type, where a format keeps them besides its masters: only `verify` looks at them
    rounded: dict[str, Tensor] = field(default_factory=dict)
    #: files of the training state that lie in the folder and are not read
    unread: list[str] = field(default_factory=list)

    def add(self, tensor: Tensor) -> None:
        """Keep `tensor`; a second one of the same name is a problem, not a replacement."""
        if tensor.name in self.tensors:
            where = tensor.chunks[0] if tensor.chunks else None
            first = self.tensors[tensor.name].chunks
            self.problems.append(Problem(
                "names are unique", f"{tensor.name} is in {first[0].file if first else '?'} and again in "
                f"{where.file if where else '?'}", where.file if where else None, tensor.name,
                where.byte_range if where else None))
            return
        self.tensors[tensor.name] = tensor

    def problem(self, check: str, text: str, **where: Any) -> None:
        """Keep a `Problem`."""
        self.problems.append(Problem(check, text, **where))

    def states_of(self, fqn: str) -> dict[str, Tensor]:
        """Role -> tensor of everything that belongs to the parameter `fqn`."""
        return {t.role: t for t in self.tensors.values() if t.fqn == fqn}

    # -- bytes ----------------------------------------------------------------------------------------------------

    def locate(self, tensor: Tensor, chunk: Chunk) -> Chunk:
        """Fill `begin`, `nbytes` and `strides` of a chunk inside a zip container.

        Raises `ArtefactError` when the container is damaged or holds something else than one tensor.
        """
        if chunk.begin >= 0:
            return chunk
        if chunk.container.kind != "zip":
            raise ArtefactError(f"{chunk.file}: the bytes of {tensor.name} are {chunk.container.kind}, not read here")
        from diag.checkpoints.torch_zip import sole_tensor

        found = sole_tensor(self.folder, chunk.container)
        if found.dtype != tensor.dtype or found.shape != chunk.sizes:
            raise ArtefactError(f"{chunk.file}: holds {found.dtype}{list(found.shape)} where the metadata says "
                                f"{tensor.dtype}{list(chunk.sizes)} for {tensor.name}")
        chunk.begin, chunk.nbytes, chunk.strides = found.begin, found.nbytes, found.strides
        return chunk

    def view(self, tensor: Tensor, chunk: Chunk) -> Any:
        """The chunk as a read-only numpy array over the mapped file: shape `sizes`, or 1-D for a flat piece.

        Elements are of the held type (bfloat16: uint16, float8: uint8; see dtypes). Raises `ArtefactError`.
        """
        self.locate(tensor, chunk)
        data = self.folder.map(chunk.file)
        kind = tensor.type
        if chunk.begin + chunk.nbytes > len(data):
            raise ArtefactError(f"{chunk.file}: ends before byte {chunk.begin + chunk.nbytes:,} of {tensor.name}")
        if kind.bits % 8:
            return np.frombuffer(data, np.uint8, chunk.nbytes, chunk.begin)
        shape = chunk.sizes if chunk.flat is None else (chunk.elements,)
        if chunk.strides is None and chunk.nbytes != kind.nbytes(chunk.elements):
            raise ArtefactError(f"{chunk.file}: {tensor.name} needs {kind.nbytes(chunk.elements):,} bytes and has "
                                f"{chunk.nbytes:,}")
        if chunk.strides is not None and chunk.elements:
            held = np.dtype(kind.held)
            steps = tuple(step * held.itemsize for step in chunk.strides)
            last = sum((size - 1) * step for size, step in zip(shape, steps)) + held.itemsize
            if min(steps, default=0) < 0 or last > chunk.nbytes:
                raise ArtefactError(f"{chunk.file}: the strides of {tensor.name} leave its storage")
            return np.ndarray(shape, held, data, chunk.begin, steps)
        return np.frombuffer(data, kind.held, chunk.elements, chunk.begin).reshape(shape)

    def read(self, tensor: Tensor, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Any:
        """A box of the global tensor (all of it by default), copied into one array of the held type.

        Raises `ArtefactError` when the chunks do not cover the box.
        """
        offsets = offsets if offsets is not None else (0,) * len(tensor.shape)
        sizes = sizes if sizes is not None else tuple(n - o for n, o in zip(tensor.shape, offsets))
        out = np.empty(sizes, tensor.type.held)
        filled = 0
        for box_offsets, box_sizes, pieces in boxes(tensor.chunks):
            overlap = _intersection(offsets, sizes, box_offsets, box_sizes)
            if overlap is None:
                continue
            start, extent = overlap
            box: tuple[Any, ...] = (*(slice(s - o, s - o + n) for s, o, n in zip(start, offsets, extent)), ...)
            target = out[box]
            inside = tuple(slice(s - o, s - o + n) for s, o, n in zip(start, box_offsets, extent))
            if len(pieces) == 1 and pieces[0].flat is None:
                target[...] = self.view(tensor, pieces[0])[inside]
            else:
                whole = np.empty(math.prod(box_sizes), tensor.type.held)
                got = 0
                for piece in pieces:
                    a, b = piece.flat or (0, math.prod(box_sizes))
                    whole[a:b] = self.view(tensor, piece).reshape(-1)
                    got += b - a
                if got != whole.size:
                    raise ArtefactError(f"{tensor.name}: its pieces hold {got:,} of {whole.size:,} elements")
                target[...] = whole.reshape(box_sizes)[inside]
            filled += math.prod(extent)
        if filled != math.prod(sizes):
            raise ArtefactError(f"{tensor.name}: its chunks hold {filled:,} of {math.prod(sizes):,} elements asked for")
        return out


def boxes(chunks: Iterable[Chunk]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[Chunk]]]:
    """(offsets, sizes, the chunk or the flat pieces in order) of each box that `chunks` are about."""
    grouped: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Chunk]] = {}
    for chunk in chunks:
        grouped.setdefault((chunk.offsets, chunk.sizes), []).append(chunk)
    for (offsets, sizes), pieces in grouped.items():
        yield offsets, sizes, sorted(pieces, key=lambda c: c.flat or (0, 0))


def _intersection(
    offsets: tuple[int, ...], sizes: tuple[int, ...], others: tuple[int, ...], extents: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    start = tuple(map(max, offsets, others))
    stop = tuple(min(o + s, p + t) for o, s, p, t in zip(offsets, sizes, others, extents))
    if any(a >= b for a, b in zip(start, stop)):
        return None
    return start, tuple(b - a for a, b in zip(start, stop))
