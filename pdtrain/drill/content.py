"""Defects of content: values that no longer are the run's, sealed as if they were."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial

import numpy as np

from diag.checkpoints.canonical import Tensor
from diag.checkpoints.dtypes import to_float32
from diag.checkpoints.naming import expert_family
from pdtrain.drill import edit
from pdtrain.drill.corrupt import Copy, Damage, kind


@kind("cloned-expert")
def cloned_expert(copy: Copy) -> Damage | None:
    """An expert was saved over another."""
    families: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in copy.checkpoint.tensors.values():
        if tensor.expert is not None and tensor.role in ("parameter", "master") and len(tensor.shape) > 1:
            families[expert_family(tensor.name)].append(tensor)
    for members in families.values():
        if len(members) < 2:
            continue
        first, second = sorted(members, key=lambda t: t.expert or 0)[:2]
        pairs = [(copy.checkpoint.locate(first, a), copy.checkpoint.locate(second, b))
                 for a, b in zip(first.chunks, second.chunks)]
        if not pairs or any(a.nbytes != b.nbytes for a, b in pairs):
            continue
        for a, b in pairs:
            edit.replace_bytes(copy.checkpoint, b, bytes(copy.checkpoint.folder.bytes(a.file, a.begin, a.nbytes)))
        return Damage(pairs[0][1].file, second.name)
    for tensor in copy.checkpoint.tensors.values():
        if tensor.expert_axis is None or tensor.role != "parameter":
            continue
        axis, done = tensor.expert_axis, None
        by_place = {c.offsets: c for c in tensor.chunks}
        for chunk in tensor.chunks:  # experts 0 and 1 in one chunk, or in chunks of their own
            if chunk.offsets[axis] == 0 and chunk.sizes[axis] > 1 and axis == 0:
                data = np.array(copy.checkpoint.view(tensor, chunk))
                data[1] = data[0]
                edit.replace_bytes(copy.checkpoint, chunk, data.tobytes())
                done = done or chunk
            elif chunk.offsets[axis] == 0 and chunk.sizes[axis] == 1:
                place = tuple(1 if d == axis else o for d, o in enumerate(chunk.offsets))
                other = by_place.get(place)
                if other is not None:
                    data = np.array(copy.checkpoint.view(tensor, chunk))
                    copy.checkpoint.locate(tensor, other)
                    edit.replace_bytes(copy.checkpoint, other, data.tobytes())
                    done = done or other
        if done is not None:
            return Damage(done.file, tensor.name)
    return None


@kind("zeroed-moment")
def zeroed_moment(copy: Copy) -> Damage | None:
    """The first moment of one parameter was reset."""
    for tensor in copy.checkpoint.tensors.values():
        if tensor.role == "exp_avg" and tensor.elements > 1 and tensor.expert is None:
            for chunk in tensor.chunks:
                edit.replace_bytes(copy.checkpoint, copy.checkpoint.locate(tensor, chunk), bytes(chunk.nbytes))
            return Damage(tensor.chunks[0].file, tensor.name)
    return None


@kind("mixed-steps")
def mixed_steps(copy: Copy) -> Damage | None:
    """One part is of another step than the rest."""
    held = [t for t in copy.checkpoint.tensors.values() if t.role == "step" and t.elements == 1 and t.chunks]
    if len(held) > 1 or any(t.copies for t in held):
        tensor = held[-1] if len(held) > 1 else held[0]
        chunk = (tensor.chunks + tensor.copies)[-1]
        copy.checkpoint.locate(tensor, chunk)
        value = to_float32(np.array(copy.checkpoint.view(tensor, chunk)).reshape(1), tensor.type) + 1
        if tensor.dtype in ("float32", "int64", "float64", "int32"):
            edit.replace_bytes(copy.checkpoint, chunk, value.astype(tensor.type.held).tobytes())
            return Damage(chunk.file, tensor.name)
    for container in reversed(copy.checkpoint.containers):
        if container.kind == "zip" and edit.patch_pickle(copy.file(container.file), container,
                                                         lambda data: edit.bump_int(data, "iteration")):
            return Damage(container.file)
    return None


@kind("missing-loader")
def missing_loader(copy: Copy) -> Damage | None:
    """The state of one rank's data loader, or the position in the data, was not saved."""
    manifest = copy.path / "manifest.json"
    if manifest.is_file():
        values = json.loads(manifest.read_text())
        values.pop("consumed", None)
        values.pop("checksum", None)
        manifest.write_text(json.dumps(values))
        return Damage(str(manifest.relative_to(copy.root)))
    loaders = sorted(name for name in (*copy.checkpoint.items, *copy.checkpoint.tensors) if "dataloader" in name)
    metadata = copy.metadata()
    if metadata is not None and len(loaders) > 1:

        def drop(value: object) -> None:
            name = loaders[0]
            value.state_dict_metadata.pop(name)  # type: ignore[attr-defined]
            for index in [i for i in value.storage_data if i.fqn == name]:  # type: ignore[attr-defined]
                value.storage_data.pop(index)  # type: ignore[attr-defined]
            value.planner_data.pop(name, None)  # type: ignore[attr-defined]

        edit.edit_dcp(metadata, drop)
        return Damage(str(metadata.relative_to(copy.root)))
    for container in copy.checkpoint.containers:
        for key in ("data_loader", "consumed_train_samples"):
            if container.kind == "zip" and container.file.endswith(".pt") and edit.patch_pickle(
                    copy.file(container.file), container, partial(edit.rename_key, key=key)):
                return Damage(container.file)
    return None
