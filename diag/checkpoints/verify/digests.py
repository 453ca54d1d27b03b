"""Files against the digests that a manifest, `integrity.json` or `SHA256SUMS` promises."""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from diag.checkpoints import zips
from diag.checkpoints.canonical import Checkpoint, Problem
from diag.checkpoints.verify.archives import Reader
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural
from diag.errors import ArtefactError

#: Files up to this size are hashed without --deep as well.
SMALL_BYTES = 8 << 20
_SUM = re.compile(r"^(?P<hex>[0-9a-f]{32,128}) [ *](?P<name>.+)$")
_SUMS = {"SHA256SUMS": "sha256", "SHA512SUMS": "sha512", "MD5SUMS": "md5"}
#: What `seal` writes first; where it was killed just then, the next one writes over it.
SCRATCH = "integrity.json.tmp"
#: The directory digest of a file whose archives are damaged.
UNREADABLE = "unreadable"
ALGORITHMS = ("sha256", "sha512", "sha1", "md5", "blake2b", "xxh3_128", "xxh128", "directory", "bytes")


def collect(checkpoint: Checkpoint) -> None:
    """Add what `integrity.json` (Megatron: {algorithm, files: {name: hex}}), checksum lists and the hub promise."""
    _downloaded(checkpoint)
    folder = checkpoint.folder
    if folder.size("integrity.json") is not None:
        try:
            said = json.loads(folder.bytes("integrity.json"))
            algorithm = str(said.get("algorithm", "sha256")).lower()
            for name, value in dict(said["files"]).items():
                _promise(checkpoint, "integrity.json", str(name), algorithm, str(value).lower())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            checkpoint.problem("digests", "integrity.json is damaged", file="integrity.json")
    for list_name, algorithm in _SUMS.items():
        if folder.size(list_name) is None:
            continue
        for line in folder.bytes(list_name).decode("utf-8", "backslashreplace").splitlines():
            match = _SUM.match(line.strip())
            if match is None and line.strip():
                checkpoint.problem("digests", f"{list_name} has a line that is no checksum: {line[:60]!r}",
                                   file=list_name)
            elif match is not None:
                _promise(checkpoint, list_name, match["name"].removeprefix("./"), algorithm, match["hex"])


#: Of huggingface_hub: a snapshot's files are links to blobs named by their SHA-256; `hf download --local-dir` notes
#: commit, SHA-256 and time of each file (small files that Git itself keeps have a SHA-1 there, not of the bytes).
_BLOB = re.compile(r"^(?:\.\./)+blobs/(?P<hex>[0-9a-f]{64})$")
_NOTES = ".cache/huggingface/download"
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


def _downloaded(checkpoint: Checkpoint) -> None:
    """Add the SHA-256 that the model hub promised for the files of a download.

    A file that was changed later than the note about it was changed on purpose, and the note is not held against it.
    """
    folder = checkpoint.folder
    for name in sorted(checkpoint.files | checkpoint.expected):
        path = folder.root / name
        try:
            link = _BLOB.match(path.readlink().as_posix()) if path.is_symlink() else None
            if link is not None:
                _promise(checkpoint, "the model hub's cache", name, "sha256", link["hex"])
            elif folder.size(note := f"{_NOTES}/{name}.metadata") is not None:
                lines = folder.bytes(note, 0, 4096).decode("utf-8", "replace").split("\n")
                if len(lines) > 2 and _SHA256.match(lines[1].strip()) and path.stat().st_mtime <= float(lines[2]) + 1:
                    _promise(checkpoint, note, name, "sha256", lines[1].strip())
        except (OSError, ValueError, ArtefactError):
            continue


def seal(checkpoint: Checkpoint) -> int:
    """Write `integrity.json` with the SHA-256 of every file of the checkpoint; how many. For formats that carry no
    checksums of their own. Raises `OSError`."""
    reader = Reader(checkpoint.folder)
    try:
        names = sorted(n for n in checkpoint.files | checkpoint.expected if checkpoint.folder.size(n) is not None)
        found = {name: digest(checkpoint, reader, name, "sha256") for name in names}
    finally:
        reader.close()
    target = checkpoint.folder.root / "integrity.json"
    scratch = target.with_name(SCRATCH)
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"algorithm": "sha256", "files": found}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    except BaseException:  # a full disk, Ctrl-C
        scratch.unlink(missing_ok=True)
        raise
    return len(found)


