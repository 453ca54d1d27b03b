"""Edits of a checkpoint's bytes that leave it looking sound: data with their CRC, headers rewritten in place."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diag.artefacts import restricted_pickle
from diag.checkpoints import zips
from diag.checkpoints.canonical import Checkpoint, Chunk, Container
from diag.checkpoints.torch_pickle import DtypeRef, Inert, known_globals
from diag.errors import MissingExtra, UsageError

#: A pickle that would run `true` in a shell where it is loaded by a careless loader.
HOSTILE = b"\x80\x02cposix\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03."


def write_at(path: Path, at: int, data: bytes) -> None:
    """Overwrite some bytes of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ (1 << bit)]))


def reseal(path: Path, container: Container) -> None:
    """Give every member of an archive the CRC32 of its present bytes, in the directory, header and descriptor."""
    data = bytearray(path.read_bytes())
    for member in zips.members(memoryview(bytes(data)), container.offset, container.length):
        crc = zlib.crc32(data[member.begin : member.begin + member.size])
        if crc == member.crc:
            continue
        struct.pack_into("<I", data, member.entry + 16, crc)
        flags = struct.unpack_from("<H", data, member.header + 6)[0]
        struct.pack_into("<I", data, (member.begin + member.size + 4) if flags & 8 else member.header + 14, crc)
    path.write_bytes(bytes(data))


def replace_bytes(checkpoint: Checkpoint, chunk: Chunk, data: bytes) -> None:
    """Overwrite a chunk's bytes; in an archive the CRCs follow, so that only the values are wrong."""
    path = checkpoint.folder.path(chunk.file)
    write_at(path, chunk.begin, data[: chunk.nbytes])
    if chunk.container.kind == "zip":
        reseal(path, chunk.container)


def patch_pickle(path: Path, container: Container, edit: Callable[[bytes], bytes | None]) -> bool:
    """Edit the data.pkl of an archive to something of the same length; False when `edit` finds nothing to do."""
    data = path.read_bytes()
    for member in zips.members(memoryview(data), container.offset, container.length):
        if member.name.partition("/")[2] == "data.pkl":
            new = edit(data[member.begin : member.begin + member.size])
            if new is None or len(new) != member.size:
                return False
            write_at(path, member.begin, new)
            reseal(path, container)
            return True
    return False


def bump_int(pickled: bytes, key: str) -> bytes | None:
    """The pickle with the whole number that follows the text `key` made greater by one."""
    pattern = re.compile(re.escape(struct.pack("<I", len(key)) + key.encode()) + rb"(?:q.|r....)?(K.|M..|J....)", re.S)
    match = pattern.search(pickled)
    if match is None:
        return None
    code, value = match[1][:1], int.from_bytes(match[1][1:], "little") + 1
    return pickled[: match.start(1)] + code + value.to_bytes(len(match[1]) - 1, "little") + pickled[match.end(1) :]


def rename_key(pickled: bytes, key: str) -> bytes | None:
    """The pickle with the text `key` spelt backwards, so that nobody finds it."""
    old = struct.pack("<I", len(key)) + key.encode()
    new = struct.pack("<I", len(key)) + key[::-1].encode()
    return pickled.replace(old, new) if old in pickled else None


def swap_shape(pickled: bytes) -> bytes | None:
    """The pickle with the first two-dimensional shape turned round, or the first one-dimensional one made longer."""
    number, memo = rb"(?:K.|M..)", rb"(?:q.|r....)"
    two = b"(" + number + b")(" + number + rb")\x86" + memo + number + number + b"\x86"
    for match in re.finditer(two, pickled, re.S):
        if len(match[1]) == len(match[2]) and match[1] != match[2]:
            return pickled[: match.start()] + match[2] + match[1] + pickled[match.end(2) :]
    one = re.search(rb"(K.|M..)\x85(?:q.|r....)K\x01\x85", pickled, re.S)
    if one is None:
        return None
    value = int.from_bytes(one[1][1:], "little") + 1
    return pickled[: one.start(1) + 1] + value.to_bytes(len(one[1]) - 1, "little") + pickled[one.end(1) :]


def safetensors_header(path: Path, edit: Callable[[dict[str, Any]], str | None]) -> None:
    """Rewrite the header of a safetensors file; `edit` changes the dictionary or returns the new JSON text itself."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = (edit(header) or json.dumps(header, separators=(",", ":"))).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_dcp(path: Path, edit: Callable[[Any], None]) -> None:
    """Rewrite a `.metadata` with torch's own classes. Raises `MissingExtra` without torch."""
    try:
        import torch
        from torch.distributed.checkpoint import filesystem, metadata
    except ImportError:
        raise MissingExtra("pdtrain drill corrupt", "train", "torch") from None

    def dtype_or(value: Any) -> Any:
        return getattr(torch, value.name, value) if isinstance(value, DtypeRef) else value

    table = {key: dtype_or(value) for key, value in known_globals().items()}
    table |= {(c.__module__, c.__name__): c for c in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
        metadata.MetadataIndex, metadata.TensorProperties, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo)}
    table[("torch", "Size")] = torch.Size
    table[("torch.serialization", "_get_layout")] = torch.serialization._get_layout
    # Safe on a stranger's file: `table` makes DCP's plain records and looks up layouts; all else is an inert stand-in.
    value = restricted_pickle.load(path.read_bytes(), allow=Inert(table))
    if not isinstance(value, metadata.Metadata):
        raise UsageError(f"{path}: is no DCP metadata")
    edit(value)
    path.write_bytes(pickle.dumps(value))
