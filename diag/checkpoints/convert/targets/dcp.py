"""torch.distributed.checkpoint: `__<rank>_0.distcp` and `.metadata`, for any number of ranks.

Every tensor is cut along its first axis that the ranks divide, experts first; what no axis divides is one piece on the
rank that has least. torch.distributed.checkpoint loads any cut into any mesh, so `--ranks` only decides how many files
there are and how big. This trainer's checkpoint gets its `manifest.json` as well, a folder `step_<N>` and `latest`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.convert.archive import add_archive
from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.pickles import Call, Global, New, Pairs, Stored, dumps, size
from diag.checkpoints.convert.plan import OutFile, Plan, Raw, box_of
from diag.checkpoints.convert.recipe import Ints, Recipe, whole
from diag.checkpoints.convert.source import SparingFolder
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.formats.dcp import METADATA, read_into
from diag.checkpoints.formats.pdtrain_run import MANIFEST, manifest_checksum
from diag.checkpoints.naming import stacked_expert_axis
from diag.checkpoints.steps import step_of_name
from diag.checkpoints.verify.digests import directory_digest

NAME = "dcp"
_METADATA = "torch.distributed.checkpoint.metadata"
#: A tensor of fewer elements is not cut: a header costs about a kilobyte.
_SMALL = 1024


def plan(contents: Contents, entries: dict[str, Entry], family: Family | None, options: Options) -> Plan:
    """Raises nothing of its own: DCP has a place for everything that has a name."""
    out = Plan()
    trainer = family is not None and family.name == "pdtrain" and bool(contents.manifest)
    if trainer and step_of_name(options.destination_name) is None and contents.step is not None:
        out.home = f"step_{contents.step:08d}"
    writer = DcpWriter(out, options.ranks)
    ours = family is not None and family.name == "pdtrain"
    rounded = 0
    for entry in entries.values():
        states = dict(entry.states)
        if ours or "weight" not in states:  # this trainer keeps FP32 alone
            rounded += "weight" in states and states["weight"].dtype != entry.main.dtype
            states = {"weight": entry.main} | {k: r for k, r in states.items() if k not in ("weight", "master")}
        if entry.step is not None:
            states["step"] = entry.step
        for state, recipe in states.items():
            writer.tensor(_key(entry, state, family), recipe)
    if rounded:
        out.dropped.append(f"the 16-bit weights of {rounded:,} parameters: this trainer keeps FP32 and rounds as it "
                           "computes")
    if family is None or family.name == contents.family:
        _others(contents, writer, out)
    elif contents.items or contents.other_tensors:
        others(contents, out)
    writer.metadata(METADATA)
    if trainer:
        _manifest(out, contents, options, sorted({file.name.rpartition("/")[2] for *_, file, _, _ in writer.places}))
    return out


def _key(entry: Entry, state: str, family: Family | None) -> str:
    return entry.keys[state] if state in entry.keys or family is None else family.key(entry.name, state)


def _others(contents: Contents, writer: DcpWriter, out: Plan) -> None:
    """Names stay as they are: scalars, RNG and loader states go over unchanged."""
    from diag.checkpoints.torch_zip import open_archive

    for tensor in contents.other_tensors:
        writer.tensor(tensor.name, whole(tensor))
    kept = 0
    for which, item in contents.items:
        container = item.container
        if container is None or container.kind != "zip" or item.name.endswith((".pt", ".bin")):
            continue
        open_archive(contents.source.checkpoints[which].folder, container)  # a hostile pickle is not handed on
        writer.object(item.name, Raw(which, container.file, container.offset, container.length))
        kept += 1
    if kept:
        out.carried.append(f"{kept:,} objects that are no tensors, as they are")


def others(contents: Contents, out: Plan) -> None:
    """Say that RNG, loader and argument objects stay behind: they belong to the old layout and trainer."""
    heads = Counter(re.split(r"[./]", name)[0] for name in (
        *(t.name for t in contents.other_tensors), *(item.name for _, item in contents.items)))
    if heads:
        listed = ", ".join(f"{head} ({count:,})" if count > 1 else head for head, count in heads.most_common(8))
        out.dropped.append(f"what is no weight or optimizer state: {listed}")


class DcpWriter:
    """Tensors and objects spread over `ranks` files, and the metadata that says where they are."""

    def __init__(self, plan: Plan, ranks: int) -> None:
        self.plan = plan
        self.files = [plan.file(f"__{rank}_0.distcp") for rank in range(ranks)]
        self.tensors: dict[str, tuple[Recipe, list[tuple[Ints, Ints]]]] = {}
        self.objects: list[str] = []
        self.places: list[tuple[str, Ints | None, OutFile, int, int]] = []

    def tensor(self, key: str, recipe: Recipe, cuts: list[tuple[int, Ints, Ints]] | None = None) -> None:
        """Add a tensor; `cuts` are (rank, offsets, sizes), by default of `cut`."""
        chunks = []
        for rank, offsets, sizes in cuts if cuts is not None else self.cut(key, recipe):
            file = self.files[rank]
            span = box_of(recipe, offsets, sizes)
            start, length = add_archive(file, Stored(recipe.dtype, sizes, (span,), span.nbytes, key))
            self.places.append((key, offsets, file, start, length))
            chunks.append((offsets, sizes))
        self.tensors[key] = (recipe, chunks)

    def cut(self, key: str, recipe: Recipe) -> list[tuple[int, Ints, Ints]]:
        """Equal pieces along the expert axis or the first that the ranks divide."""
        ranks, shape = len(self.files), recipe.shape
        least = min(range(ranks), key=lambda r: self.files[r].size)
        if ranks > 1 and recipe.elements >= max(_SMALL, ranks):
            axes = list(range(len(shape)))
            expert = stacked_expert_axis(key, shape)
            for axis in ([expert, *axes] if expert is not None else axes):
                if shape[axis] % ranks == 0:
                    step = shape[axis] // ranks
                    return [(r, tuple(r * step if a == axis else 0 for a in axes),
                             tuple(step if a == axis else n for a, n in enumerate(shape))) for r in range(ranks)]
        return [(least, (0,) * len(shape), shape)]

    def object(self, key: str, raw: Raw) -> None:
        """Add bytes that torch.save wrote, as they are."""
        file = min(self.files, key=lambda f: f.size)
        start = file.size
        file.add([raw], label=key)
        self.objects.append(key)
        self.places.append((key, None, file, start, raw.nbytes))

    def value(self, key: str, value: Any) -> None:
        """Add an object of plain data."""
        file = self.files[0]
        start, length = add_archive(file, value)
        self.objects.append(key)
        self.places.append((key, None, file, start, length))

    def metadata(self, name: str) -> None:
        """The `.metadata` as a commit mark."""
        def of(cls: str) -> Global:
            return Global(_METADATA, cls)

        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        memory = Call(of("_MEM_FORMAT_ENCODING"), (0,))
        state: dict[str, Any] = {}
        for key, (recipe, chunks) in self.tensors.items():
            properties = New(of("TensorProperties"), (Global("torch", recipe.dtype), layout, False, memory, False))
            listed = [New(of("ChunkStorageMetadata"), {"offsets": size(o), "sizes": size(s)}) for o, s in chunks]
            state[key] = New(of("TensorStorageMetadata"),
                             {"properties": properties, "size": size(recipe.shape), "chunks": listed})
        for key in self.objects:
            state[key] = New(of("BytesStorageMetadata"), {})
        value = New(of("Metadata"), {
            "state_dict_metadata": state, "planner_data": {key: (key,) for key in state},
            "storage_data": Pairs(self._storage()), "storage_meta": New(of("StorageMeta"), {
                "checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}),
            "version": "1.0.0"})
        self.plan.mark(name, dumps(value)[0])

    def _storage(self) -> list[tuple[New, New]]:
        """MetadataIndex -> _StorageInfo"""
        index = Global(_METADATA, "MetadataIndex")
        info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        found = []
        for key, offsets, file, start, length in self.places:
            where = {"fqn": key, "index": None} | ({"offset": size(offsets)} if offsets is not None else {})
            found.append((New(index, where), New(info, {
                "relative_path": file.name.rpartition("/")[2], "offset": start, "length": length})))
        return found


def _manifest(out: Plan, contents: Contents, options: Options, shards: list[str]) -> None:
    """manifest.json of this trainer, with every row here; `latest` where the folder is a step below the destination.

    Like the trainer's own it carries digests of the files and a checksum of itself: the first from the written folder.
    """
    folder = out.home or options.destination_name
    old = {key: value for key, value in contents.manifest.items() if key not in ("files", "checksum")}
    layout = {"tp": options.tp, "dp": max(options.ranks // options.tp, 1), "ep": options.ep}
    value = old | {"rows": dict.fromkeys(old.get("rows", {}), folder), "world": options.ranks,
                   "layout": layout | {"edp": max(options.ranks // options.ep, 1)}}
    if contents.step is not None:
        value["step"] = contents.step
    if contents.consumed is not None:
        value["consumed"] = contents.consumed
    stand_in = {METADATA: {"sha256": "0" * 64}} | {name: {"directory": "0" * 32} for name in shards}
    out.mark(MANIFEST, _sealed(value, stand_in), finished=lambda home: _sealed(value, _digests(home, shards)))
    if out.home:
        out.mark("latest", f"{out.home}\n".encode(), at_root=True)
    if len(set(old.get("rows", {}).values())) > 1:
        out.notes.append("the source's rows were saved at different steps; they are one checkpoint now")


def _sealed(manifest: dict[str, Any], files: dict[str, dict[str, str]]) -> bytes:
    value = manifest | {"files": files}
    return json.dumps(value | {"checksum": manifest_checksum(value)}, indent=2).encode()


def _digests(home: Path, shards: list[str]) -> dict[str, dict[str, str]]:
    """As `pdtrain.checkpoint.manifest.file_digests`: the CRC32s of a shard's tensors, the whole of the metadata."""
    written = Checkpoint(SparingFolder(home), "pdtrain")
    read_into(written, "", METADATA)
    return {METADATA: {"sha256": hashlib.sha256((home / METADATA).read_bytes()).hexdigest()}} | {
        name: {"directory": directory_digest(written, name) or ""} for name in shards}