def _promise(checkpoint: Checkpoint, source: str, name: str, algorithm: str, value: str) -> None:
    try:
        checkpoint.digests.setdefault(checkpoint.folder.inside(name), (algorithm, value))
    except ArtefactError as error:
        checkpoint.problem("paths stay inside", f"{source} {error}", file=source)


def digests(checkpoint: Checkpoint, options: Options, problems: list[Problem]) -> str:
    """Every promised digest is met. Digests of whole files are computed with --deep, those of directories always."""
    if not checkpoint.digests and not problems:
        raise NotApplicable("no digests are promised (integrity.json, SHA256SUMS, manifest, a hub's download)")
    told = {p.file for p in checkpoint.problems if p.check in ("files complete",)}
    reader = Reader(checkpoint.folder)
    skipped = 0

    def work(item: tuple[str, tuple[str, str]]) -> tuple[str, str, str, str | None]:
        name, (algorithm, wanted) = item
        small = (checkpoint.folder.size(name) or 0) <= SMALL_BYTES
        if algorithm not in ("directory", "bytes") and not options.deep and not small:
            return name, algorithm, wanted, None
        return name, algorithm, wanted, digest(checkpoint, reader, name, algorithm)

    try:
        with ThreadPoolExecutor(max(1, options.threads)) as pool:
            for name, algorithm, wanted, got in pool.map(work, sorted(checkpoint.digests.items())):
                if checkpoint.folder.size(name) is None:
                    if name not in told:
                        problems.append(Problem("digests", f"{name} has a promised digest and is not there", name,
                                                cause="ckpt_missing_shard"))
                elif got is None:
                    skipped += 1
                elif got != wanted:
                    problems.append(Problem("digests", f"{name} is not what was saved: its "
                                                       f"{_WORDS.get(algorithm, algorithm)} "
                                            f"is {got[:16]}, promised was {wanted[:16]}", name,
                                            _first_tensor(checkpoint, name),
                                            (0, checkpoint.folder.size(name) or 0)))
    finally:
        reader.close()
    count = len(checkpoint.digests)
    return plural(count - skipped, "file") + (f"; {skipped:,} more with --deep" if skipped else "")


_WORDS = {"directory": "digest of all CRCs", "bytes": "size"}


def _first_tensor(checkpoint: Checkpoint, file: str) -> str | None:
    return next((t.name for t in checkpoint.tensors.values() for c in t.chunks if c.file == file), None)


def digest(checkpoint: Checkpoint, reader: Reader, name: str, algorithm: str) -> str | None:
    """Hex digest of a file, None when it is missing or the algorithm unknown."""
    size = checkpoint.folder.size(name)
    if size is None:
        return None
    if algorithm == "bytes":
        return str(size)
    if algorithm == "directory":
        return directory_digest(checkpoint, name)
    made: Any
    if algorithm in ("xxh3_128", "xxh128"):
        made = xxhash.xxh3_128()
    elif algorithm in ALGORITHMS:
        made = hashlib.new(algorithm)
    else:
        return None
    for block in reader.blocks(name, 0, size):
        made.update(block)
    return str(made.hexdigest())


def directory_digest(checkpoint: Checkpoint, name: str) -> str | None:
    """xxh3-128 over (name, size, CRC32) of every member of every archive in `name`, in order.

    Costs no reading of tensors, and changes when any tensor does: together with the CRC check it proves the file.
    """
    made = xxhash.xxh3_128()
    try:
        data = checkpoint.folder.map(name)
        for container in sorted((c for c in checkpoint.containers if c.file == name), key=lambda c: c.offset):
            for member in zips.members(data, container.offset, container.length):
                made.update(f"{member.name} {member.size} {member.crc:08x}\n".encode())
    except ArtefactError:
        return UNREADABLE
    return str(made.hexdigest())
