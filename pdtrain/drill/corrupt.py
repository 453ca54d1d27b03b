"""`pdtrain drill corrupt`: one defect in a copy of a checkpoint, as it happens to real ones.

Each kind is a function `(copy) -> Damage | None`; None where the format cannot have that defect. `Damage` says which
file and tensor `pdtrain diag ckpt verify` has to name. The original is not touched.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diag.checkpoints import formats, open_checkpoint, steps
from diag.checkpoints.canonical import Checkpoint, Chunk, Tensor
from diag.errors import ArtefactError, UsageError
from pdtrain.drill import edit


@dataclass(frozen=True, slots=True)
class Damage:
    """What was done: `file` relative to the checkpoint's root (empty: not one file), `tensor` where one is hit."""

    file: str
    tensor: str = ""
    text: str = ""


@dataclass(slots=True)
class Copy:
    """The copy to be damaged: `path` as the user would name it, `step` its step folder, read into `checkpoint`."""

    path: Path
    checkpoint: Checkpoint
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def root(self) -> Path:
        return self.checkpoint.folder.root

    def file(self, name: str) -> Path:
        return self.checkpoint.folder.path(name)

    def chunk(self, tensor: Tensor) -> Chunk | None:
        """The tensor's largest chunk, located."""
        for chunk in sorted(tensor.chunks, key=lambda c: -c.elements):
            try:
                return self.checkpoint.locate(tensor, chunk)
            except ArtefactError:
                continue
        return None

    def largest(self, *roles: str) -> tuple[Tensor, Chunk] | None:
        """The largest tensor of these roles (any by default) that has bytes; embeddings last."""
        found = sorted((t for t in self.checkpoint.tensors.values() if (not roles or t.role in roles) and t.dtype),
                       key=lambda t: (bool(re.search(r"embed|head|rng", t.name)), -max((c.elements for c in t.chunks),
                                                                                      default=0)))
        for tensor in found:
            chunk = self.chunk(tensor)
            if chunk is not None and chunk.nbytes > 0:
                return tensor, chunk
        return None

    def shards(self) -> list[str]:
        """Files with tensors in them, those with most first."""
        counts: dict[str, int] = {}
        for tensor in self.checkpoint.tensors.values():
            for chunk in tensor.chunks:
                counts[chunk.file] = counts.get(chunk.file, 0) + 1
        return sorted(counts, key=lambda f: (-counts[f], f))

    def metadata(self) -> Path | None:
        """The DCP metadata of the step, None for other formats."""
        name = next((f for f in sorted(self.checkpoint.expected) if f.rpartition("/")[2] == ".metadata"
                     and (f.count("/") == 0 or f.startswith(self.path.name) or not f.startswith("step_"))), None)
        return self.file(name) if name else None

    def metadata_of(self, chunk: Chunk) -> Path | None:
        """The DCP metadata that describes the chunk: this trainer's checkpoints have one per folder."""
        path = self.file(chunk.file).with_name(".metadata")
        return path if path.is_file() else None


Kind = Callable[[Copy], Damage | None]
KINDS: dict[str, Kind] = {}


def kind(name: str) -> Callable[[Kind], Kind]:
    """Register a defect under its name on the command line."""

    def register(function: Kind) -> Kind:
        KINDS[name] = function
        return function

    return register


