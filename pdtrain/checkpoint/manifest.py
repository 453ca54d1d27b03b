"""The manifest of one checkpoint and the folder rules around it. Plain files, no torch: the doctor's side can follow.

A checkpoint is `step_<N>/` with DCP files and `manifest.json`. It is written as `step_<N>.tmp/` and renamed when
everything is on disk, so a folder without the suffix is complete by construction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from diag.checkpoints.formats.pdtrain_run import manifest_checksum
from diag.errors import ArtefactError, UsageError

FORMAT = "pdtrain.checkpoint/1"
MANIFEST = "manifest.json"
LATEST = "latest"


class Manifest(msgspec.Struct, kw_only=True):
    """What a checkpoint holds.

    rows: policy row -> name of the checkpoint folder that holds its weights and optimizer states; a row that is saved
    rarely points to an older folder. consumed: training sequences used so far, the whole data position. files: name ->
    {algorithm: digest} of the folder's files (see `file_digests`); checksum: of the manifest itself.
    """

    step: int
    consumed: int
    rows: dict[str, str]
    world: int
    layout: dict[str, int]
    model: dict[str, Any]
    data_fingerprint: str
    seed: int
    time: float
    optimizer: str = "adamw"
    files: dict[str, dict[str, str]] = {}
    checksum: str = ""
    format: str = FORMAT


def folder_name(step: int) -> str:
    """`step_00000042`: sorts by step."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a committed checkpoint folder, None for any other name."""
    prefix, _, digits = folder.name.partition("_")
    return int(digits) if prefix == "step" and digits.isdigit() else None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises UsageError in one line when `folder` is not a complete checkpoint of this trainer.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise UsageError(f"{path} has format {manifest.format!r}; this version reads {FORMAT!r}")
    return manifest


def missing_parts(folder: Path, manifest: Manifest) -> list[str]:
    """Folders that the manifest refers to and that are not there or have no DCP metadata."""
    return sorted({name for name in manifest.rows.values() if not (folder.parent / name / ".metadata").is_file()})


def complete_checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """Every checkpoint under `root` that can be restored, oldest first. Anything doubtful is left out."""
    found = []
    for folder in sorted((p for p in root.glob("step_*") if step_of(p) is not None), key=lambda p: step_of(p) or 0):
        with contextlib.suppress(UsageError):
            manifest = read_manifest(folder)
            if not missing_parts(folder, manifest):
                found.append((folder, manifest))
    return found


def damaged_checkpoints(root: Path) -> list[tuple[Path, str]]:
    """Folders that have a checkpoint's name and cannot be restored, oldest first, each with the reason."""
    found = []
    for folder in sorted((p for p in root.glob("step_*") if step_of(p) is not None), key=lambda p: step_of(p) or 0):
        try:
            missing = missing_parts(folder, read_manifest(folder))
        except UsageError as error:
            found.append((folder, str(error)))
        else:
            if missing:
                found.append((folder, f"{folder} needs {', '.join(missing)}, which is missing or has no .metadata"))
    return found


def commit(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Make a written checkpoint visible: manifest, rename, then `latest`. Each step is atomic and synced.

    Everything that needs room on the disk is written before the first rename: a full disk leaves all as it was.
    Raises `OSError`, or `ArtefactError` when what was written is not there any more.
    """
    manifest.files = file_digests(temporary)
    manifest.checksum = manifest_checksum(msgspec.to_builtins(manifest))
    _write_synced(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    pointer = final.parent / f"{LATEST}.tmp"
    _write_synced(pointer, final.name.encode() + b"\n")
    replaced = final.with_name(final.name + ".replaced.tmp")
    if final.exists():  # an abandoned branch of an earlier run reached this step
        final.rename(replaced)
    temporary.rename(final)
    _sync_folder(final.parent)
    pointer.rename(final.parent / LATEST)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def file_digests(folder: Path) -> dict[str, dict[str, str]]:
    """Digests of what DCP wrote, for `pdtrain diag ckpt verify`.

    A shard carries the CRC32 of every tensor; its "directory" digest covers those, and costs no reading of tensors. The
    metadata, which carries none, is hashed whole. Raises `ArtefactError` for a file that is missing or cut: a digest of
    it would bless the damage.
    """
    from diag.checkpoints.canonical import Checkpoint
    from diag.checkpoints.files import Folder
    from diag.checkpoints.formats import dcp
    from diag.checkpoints.verify.digests import UNREADABLE, directory_digest

    written = Checkpoint(Folder(folder), "pdtrain")
    if not (folder / dcp.METADATA).is_file():
        raise ArtefactError(f"{folder / dcp.METADATA} is missing right after it was written")
    dcp.read_into(written, "", dcp.METADATA)
    unread = next((p for p in written.problems if p.check == "metadata"), None)
    if unread is not None:
        raise ArtefactError(f"{folder}: {unread.text}")
    found = {dcp.METADATA: {"sha256": hashlib.sha256((folder / dcp.METADATA).read_bytes()).hexdigest()}}
    for name in sorted(written.expected - {dcp.METADATA}):
        digest = directory_digest(written, name)
        if digest is None or digest == UNREADABLE:
            raise ArtefactError(f"{folder / name} is missing, cut or damaged right after it was written")
        found[name] = {"directory": digest}
    return found


def sweep(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints (0: keep all) and whatever those do not refer to.

    Folders that are not complete are never deleted here: they may be evidence.
    """
    if not keep:
        return
    complete = complete_checkpoints(root)
    needed = {folder.name for folder, _ in complete[-keep:]}
    needed |= {name for _, manifest in complete[-keep:] for name in manifest.rows.values()}
    for folder, _ in complete:
        if folder.name not in needed:
            doomed = folder.with_name(folder.name + ".deleted.tmp")
            folder.rename(doomed)  # out of sight first: a half-deleted folder must not look complete
            shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(root: Path) -> list[str]:
    """Delete `*.tmp` of an interrupted save; returns their names."""
    leftovers = sorted(p for p in root.glob("*.tmp"))
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in leftovers]


def set_aside_newer(root: Path, step: int) -> list[str]:
    """Rename checkpoints beyond `step` to `*.abandoned`: after a rewind they belong to another history."""
    names = []
    for folder in root.glob("step_*"):
        if (found := step_of(folder)) is not None and found > step:
            target = folder.with_name(f"{folder.name}.abandoned")
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            names.append(folder.name)
    return sorted(names)


def model_differences(saved: dict[str, Any], wanted: dict[str, Any], prefix: str = "model") -> list[str]:
    """`model.hidden: 256 in the checkpoint, 512 now` for every shape-giving key that differs."""
    lines = []
    for key in sorted(saved.keys() | wanted.keys()):
        old, new = saved.get(key), wanted.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += model_differences(old, new, f"{prefix}.{key}")
        elif old != new:
            lines.append(f"{prefix}.{key}: {json.dumps(old)} in the checkpoint, {json.dumps(new)} now")
    return lines


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
