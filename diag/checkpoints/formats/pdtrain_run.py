"""This trainer's checkpoints: `step_<N>/` with DCP files and `manifest.json` (docs/checkpoints.md).

A checkpoint holds the rows of modules that were due; the manifest names the older folders that hold the others. Both
are read as one checkpoint, its root the folder of all steps. Commit mark: the manifest, and a name without `.tmp`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import xxhash

from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.files import Folder
from diag.checkpoints.formats import dcp
from diag.checkpoints.steps import is_leftover, step_of_name
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "pdtrain"
MANIFEST = "manifest.json"
FORMAT = "pdtrain.checkpoint/"


def sniff(place: Place) -> bool:
    if place.has(MANIFEST):
        return FORMAT.encode() in place.head(MANIFEST, 1 << 20)
    # The manifest was lost: the folder's name and its siblings still say whose it is.
    return place.has(dcp.METADATA) and place.folder.name.startswith("step_") and _siblings(place)


def _siblings(place: Place) -> bool:
    return any((item / MANIFEST).is_file() for item in place.folder.parent.glob("step_*") if item != place.folder)


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when neither manifest nor metadata can be read."""
    folder = place.folder.resolve()
    own = f"{folder.name}/"
    checkpoint = Checkpoint(Folder(folder.parent), NAME, committed=True, commit_mark=own + MANIFEST)
    meta = checkpoint.meta
    meta.framework, meta.step = "pdtrain", step_of_name(folder.name)
    manifest = _manifest(checkpoint, own)
    meta.rows = {row: step for row, name in manifest.get("rows",
                                                         {}).items() if (step := step_of_name(name)) is not None}
    for key in ("consumed", "world"):
        if isinstance(manifest.get(key), int):
            setattr(meta, key, manifest[key])
    meta.layout = {k: v for k, v in manifest.get("layout", {}).items() if isinstance(v, int)}
    meta.args = {"model": manifest.get("model", {}), "row_of": {}}
    if manifest and meta.consumed is None:
        checkpoint.problem("loader state", f"{own}{MANIFEST} has no 'consumed': the position in the data is lost",
                           file=own + MANIFEST, tensor="consumed", cause="ckpt_incomplete")
    if isinstance(manifest.get("step"), int) and meta.step is not None and manifest["step"] != meta.step:
        checkpoint.problem("steps equal", f"{own}{MANIFEST} says step {manifest['step']}, the folder is {folder.name}",
                           file=own + MANIFEST, cause="ckpt_bad_values")
    if is_leftover(folder.name):
        checkpoint.committed = False
    names = [own.rstrip("/"), *sorted({n for n in manifest.get("rows", {}).values() if n != folder.name})]
    for name in names:
        prefix = f"{name}/"
        rows = sorted(row for row, where in manifest.get("rows", {}).items() if where == name)
        if name != folder.name and not (folder.parent / name / dcp.METADATA).is_file():
            checkpoint.problem("files complete", f"{own}{MANIFEST} says that {', '.join(rows)} "
                               f"{'is' if len(rows) == 1 else 'are'} in {name}, which is missing or incomplete",
                               file=f"{prefix}{dcp.METADATA}", cause="ckpt_missing_shard")
            continue
        _read_folder(checkpoint, prefix, rows, older=name != folder.name)
    for name, said in (manifest.get("files") or {}).items():
        _promise(checkpoint, own, str(name), said)
    return checkpoint


def _read_folder(checkpoint: Checkpoint, prefix: str, rows: list[str], *, older: bool) -> None:
    """Tensors of one folder; of an older one only those that newer folders do not hold."""
    part = Checkpoint(checkpoint.folder, NAME)
    part.meta.args = {}
    has = checkpoint.folder.size(f"{prefix}{dcp.METADATA}") is not None
    dcp.read_into(part, prefix, dcp.METADATA if has else None)
    if part.committed is False:
        checkpoint.committed = False
    keep = {name: t for name, t in part.tensors.items() if not older or name not in checkpoint.tensors}
    used = {c.container.file for t in keep.values() for c in t.chunks}
    checkpoint.tensors |= keep
    checkpoint.items |= {name: item for name, item in part.items.items() if name not in checkpoint.items}
    checkpoint.containers += [c for c in part.containers if c.owner in keep or c.owner in part.items or not older]
    checkpoint.problems += [p for p in part.problems if not older or p.tensor is None or p.tensor in keep]
    checkpoint.expected |= (part.expected if not older else {f for f in part.expected if f in used}) | {
        f"{prefix}{dcp.METADATA}"}
    checkpoint.files |= part.files if not older else {f for f in part.files if f in used}
    if rows:
        checkpoint.meta.args["row_of"] |= dict.fromkeys(keep, rows[0])


def _manifest(checkpoint: Checkpoint, own: str) -> dict[str, Any]:
    """The manifest as a dictionary, {} when it is lost or damaged."""
    name = own + MANIFEST
    checkpoint.files.add(name)
    if checkpoint.folder.size(name) is None:
        checkpoint.committed = False
        checkpoint.problem("commit mark", f"{name} is missing: this folder was not committed, or lost it since",
                           file=name, cause="ckpt_incomplete")
        return {}
    try:
        found = json.loads(checkpoint.folder.bytes(name))
    except (ValueError, RecursionError) as error:
        checkpoint.problem("metadata", f"{name} is damaged: {error}", file=name)
        return {}
    if isinstance(found, dict) and found.get("checksum") and found["checksum"] != manifest_checksum(found):
        checkpoint.problem("digests", f"{name} does not have the checksum that it carries: it changed since", file=name)
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(v, str) for v in rows.values()):
        checkpoint.problem("metadata", f"{name} is damaged: it has no table of rows", file=name)
        return {}
    for row, where in list(rows.items()):
        if "/" in where or where in ("", ".", ".."):
            checkpoint.problem("paths stay inside", f"{name} places {row} in {where!r}, which leaves the folder; "
                                                    "refused",
                               file=name, tensor=row, cause="ckpt_hostile")
            del rows[row]
    for key in ("layout", "model", "files"):
        if not isinstance(found.get(key, {}), dict):
            checkpoint.problem("metadata", f"{name} is damaged: {key} is no table", file=name)
            found[key] = {}
    return dict(found)


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """xxh3-64 of the manifest's content without its own checksum, in canonical JSON."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _promise(checkpoint: Checkpoint, own: str, name: str, said: object) -> None:
    """One entry of the manifest's `files`: {"directory": hex} or {"sha256": hex}."""
    try:
        file = checkpoint.folder.inside(own + name)
    except ArtefactError as error:
        checkpoint.problem("paths stay inside", f"{own}{MANIFEST} {error}", file=own + MANIFEST, cause="ckpt_hostile")
        return
    checkpoint.expected.add(file)
    if isinstance(said, dict) and len(said) == 1:
        algorithm, value = next(iter(said.items()))
        checkpoint.digests[file] = (str(algorithm), str(value))
