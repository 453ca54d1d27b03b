"""The `.metadata` of torch.distributed.checkpoint, read without torch: names, shapes, chunks and where they lie.

Small ones are unpickled here, after the opcode walk; large ones (ten thousand shards: millions of opcodes) in a child
process with limits. Either way the result is the same plain `Digest`.

Versions seen: torch 2.1 to 2.13 (`version` absent or "1.0.0"), Megatron-core's `mcore_data`, pathlib paths as
checkpoint_id, `all_local_plans` and `planner.*` attributes left in by forks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from diag.artefacts import guarded, restricted_pickle
from diag.checkpoints.files import Folder
from diag.checkpoints.torch_pickle import DtypeRef, Inert, Opaque, known_globals
from diag.errors import ArtefactError

#: Above this the walk over the opcodes (about 0.1 s per MiB) is left out and a child with limits reads it instead.
IN_PROCESS_BYTES = 2 << 20
LIMITS = guarded.Limits(seconds=120, memory=16 << 30)
_PICKLE = restricted_pickle.Limits(bytes=2 << 30, depth=64, nodes=1 << 28)


class TensorEntry(msgspec.Struct, array_like=True):
    """One tensor: `chunks` are (offsets, sizes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]


class StorageEntry(msgspec.Struct, array_like=True):
    """Where one chunk or object lies. `offset` is None for objects; `transforms` names compression extensions."""

    name: str
    offset: tuple[int, ...] | None
    file: str
    begin: int
    length: int
    transforms: tuple[str, ...] = ()


class Digest(msgspec.Struct):
    """All that is used of a `.metadata`. `paths`: flat key -> its path in the nested state dict; `foreign`: classes
    that are not torch's; `extra`: attributes that torch does not write."""

    tensors: list[TensorEntry] = []
    objects: list[str] = []
    storage: list[StorageEntry] = []
    paths: dict[str, list[str | int]] = {}
    version: str = ""
    foreign: list[str] = []
    extra: list[str] = []
    safetensors: bool = False


class _Bag:
    """Stands in for any of DCP's dataclasses; pickle fills its dictionary. As those, it is no key of a dictionary."""

    __hash__ = None  # type: ignore[assignment]


class _Metadata(_Bag):
    pass


class _TensorMetadata(_Bag):
    pass


class _BytesMetadata(_Bag):
    pass


class _Chunk(_Bag):
    pass


class _Index:
    """MetadataIndex is frozen: the one class that is a key."""


class _Info(_Bag):
    pass


class _Properties(_Bag):
    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) and state else getattr(state, "get", lambda _: None)("dtype")


_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES: dict[tuple[str, str], Any] = {
    (_MODULE, "StorageMeta"): Opaque, (_MODULE, "_MEM_FORMAT_ENCODING"): Opaque,
    (_MODULE, "Metadata"): _Metadata, (_MODULE, "TensorStorageMetadata"): _TensorMetadata,
    (_MODULE, "BytesStorageMetadata"): _BytesMetadata, (_MODULE, "ChunkStorageMetadata"): _Chunk,
    (_MODULE, "MetadataIndex"): _Index, (_MODULE, "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.distributed.checkpoint._fsspec_filesystem", "_StorageInfo"): _Info,
    ("torch.distributed.checkpoint._hf_utils", "_HFStorageInfo"): _Info,
}


#: Where the classes live that forks leave in their metadata (saved plans, device meshes).
_EXTRAS = ("torch.distributed.checkpoint.planner.", "torch.distributed.checkpoint.default_planner.",
           "torch.distributed._shard.", "torch.distributed.tensor.", "torch.distributed._tensor.",
           "torch.distributed.device_mesh.", "torch.distributed.fsdp.")


