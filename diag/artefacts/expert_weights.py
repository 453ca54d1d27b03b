"""How alike the experts in a checkpoint are: this trainer's manifest.json beside its shards, and safetensors files.

    {"step": 200, "rows": {"experts": "step_00000200", ...}, ...}            the shards of row `experts` are compared
    <8 bytes><{"model.layers.0.mlp.experts.0.w1.weight": {...}, ...}>         the file's own experts are compared

Reading weights is `diag.checkpoints`' business; here they become one small fact per layer (`diag.experts`). A file
without experts is an artefact without layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from diag.artefacts import Artefact, Source, Unreadable
from diag.errors import ArtefactError, UsageError

if TYPE_CHECKING:
    from diag.experts import Likeness

NAME = "expert-weights"
#: Cosine from which two experts count as alike.
ALIKE = 0.9
MAX_MANIFEST = 1 << 20
_MANIFEST = (b'"rows"', b'"consumed"', b'"data_fingerprint"')
_EXPERTS = re.compile(rb'"[^"]{0,200}\bexperts\b[^"]{0,200}":\s*\{"dtype"')


@dataclass(kw_only=True)
class ExpertWeights(Artefact):
    """The experts of one checkpoint, by layer; `step` where the checkpoint says it."""

    step: int | None = None
    layers: list[Likeness] = field(default_factory=list)

    @property
    def run_directory(self) -> str:
        """The run directory of one of this trainer's checkpoints: RUN/checkpoints/step_N."""
        return str(Path(self.directory).parent.parent)


ARTEFACT = ExpertWeights


def sniff(head: bytes, name: str) -> float:
    """A manifest of this trainer, or a safetensors header that speaks of experts."""
    if name == "manifest.json" and all(key in head for key in _MANIFEST):
        return 0.9
    return 0.55 if head[8:9] == b"{" and name.endswith(".safetensors") and _EXPERTS.search(head) else 0.0


def read(source: Source) -> ExpertWeights | Unreadable:
    """Compare the experts of the checkpoint that `source` belongs to; damage is an `Unreadable` with its reason."""
    from diag.checkpoints import open_checkpoint
    from diag.experts import likeness

    def refuse(problem: str) -> Unreadable:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=problem)

    path = Path(source.path)
    if not path.is_file():
        return refuse("lies in no folder: the weights beside it cannot be read")
    step = None
    try:
        if source.name == "manifest.json":
            values = msgspec.json.decode(path.read_bytes()[:MAX_MANIFEST])
            step, rows = values.get("step"), values.get("rows")
            held = rows.get("experts") if isinstance(rows, dict) else None
            if held is not None and held != path.parent.name:  # its experts are those of an older checkpoint
                return ExpertWeights(path=source.path, format=NAME, bytes=source.bytes)
            checkpoint = open_checkpoint(path.parent)
        else:
            checkpoint = open_checkpoint(path)
        layers = likeness(checkpoint, ALIKE)
    except (ArtefactError, UsageError) as error:
        return refuse(str(error))
    except (ValueError, AttributeError, RecursionError):
        return refuse("is not valid JSON")
    return ExpertWeights(path=source.path, format=NAME, bytes=source.bytes, layers=layers,
                         step=step if isinstance(step, int) else None)