def corrupt(path: Path, name: str, out: Path | None = None) -> tuple[Path, Damage]:
    """Copy the checkpoint (or directory of steps) at `path` and damage the copy. Returns its path and the damage.

    Raises `UsageError` for an unknown kind, an `out` that exists, and a format that cannot have the defect.
    """
    from pdtrain.drill import content, layout  # noqa: F401 - they register

    if name not in KINDS:
        raise UsageError(f"--kind {name!r}: choose one of {', '.join(sorted(KINDS))}")
    source = path.resolve()
    if not source.exists():
        raise UsageError(f"{path}: no such file or directory")
    target = (out or source.with_name(f"{source.name}.corrupt-{name}")).absolute()
    if target.exists():
        raise UsageError(f"{target}: exists; choose another folder with --out")
    if target.is_relative_to(source):
        raise UsageError(f"{target}: lies inside what is copied; choose another folder with --out")
    top, step = _what_to_copy(source)
    scratch = target.with_name(f".{target.name}.part")  # the name stands for a finished drill only
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        shutil.copytree(top, scratch)
        _make_writable(scratch)
        inner = scratch / step if step else scratch
        copy = Copy(inner, open_checkpoint(inner))
        damage = KINDS[name](copy)
        if damage is None:
            raise UsageError(f"--kind {name}: a checkpoint in the format {copy.checkpoint.format} cannot have this "
                             "defect, or this one has nothing it could hit")
        scratch.rename(target)
    except shutil.Error as error:  # a list of (source, destination, why)
        raise UsageError(f"{path}: cannot be copied: {error.args[0][0][2]}") from None
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        _make_writable(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    return target, damage


def _make_writable(folder: Path) -> None:
    """A copy of a write-protected checkpoint is protected too; it is to be changed, or removed."""
    for place, _, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in files)):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o700 if path.is_dir() else path.stat().st_mode | 0o200)


def _what_to_copy(source: Path) -> tuple[Path, str]:
    """(folder to copy, step folder in it): a directory of steps is copied whole, its newest step is hit."""
    if source.is_file():
        raise UsageError(f"{source}: name the checkpoint's folder")
    place = formats.place_of(source)
    if formats.reader_of(place) is None:
        newest = steps.newest(place)
        if newest is None:
            raise UsageError(f"{source}: no checkpoint that is known here")
        return source, str(newest.resolve().relative_to(source))
    return source, ""


# -- bytes ----------------------------------------------------------------------------------------------------------


