"""Defects of description: the bytes are sound, what is said about them is not."""

from __future__ import annotations

import json
from typing import Any

from diag.checkpoints import zips
from diag.checkpoints.canonical import Chunk, Container, Tensor
from pdtrain.drill import edit
from pdtrain.drill.corrupt import Copy, Damage, kind


def _name(copy: Copy) -> str:
    metadata = copy.metadata()
    return str(metadata.relative_to(copy.root)) if metadata else ""


def _weight(copy: Copy, *roles: str) -> tuple[Tensor, Chunk] | None:
    found = copy.largest(*(roles or ("parameter", "master")))
    return found if found is not None and len(found[0].shape) > 0 else None


@kind("overlapping-ranges")
def overlapping_ranges(copy: Copy) -> Damage | None:
    """Two byte ranges share bytes."""
    metadata = copy.metadata()
    if metadata is not None:
        hit: list[str] = []

        def move(value: Any) -> None:
            placed = sorted(((i, s) for i, s in value.storage_data.items() if i.offset is not None),
                            key=lambda p: (p[1].relative_path, p[1].offset))
            for (_, before), (index, info) in zip(placed, placed[1:]):
                if before.relative_path == info.relative_path:
                    info.offset -= 64
                    hit.append(index.fqn)
                    return

        edit.edit_dcp(metadata, move)
        return Damage("", hit[0]) if hit else None
    found = _weight(copy)
    if found is None or found[1].container.kind != "safetensors":
        return None
    tensor, chunk = found
    changed: list[str] = []

    def shift(header: dict[str, Any]) -> None:
        names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        if len(names) > 1:
            begin, end = header[names[1]]["data_offsets"]
            header[names[1]]["data_offsets"] = [begin - 2, end - 2]
            changed.append(names[1])

    edit.safetensors_header(copy.file(chunk.file), shift)  # type: ignore[arg-type]
    return Damage(chunk.file, changed[0]) if changed else None


@kind("wrong-dtype")
def wrong_dtype(copy: Copy) -> Damage | None:
    """A tensor is called by another element type."""
    found = _weight(copy)
    if found is None:
        return None
    tensor, chunk = found
    metadata = copy.metadata_of(chunk)
    if metadata is not None:
        import torch

        def change(value: Any) -> None:
            properties = value.state_dict_metadata[tensor.name].properties
            properties.dtype = torch.float16 if properties.dtype == torch.bfloat16 else torch.bfloat16

        edit.edit_dcp(metadata, change)
        return Damage("", tensor.name)
    if chunk.container.kind == "safetensors":

        def relabel(header: dict[str, Any]) -> None:
            old = header[tensor.name]["dtype"]
            header[tensor.name]["dtype"] = {"BF16": "F16", "F16": "BF16", "F32": "I32"}.get(old, "F64")

        edit.safetensors_header(copy.file(chunk.file), relabel)  # type: ignore[arg-type]
        return Damage(chunk.file, tensor.name)
    if not edit.patch_pickle(copy.file(chunk.file), chunk.container, _other_storage):
        return None
    return Damage(chunk.file)


def _other_storage(data: bytes) -> bytes | None:
    for old, new in ((b"FloatStorage\n", b"ShortStorage\n"), (b"HalfStorage\n", b"ByteStorage\n"),
                     (b"BFloat16Storage\n", b"ComplexFloatSto\n")):
        at = data.find(b"torch\n" + old)
        if at >= 0 and len(old) == len(new):
            return data.replace(b"torch\n" + old, b"torch\n" + new, 1)
    return None


@kind("wrong-shape")
def wrong_shape(copy: Copy) -> Damage | None:
    """A tensor is said to have another shape."""
    found = _weight(copy)
    if found is None:
        return None
    tensor, chunk = found
    metadata = copy.metadata_of(chunk)
    if metadata is not None:
        import torch

        def grow(value: Any) -> None:
            entry = value.state_dict_metadata[tensor.name]
            entry.size = torch.Size((entry.size[0] + 1, *entry.size[1:]))

        edit.edit_dcp(metadata, grow)
        return Damage("", tensor.name)
    if chunk.container.kind == "safetensors":

        def turn(header: dict[str, Any]) -> None:
            shape = header[tensor.name]["shape"]
            header[tensor.name]["shape"] = shape[::-1] if shape != shape[::-1] else [*shape[:-1], shape[-1] + 1]

        edit.safetensors_header(copy.file(chunk.file), turn)  # type: ignore[arg-type]
        return Damage(chunk.file, tensor.name)
    if not edit.patch_pickle(copy.file(chunk.file), chunk.container, edit.swap_shape):
        return None
    return Damage(chunk.file)


