"""What `data.path` means: the standard library, text files, or token files; found by name, in a fixed order."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diag.errors import UsageError
from pdtrain.data.sources import COMPRESSED, RECORDS, TEXT, Source, kind


@dataclass(frozen=True, slots=True)
class Resolved:
    """`kind`: `library`, `text` or `indexed` (then `paths` are the prefixes, without .bin/.idx)."""

    kind: str
    label: str  #: as the user knows it
    paths: Sequence[Path] = ()
    names: Sequence[str] = ()

    def source(self, text_key: str) -> Source:
        return Source(self.paths, self.names, text_key)


def resolve(path: str | None) -> Resolved:
    """Find the files that `data.path` names.

    A directory is searched recursively for the known suffixes. A file that is named itself, or matched by a glob, is
    read as text whatever its suffix. PREFIX, PREFIX.bin and PREFIX.idx all name the same token files.

    Raises:
        UsageError: nothing is there, nothing there is of a known kind, or text and token files are mixed.
    """
    if path is not None and not path.strip():
        raise UsageError('data.path is empty; name a file, directory or glob, or leave it out ("none")')
    if path is None:
        return Resolved("library", "Python standard library sources")
    given = Path(path).expanduser()
    if given.is_dir():
        root, files = given, sorted(found for found in given.rglob("*") if found.is_file() and _known(found))
        if not files:
            raise UsageError(f"data.path: directory {path} holds no {_legal()} file")
    elif given.is_file():
        root, files = given.parent, [given]
    elif _companion(given).is_file():
        root, files = given.parent, [_companion(given)]
    else:
        matched = sorted(Path(found) for found in glob.glob(str(given), recursive=True))  # noqa: PTH207 - a glob may be absolute
        files = [found for found in matched if found.is_file()]
        if not files:
            raise UsageError(f"data.path: no file, directory or glob match at {path}")
        root = Path(os.path.commonpath([found.parent for found in files]))
    tokens = sorted({_prefix(found) for found in files if found.suffix in (".bin", ".idx")})
    text = [found for found in files if found.suffix not in (".bin", ".idx")]
    if tokens and text:
        raise UsageError(f"data.path: {path} mixes text ({text[0].name}) and token files ({tokens[0].name}.bin)")
    if tokens:
        names = [_name(prefix.with_name(prefix.name + ".bin"), root) for prefix in tokens]
        return Resolved("indexed", path, tokens, names)
    return Resolved("text", path, text, [_name(found, root) for found in text])


def _known(path: Path) -> bool:
    return kind(path) != "other" or path.suffix == ".idx"


def _legal() -> str:
    return f"{', '.join(TEXT + RECORDS)} (plain, {' or '.join(COMPRESSED)}) or .idx"


def _prefix(path: Path) -> Path:
    return path.with_suffix("")


def _companion(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