@kind("cut-tail")
def cut_tail(copy: Copy) -> Damage | None:
    """The last bytes of a shard are gone: a copy that was not finished, a full disk."""
    names = copy.shards()
    if not names:
        return None
    size = copy.file(names[0]).stat().st_size
    with copy.file(names[0]).open("r+b") as file:
        file.truncate(max(1, size - max(64, size // 10)))
    return Damage(names[0])


@kind("flip-payload")
def flip_payload(copy: Copy) -> Damage | None:
    """One bit inside a tensor's data."""
    found = copy.largest("parameter", "master", "exp_avg")
    if found is None:
        return None
    tensor, chunk = found
    edit.flip(copy.file(chunk.file), chunk.begin + copy.dice.randrange(chunk.nbytes), 3)
    return Damage(chunk.file, tensor.name)


@kind("flip-header")
def flip_header(copy: Copy) -> Damage | None:
    """One bit in the header of what holds a tensor."""
    found = copy.largest()
    if found is None:
        return None
    tensor, chunk = found
    at = 2 if chunk.container.kind == "safetensors" else chunk.container.offset + 27  # a length, in both
    edit.flip(copy.file(chunk.file), at, 4)
    return Damage(chunk.file, tensor.name if chunk.container.owner else "")


@kind("zero-hole")
def zero_hole(copy: Copy) -> Damage | None:
    """A page of the file reads as zeros: a crash before the data reached the disk."""
    found = copy.largest("parameter", "master", "exp_avg")
    if found is None:
        return None
    tensor, chunk = found
    first = chunk.begin + (-chunk.begin % 4096)
    begin, end = (first, first + 4096) if first + 4096 < chunk.begin + chunk.nbytes else (
        chunk.begin, chunk.begin + max(1, chunk.nbytes // 2))
    edit.write_at(copy.file(chunk.file), begin, bytes(end - begin))
    return Damage(chunk.file, tensor.name)


@kind("nan")
def nan(copy: Copy) -> Damage | None:
    """One value is NaN, saved as such."""
    found = copy.largest("parameter", "master")
    if found is None or not found[0].type.is_float:
        return None
    tensor, chunk = found
    width = tensor.type.bits // 8
    data = bytearray(copy.file(chunk.file).read_bytes()[chunk.begin : chunk.begin + chunk.nbytes])
    data[:width] = b"\xff" * (width - 1) + b"\x7f"
    edit.replace_bytes(copy.checkpoint, chunk, bytes(data))
    return Damage(chunk.file, tensor.name)


@kind("hostile-pickle")
def hostile_pickle(copy: Copy) -> Damage | None:
    """A pickle that would run a (harmless) command takes the place of one of the checkpoint's own."""
    metadata = copy.metadata()
    if metadata is not None:
        metadata.write_bytes(edit.HOSTILE)
        return Damage(str(metadata.relative_to(copy.root)))
    name = next((f for f in copy.shards() if f.endswith((".pt", ".bin", ".pth"))), None)
    if name is None:
        return None
    with zipfile.ZipFile(copy.file(name), "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", edit.HOSTILE)
        archive.writestr("archive/version", "3\n")
    return Damage(name)


# -- trackers -------------------------------------------------------------------------------------------------------


@kind("tracker-ahead")
def tracker_ahead(copy: Copy) -> Damage | None:
    """The tracker names a step that was never finished."""
    place = formats.place_of(copy.path.parent)
    tracker = steps.tracker(place)
    if tracker is None:
        return None
    text = re.sub(r"\d+", lambda m: str(int(m[0]) + 7).zfill(len(m[0])), tracker.text, count=1)
    (place.folder / tracker.file).write_text(text)
    return Damage(tracker.file)


@kind("leftover-tmp")
def leftover_tmp(copy: Copy) -> Damage | None:
    """What an interrupted save leaves beside the files."""
    names = copy.shards()
    if not names:
        return None
    target = copy.file(names[0])
    shutil.copy(target, target.with_name(target.name + ".tmp"))
    return Damage(names[0] + ".tmp")


@kind("missing-shard")
def missing_shard(copy: Copy) -> Damage | None:
    """A file was never copied."""
    names = copy.shards()
    if not names or (len(names) == 1 and copy.checkpoint.format in ("safetensors", "plain")):
        return None
    copy.file(names[-1]).unlink()
    return Damage(names[-1])


@kind("swapped-shards")
def swapped_shards(copy: Copy) -> Damage | None:
    """Two shards of one kind lie under each other's names; of single states, the weights."""
    names = sorted(copy.shards(), key=lambda name: "exp_avg" in name)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    pair = next((sorted(g)[:2] for g in groups.values() if len(g) > 1), None)
    if pair is None:
        return None
    a, b = (copy.file(name) for name in pair)
    if a.read_bytes() == b.read_bytes():
        return None
    parked = a.with_name(a.name + ".swap")
    a.rename(parked)
    b.rename(a)
    parked.rename(b)
    return Damage(pair[0], text=pair[1])


@kind("missing-metadata")
def missing_metadata(copy: Copy) -> Damage | None:
    """The file that says what lies where is gone."""
    metadata = copy.metadata()
    if metadata is None:
        index = next((n for n in copy.checkpoint.files if n.endswith(".index.json")), None)
        if index is not None and len(copy.shards()) > 1:
            text = json.loads(copy.file(index).read_text())
            text.pop("weight_map")
            copy.file(index).write_text(json.dumps(text))
            return Damage(index)
        return None
    metadata.unlink()
    return Damage(str(metadata.relative_to(copy.root)))


@kind("stale-rank")
def stale_rank(copy: Copy) -> Damage | None:
    """A shard of an older save by more ranks was left in the folder."""
    pattern = re.compile(r"(?P<head>^__|/__|pp_rank_|mp_rank_|model-|expert_)(?P<n>\d+)")
    for name in sorted(copy.shards(), key=lambda n: "optim" not in n):
        match = pattern.search(name)
        if match is None or copy.checkpoint.format == "universal":
            continue
        number = str(int(match["n"]) + 64).zfill(len(match["n"]))
        target = name[: match.start("n")] + number + name[match.end("n") :]
        if "-of-" in name and not any(n.endswith(".index.json") for n in copy.checkpoint.files):
            return None
        copy.file(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(copy.file(name), copy.file(target))
        return Damage(target)
    return None


__all__ = ["KINDS", "Copy", "Damage", "corrupt", "kind", "np"]
