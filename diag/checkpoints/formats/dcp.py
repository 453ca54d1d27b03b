"""torch.distributed.checkpoint: `.metadata` says which tensor lies where, `__<rank>_<n>.distcp` hold the bytes.

Trees that are DCP inside: torchtitan's `step-N/`, accelerate's `pytorch_model_fsdp_0/` + `optimizer_0/`,
ByteCheckpoint's `model/` + `optimizer/`. `read_into` serves the readers of OLMo-core, Megatron's torch_dist and this
trainer as well.

Commit mark: `.metadata`, renamed from `.metadata.tmp` when all shards are written. Versions seen: torch 2.1 to 2.13.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from diag.checkpoints.canonical import Checkpoint, Chunk, Container, Item, Kind, Tensor
from diag.checkpoints.dcp_metadata import Digest, StorageEntry, read_metadata
from diag.checkpoints.dtypes import DTYPES
from diag.checkpoints.naming import RNG, annotate
from diag.checkpoints.steps import step_of_name
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "dcp"
METADATA = ".metadata"
_SHARD = re.compile(r"^__(?P<rank>\d+)_(?P<n>\d+)\.(?:distcp|safetensors)$")
_LOADER = re.compile(r"data_?loader|data_?iter|sampler|dataset_state", re.IGNORECASE)
_RANKED = re.compile(r"(?:dp_)?rank[_.]?(?P<rank>\d+)|\.(?P<index>\d+)$")
_MODULE = b"torch.distributed.checkpoint.metadata"


def metadata_name(place: Place) -> str | None:
    """The file that is this folder's DCP metadata: `.metadata`, or a file of another name that is one."""
    if METADATA in place.names:
        return METADATA
    for name in sorted(place.names):
        if name.endswith(("metadata", ".metadata.tmp")) and _MODULE in place.head(name):
            return name
    return None


def parts(place: Place) -> list[str]:
    """Prefixes of the DCP folders of this checkpoint: [""] or, for a tree of several, ["model/", "optimizer/"]."""
    if metadata_name(place) is not None or any(_SHARD.match(name) for name in place.names):
        return [""]
    found = []
    for name in sorted(place.names):
        below = place.folder / name
        if step_of_name(name) is None and below.is_dir() and (below / METADATA).is_file():
            found.append(f"{name}/")
    return found


