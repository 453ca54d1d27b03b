"""Peaks of memory by module, as pdtrain's recorder writes them on CPU: one JSON object, schema `pdtrain.memory/1`.

    {"schema": "pdtrain.memory/1", "rank": 0, "step": 3, "device": "cpu", "peak_bytes": 123456,
     "by_kind": {"Parameter": 1000, "Activation": 2000, ...},
     "modules": [{"module": "Transformer.layers.0.attention", "peak_bytes": 900, "parameter_bytes": 100,
                  "output_bytes": 50}, ...]}

`peak_bytes` of a module is the total that was alive at the fullest moment inside it, of everything on the device.
"""

from __future__ import annotations

import msgspec

from diag.artefacts import Source, Unreadable
from diag.artefacts.memory_snapshot import MemorySnapshot
from diag.errors import ArtefactError
from diag.memory.nouns import DeviceMemory, Share

NAME = "module-memory"
SCHEMA = "pdtrain.memory/1"
MAX_BYTES = 64 << 20
MAX_MODULES = 4000


class ModuleMemory(MemorySnapshot):
    """The answer of such a file: one device, no events."""


ARTEFACT = ModuleMemory


class _Module(msgspec.Struct):
    module: str
    peak_bytes: int
    parameter_bytes: int = 0
    output_bytes: int = 0


class _File(msgspec.Struct):
    schema: str
    peak_bytes: int
    device: str = "cpu"
    rank: int | None = None
    step: int | None = None
    by_kind: dict[str, int] = {}
    modules: list[_Module] = []


def sniff(head: bytes, name: str) -> float:
    """Certain when the schema's name stands in a JSON object's beginning."""
    return 0.97 if head.lstrip()[:1] == b"{" and b'"pdtrain.memory/1"' in head[:4096] else 0.0


def read(source: Source) -> ModuleMemory | Unreadable:
    """The module peaks in `source`; `Unreadable` with the reason where there are none."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ArtefactError(f"is longer than {MAX_BYTES:,} bytes; that is no file of module peaks")
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"is damaged: {error}") from error
    if found.schema != SCHEMA:
        raise ArtefactError(f"has the schema {found.schema[:80]!r}; {SCHEMA!r} is known here")
    modules = sorted(found.modules, key=lambda m: -m.peak_bytes)[:MAX_MODULES]
    device = DeviceMemory(
        device=found.device, peak_requested_bytes=found.peak_bytes, peak_allocated_bytes=found.peak_bytes,
        phases=[Share(name=name, bytes=held, blocks=0)
                for name, held in sorted(found.by_kind.items(), key=lambda item: -item[1])],
        modules=[Share(name=m.module, bytes=m.peak_bytes, blocks=0) for m in modules])
    step = f" of step {found.step:,}" if found.step is not None else ""
    return ModuleMemory(path=source.path, format=NAME, bytes=source.bytes, rank=found.rank,
                        ranks=[] if found.rank is None else [found.rank], layout=f"module peaks{step}",
                        devices=[device])