def read_metadata(folder: Folder, name: str) -> Digest:
    """The digest of `folder/name`. Raises `ArtefactError`."""
    size = folder.size(name) or 0
    if size <= IN_PROCESS_BYTES:
        return digest(folder.bytes(name), scanned=True)
    path = str(folder.path(name))
    for _, answer in guarded.run(f"{__name__}:digest_bytes", [guarded.File(path)], limits=LIMITS):
        if isinstance(answer, guarded.Failed):
            raise ArtefactError(answer.problem)
        return msgspec.msgpack.decode(answer, type=Digest)
    raise ArtefactError("could not be read")


def digest_bytes(data: bytes, _: str) -> bytes:
    """`digest` for a guarded child: bytes in, bytes out."""
    return msgspec.msgpack.encode(digest(data, scanned=False))


def digest(data: bytes, *, scanned: bool) -> Digest:
    """What the pickle `data` says. Raises `ArtefactError` when it is damaged, hostile or no DCP metadata."""
    allow = Inert(known_globals() | _CLASSES)
    # Safe on a stranger's file: it resolves nothing but plain types and the inert stand-ins of `allow`, within limits.
    value = restricted_pickle.load(data, allow=allow, limits=_PICKLE, scanned=scanned)
    if not isinstance(value, _Metadata):
        raise ArtefactError("is a pickle, but not the metadata of a distributed checkpoint")
    try:
        found = _digest(vars(value))
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise ArtefactError(f"is damaged: a part of it is not what it should be ({type(error).__name__})") from None
    for name in sorted(allow.seen):
        if name.startswith("torch.") and not name.startswith(_EXTRAS):
            raise ArtefactError(f"is damaged: it asks for {name}, which is not a part of torch's metadata")
    found.foreign = sorted(n for n in allow.seen if not n.startswith(("torch.", "megatron.")))
    return found


def _digest(parts: dict[str, Any]) -> Digest:
    out = Digest(version=str(parts.get("version") or ""))
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    out.extra = sorted(str(key) for key in parts.keys() - known)
    for name, entry in parts["state_dict_metadata"].items():
        _text(name)
        if isinstance(entry, _TensorMetadata):
            held = vars(entry)
            dtype = held["properties"].dtype
            if not isinstance(dtype, DtypeRef):
                raise ArtefactError(f"is damaged: {name} has no element type")
            sound = isinstance(held["properties"], _Properties) and all(isinstance(c, _Chunk) for c in held["chunks"])
            if not sound:
                raise ArtefactError(f"is damaged: a part of {name} is of the wrong class")
            chunks = [(_ints(c.offsets), _ints(c.sizes)) for c in held["chunks"]]
            out.tensors.append(TensorEntry(name, dtype.name, _ints(held["size"]), chunks))
        elif isinstance(entry, _BytesMetadata):
            out.objects.append(name)
        else:
            raise ArtefactError(f"is damaged: {name} is neither a tensor nor an object")
    for index, info in (parts.get("storage_data") or {}).items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise ArtefactError("is damaged: an entry of its places is of the wrong class")
        held, place = vars(index), vars(info)
        offset = held.get("offset")
        if "relative_path" not in place:
            raise ArtefactError(f"is damaged: {held['fqn']} has no place")
        if "offset" not in place:  # the Hugging Face writer of DCP
            out.safetensors = True
            place = place | {"offset": 0, "length": -1}
        out.storage.append(StorageEntry(
            _text(held["fqn"]), None if offset is None else _ints(offset), _text(place["relative_path"]),
            _integer(place["offset"]), _integer(place["length"]),
            tuple(map(str, place.get("transform_descriptors") or ()))))
    planner = parts.get("planner_data")
    if isinstance(planner, dict):
        for flat, path in planner.items():
            if isinstance(path, tuple) and isinstance(flat, str):
                out.paths[flat] = [p if isinstance(p, (str, int)) else str(p) for p in path]
    return out


def _ints(values: Any) -> tuple[int, ...]:
    if not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
        raise ArtefactError("is damaged: a shape or offset is not a row of whole numbers")
    return tuple(values)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise ArtefactError("is damaged: a place in a file is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ArtefactError("is damaged: a name is no text")
    return value