def sniff(place: Place) -> bool:
    return bool(parts(place))


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when no metadata can be read."""
    checkpoint = Checkpoint(place.inside, NAME, committed=True, commit_mark=METADATA)
    prefixes = parts(place)
    for prefix in prefixes:
        read_into(checkpoint, prefix, metadata_name(place) if prefix == "" else METADATA)
    checkpoint.meta.framework = framework(checkpoint)
    checkpoint.meta.step = step_of_name(place.folder.name) if checkpoint.meta.step is None else checkpoint.meta.step
    return checkpoint


def framework(checkpoint: Checkpoint) -> str:
    """Whose keys these are, where they tell."""
    names = [*checkpoint.items, *checkpoint.tensors]
    if any(name.startswith(("train_state", "lr_scheduler", "dataloader.")) for name in names):
        return "torchtitan"
    return "torch"


def read_into(checkpoint: Checkpoint, prefix: str, metadata: str | None) -> Digest | None:
    """Add the DCP folder `prefix` to `checkpoint`; its digest, None when there is no readable metadata."""
    folder = checkpoint.folder
    present = {name for name in folder.names(prefix.rstrip("/")) if "/" not in name.removeprefix(prefix)}
    shards = {name for name in present if _SHARD.match(name.removeprefix(prefix))}
    checkpoint.files |= shards
    if metadata is None or metadata == f"{METADATA}.tmp":
        checkpoint.committed = False
        left = f"{prefix}{METADATA}.tmp" if f"{prefix}{METADATA}.tmp" in present else None
        what = f"{left} was never renamed: the save was interrupted" if left else "it was lost or the save interrupted"
        checkpoint.problem("commit mark", f"{len(shards):,} shards and no {prefix}{METADATA}: {what}",
                           file=left or f"{prefix}{METADATA}", cause="ckpt_incomplete")
        if left is None:
            _shards_alone(checkpoint, shards)
            return None
        metadata = f"{METADATA}.tmp"
    name = prefix + metadata
    checkpoint.files.add(name)
    checkpoint.expected.add(name)
    try:
        found = read_metadata(folder, name)
    except ArtefactError as error:
        if not shards and not checkpoint.tensors:
            raise ArtefactError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
        checkpoint.problem("metadata", f"{name} {str(error).removeprefix(f'{name}: ')}", file=name)
        _shards_alone(checkpoint, shards)
        return None
    checkpoint.meta.version = checkpoint.meta.version or found.version
    _fill(checkpoint, prefix, name, found)
    return found


def _fill(checkpoint: Checkpoint, prefix: str, metadata: str, found: Digest) -> None:
    places: dict[tuple[str, tuple[int, ...] | None], StorageEntry] = {}
    for entry in found.storage:
        key = (entry.name, entry.offset)
        if key in places:
            checkpoint.problem("names are unique", f"{metadata} places {entry.name} at offset {entry.offset} twice",
                               file=metadata, tensor=entry.name)
        places[key] = entry
    used: set[tuple[str, tuple[int, ...] | None]] = set()
    for item in found.tensors:
        if item.dtype not in DTYPES:
            checkpoint.problem("element types", f"{item.name} is of an unknown type, {item.dtype}", file=metadata,
                               tensor=item.name)
            continue
        tensor = annotate(Tensor(item.name, item.dtype, item.shape))
        for offsets, sizes in item.chunks:
            key = (item.name, offsets)
            where = places.get(key)
            used.add(key)
            if where is None:
                checkpoint.problem("every chunk has bytes", f"{metadata} places the chunk of {item.name} at "
                                   f"{list(offsets)} nowhere", file=metadata, tensor=item.name)
                continue
            container = _container(checkpoint, prefix, metadata, where)
            if container is not None:
                tensor.chunks.append(Chunk(offsets, sizes, container, rank=rank_of(where.file)))
        note_state(checkpoint, item.name)
        checkpoint.add(tensor)
    for name in found.objects:
        where = places.get((name, None))
        used.add((name, None))
        if where is None:
            checkpoint.problem("every chunk has bytes", f"{metadata} places the object {name} nowhere", file=metadata,
                               tensor=name)
            continue
        container = _container(checkpoint, prefix, metadata, where)
        if container is not None:
            checkpoint.items[name] = Item(name, container, rank=rank_of(where.file))
            note_state(checkpoint, name)
    for key in places.keys() - used:
        checkpoint.problem("every chunk has bytes", f"{metadata} places {key[0]} at {key[1]}, and describes no such "
                           "chunk", file=metadata, tensor=key[0])
    for flat, path in found.paths.items():
        if flat != ".".join(map(str, path)):
            checkpoint.problem("names are unique", f"{metadata} spells one key as {flat!r} and as "
                               f"{'.'.join(map(str, path))!r}", file=metadata, tensor=flat)
    ranks = {c.rank for t in checkpoint.tensors.values() for c in t.chunks if c.rank is not None}
    if ranks and checkpoint.meta.world is None and not prefix:
        checkpoint.meta.layout.setdefault("writers", max(ranks) + 1)


def note_state(checkpoint: Checkpoint, name: str) -> None:
    """Remember whose RNG or loader state `name` is."""
    match = _RANKED.search(name)
    rank = int(match["rank"] or match["index"]) if match else 0
    if RNG.search(name):
        checkpoint.meta.rng.add(rank)
    elif _LOADER.search(name):
        checkpoint.meta.loader.add(rank)


def rank_of(file: str) -> int | None:
    """The rank that wrote `__<rank>_<n>.distcp`."""
    match = _SHARD.match(file.rpartition("/")[2])
    return int(match["rank"]) if match else None


def _container(checkpoint: Checkpoint, prefix: str, metadata: str, where: StorageEntry) -> Container | None:
    try:
        file = checkpoint.folder.inside(where.file)
    except ArtefactError as error:
        checkpoint.problem("paths stay inside", f"{metadata} {error}", file=metadata, tensor=where.name)
        return None
    kind: Kind = "transformed" if where.transforms else "zip"
    if where.begin < 0 or where.length < 0:
        checkpoint.problem("byte ranges", f"{metadata} places {where.name} at bytes {where.begin} to "
                           f"{where.begin + where.length}", file=metadata, tensor=where.name)
        return None
    container = Container(prefix + file, where.begin, where.length, kind, where.name)
    checkpoint.expected.add(container.file)
    checkpoint.containers.append(container)
    return container


def _shards_alone(checkpoint: Checkpoint, shards: set[str]) -> None:
    """Without metadata nothing says what the shards hold; they are named, and their bytes are nobody's."""
    checkpoint.expected |= shards
