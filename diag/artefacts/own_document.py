"""Files that pdtrain itself saves whole as JSON, with a schema's name at the beginning: probes, facts of a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from diag.artefacts import Source, Unreadable

#: The full matrix of 1,024 ranks takes about 150 MB; nobody measures that. A host needs a few hundred KiB.
MAX_BYTES = 64 << 20
_T = TypeVar("_T")


def names_schema(head: bytes, schema: str) -> float:
    """1 for a JSON object that names `schema` ("pdtrain.probe/1", in any version) near its beginning, else 0."""
    return 1.0 if head.lstrip().startswith(b"{") and f'"{schema.split("/")[0]}/'.encode() in head[:512] else 0.0


def whole(source: Source, decode: Callable[[bytes], _T], *, format_: str, noun: str) -> _T | Unreadable:
    """What `decode` makes of the whole file; `noun` says in a complaint what the file is not."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        return decode(data)
    except (ValueError, RecursionError) as error:
        return Unreadable(path=source.path, format=format_, bytes=source.bytes, problem=f"is not {noun}: {error}")
