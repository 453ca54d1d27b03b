"""Token files written by Megatron-LM's `preprocess_data.py`: PREFIX.bin (tokens) and PREFIX.idx (where they are).

The index, little-endian: 9 bytes `MMIDIDX\\0\\0`; u64 version 1; u8 dtype code; u64 number of sequences; u64 number of
document boundaries; i32 length of each sequence; i64 byte offset of each; i64 boundaries, in sequences (the first is 0,
the last the number of sequences); optionally one i8 mode per sequence. Layout as documented in Megatron-LM
`core/datasets/indexed_dataset.py`, whose tokens carry their own end-of-document ids: nothing is added here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from diag.errors import ArtefactError
from pdtrain.data.order import mix64
from pdtrain.data.store import DOCUMENT, TokenStore

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
_SAMPLE = 1 << 20  # bytes hashed at 16 places of a .bin: a terabyte cannot be read at every start


def open_indexed(prefixes: Sequence[Path], names: Sequence[str]) -> TokenStore:
    """Map one or more PREFIX.bin/.idx pairs as one corpus. `names` are shown for the .bin files.

    Raises:
        ArtefactError: a file is missing, truncated, of an unknown version or dtype, or its index contradicts itself.
    """
    parts, tables, identity = [], [], xxhash.xxh3_128()
    for number, prefix in enumerate(prefixes):
        tokens, table = _open(prefix, number)
        content = _content(tokens, table)
        identity.update(content.to_bytes(16, "little"))
        table["key"] = mix64(np.arange(len(table)), content & (1 << 64) - 1)
        parts.append(tokens)
        tables.append(table)
    return TokenStore(parts, np.concatenate(tables), list(names), identity.hexdigest())


def _open(prefix: Path, number: int) -> tuple[NDArray[np.generic], NDArray[np.void]]:
    index = prefix.with_name(prefix.name + ".idx")
    binary = prefix.with_name(prefix.name + ".bin")
    lengths, offsets, bounds, dtype = _index(index)
    try:
        size = binary.stat().st_size
    except OSError as error:
        raise ArtefactError(f"{binary}: {error.strerror}, but {index.name} is there; both are needed") from None
    ends = offsets + lengths * dtype.itemsize
    if len(ends) and (offsets.min() < 0 or lengths.min() < 0 or (offsets % dtype.itemsize).any()):
        raise ArtefactError(f"{index}: a sequence has a negative length or an impossible offset; write the file again")
    if len(ends) and int(ends.max()) > size:
        raise ArtefactError(
            f"{binary}: truncated: {size:,} bytes, but {index.name} places tokens up to byte {int(ends.max()):,}"
        )
    first, last = bounds[:-1], bounds[1:]
    inner = np.ones(max(0, len(ends) - 1), dtype=bool)  # must sequence i+1 follow i? yes, inside a document
    inner[last[(last > 0) & (last < len(ends))] - 1] = False
    if (offsets[1:][inner] != ends[:-1][inner]).any():
        raise ArtefactError(f"{index}: the sequences of a document do not lie next to each other; write the file again")
    totals = np.concatenate([[0], np.cumsum(lengths)])
    length = totals[last] - totals[first]
    kept = length > 0
    table = np.zeros(int(kept.sum()), dtype=DOCUMENT)
    table["part"] = table["file"] = number
    table["record"] = np.flatnonzero(kept) + 1
    table["offset"] = offsets[first[kept]]
    table["start"] = table["offset"] // dtype.itemsize
    table["length"] = length[kept]
    table["bytes"] = -1
    tokens = np.memmap(binary, dtype=dtype, mode="r", shape=(size // dtype.itemsize,)) if size else np.zeros(0, dtype)
    return tokens, table


def _index(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], np.dtype]:
    """(lengths, byte offsets, document boundaries, dtype of the tokens)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(HEADER.size)
    except OSError as error:
        raise ArtefactError(f"{path}: {error.strerror}; a .bin file needs its .idx beside it") from None
    if not head.startswith(MAGIC[: len(head)]) or len(head) < len(MAGIC):
        raise ArtefactError(f"{path}: not a Megatron index (it does not begin with MMIDIDX)")
    if len(head) < HEADER.size:
        raise ArtefactError(f"{path}: truncated: {size} bytes, the header alone has {HEADER.size}")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != 1:
        raise ArtefactError(f"{path}: index version {version}; version 1 is read")
    if code not in DTYPES:
        what = FLOATS.get(code, f"unknown code {code}")
        raise ArtefactError(f"{path}: tokens of type {what}; integer types are read (codes {sorted(DTYPES)})")
    wanted = HEADER.size + sequences * 12 + boundaries * 8
    if size < wanted:
        raise ArtefactError(f"{path}: truncated: {size:,} bytes, its header announces {wanted:,}")
    if size not in (wanted, wanted + sequences):
        raise ArtefactError(f"{path}: {size - wanted:,} bytes more than its header announces; write the file again")
    lengths = np.fromfile(path, "<i4", sequences, offset=HEADER.size).astype(np.int64)
    offsets = np.fromfile(path, "<i8", sequences, offset=HEADER.size + sequences * 4)
    bounds = np.fromfile(path, "<i8", boundaries, offset=HEADER.size + sequences * 12)
    if boundaries < 1 or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise ArtefactError(f"{path}: document boundaries do not run from 0 to {sequences:,}; write the file again")
    return lengths, offsets, bounds, np.dtype(DTYPES[code])


def _content(tokens: NDArray[np.generic], table: NDArray[np.void]) -> int:
    """Hash of the index and of samples of the tokens."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(table[["start", "length"]]).tobytes())
    raw = tokens.view(np.uint8)
    for start in sorted({int(place) for place in np.linspace(0, max(0, len(raw) - _SAMPLE), 16)}):
        digest.update(raw[start : start + _SAMPLE].tobytes())
    digest.update(str((tokens.dtype.str, len(tokens))).encode())
    return digest.intdigest()