@kind("duplicate-name")
def duplicate_name(copy: Copy) -> Damage | None:
    """Two things have one name."""
    found = _weight(copy)
    if found is None:
        return None
    tensor, chunk = found
    metadata = copy.metadata_of(chunk)
    if metadata is not None:
        others = [t.name for t in copy.checkpoint.tensors.values() if t.name != tensor.name and t.role == tensor.role
                  and any(copy.metadata_of(c) == metadata for c in t.chunks)]
        if not others:
            return None

        def collide(value: Any) -> None:
            value.state_dict_metadata[tensor.name] = value.state_dict_metadata.pop(others[0])

        edit.edit_dcp(metadata, collide)
        return Damage("", others[0])
    if chunk.container.kind == "safetensors":

        def twice(header: dict[str, Any]) -> str:
            entry = json.dumps({tensor.name: header[tensor.name]})
            return json.dumps(header)[:-1] + ", " + entry[1:]

        edit.safetensors_header(copy.file(chunk.file), twice)
        return Damage(chunk.file, tensor.name)
    return _same_members(copy, chunk.container)


def _same_members(copy: Copy, container: Container) -> Damage | None:
    """Two members of an archive under one name."""
    path = copy.file(container.file)
    data = path.read_bytes()
    storages = [m for m in zips.members(memoryview(data), container.offset, container.length)
                if m.name.partition("/")[2].startswith("data/")]
    for a, b in zip(storages, storages[1:]):
        if len(a.name) == len(b.name):
            edit.write_at(path, b.header + 30, a.name.encode())
            edit.write_at(path, b.entry + 46, a.name.encode())
            return Damage(container.file)
    return None


@kind("lost-step")
def lost_step(copy: Copy) -> Damage | None:
    """The step count of one parameter was not saved."""
    held = [t for t in copy.checkpoint.tensors.values() if t.role == "step" and t.chunks]
    metadata = copy.metadata()
    held = [t for t in held if metadata is None or copy.metadata_of(t.chunks[0]) == metadata]
    if metadata is not None and len(held) > 1:
        name = held[0].name

        def drop(value: Any) -> None:
            value.state_dict_metadata.pop(name)
            for index in [i for i in value.storage_data if i.fqn == name]:
                value.storage_data.pop(index)
            if isinstance(value.planner_data, dict):
                value.planner_data.pop(name, None)

        edit.edit_dcp(metadata, drop)
        return Damage("", name.rpartition(".")[0])
    if copy.checkpoint.format == "universal" and held:
        copy.file(held[0].chunks[0].file).unlink()
        return Damage(held[0].chunks[0].file)
    if copy.checkpoint.format == "deepspeed" and held:
        optimizers = [c for c in copy.checkpoint.containers if "optim_states" in c.file]
        if len(optimizers) > 1 and edit.patch_pickle(copy.file(optimizers[0].file), optimizers[0],
                                                     lambda data: edit.rename_key(data, "step")):
            return Damage(optimizers[0].file)
    return None


@kind("escaping-path")
def escaping_path(copy: Copy) -> Damage | None:
    """A recorded path leaves the checkpoint's folder."""
    metadata = copy.metadata()
    if metadata is not None:

        def point(value: Any) -> None:
            next(iter(value.storage_data.values())).relative_path = "../../../etc/passwd"

        edit.edit_dcp(metadata, point)
        return Damage(_name(copy))
    index = next((n for n in copy.checkpoint.files if n.endswith(".index.json")), None)
    if index is None:
        return None
    values = json.loads(copy.file(index).read_text())
    name = next(iter(values["weight_map"]))
    values["weight_map"][name] = "../../etc/passwd"
    copy.file(index).write_text(json.dumps(values))
    return Damage(index, name)
