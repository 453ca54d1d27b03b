"""How alike the experts of a layer are, from the weights of a checkpoint: copies of one expert are one expert.

Cosine of the angle between the weight vectors of two experts (all matrices of the expert together). Independent
initialisation gives 0 within 1/sqrt(elements); training moves experts apart, so copies stay recognisable for long only
if they started alike. Experts that were made by upcycling a dense model start as copies on purpose (arXiv 2212.05055).

Of large matrices a strided sample of `SAMPLE` elements is read, the same of every expert, from the mapped file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diag.checkpoints.canonical import Checkpoint, Tensor
from diag.checkpoints.dtypes import to_float32
from diag.checkpoints.naming import expert_family
from diag.errors import ArtefactError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Elements of each expert's matrix that are looked at, layers looked at (spread over the model), experts per layer.
SAMPLE = 16_384
MOST_LAYERS = 12
MOST_EXPERTS = 512
#: Stacked tensors larger than this are not read: reading a box copies it.
MOST_BYTES = 2 << 30
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Likeness:
    """One layer's experts. `near` pairs have a cosine of at least the asker's limit; `alike` are experts in such pairs.

    `median` and `highest`: of the cosine over all pairs.
    """

    layer: int
    experts: int
    median: float
    highest: float
    pair: tuple[int, int]
    alike: int


def likeness(checkpoint: Checkpoint, limit: float) -> list[Likeness]:
    """Each layer's experts compared in pairs; layers whose weights cannot be read are left out.

    Raises `ArtefactError` when none of the layers with experts can be read.
    """
    layers = _layers(checkpoint)
    chosen = sorted(layers)
    if len(chosen) > MOST_LAYERS:
        chosen = [chosen[round(i * (len(chosen) - 1) / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]
    found, error = [], None
    for layer in chosen:
        try:
            rows = _rows(checkpoint, layers[layer])
        except ArtefactError as damage:
            error = damage
            continue
        if rows is not None and len(rows) > 1:
            found.append(_compare(layer, rows, limit))
    if error is not None and not found:
        raise error
    return found


def _layers(checkpoint: Checkpoint) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.role != "parameter" or (tensor.expert is None and tensor.expert_axis != 0):
            continue
        if not tensor.type.is_float or (match := _LAYER.search(tensor.fqn)) is None:
            continue
        found.setdefault(int(match[1]), []).append(tensor)
    return found


def _rows(checkpoint: Checkpoint, tensors: list[Tensor]) -> npt.NDArray[np.float32] | None:
    """One row per expert [experts, elements], unit length."""
    import numpy as np

    parts: dict[str, list[Any]] = {}
    for tensor in sorted(tensors, key=lambda t: (t.expert if t.expert is not None else 0, t.name)):
        if tensor.expert is None:
            if tensor.nbytes <= MOST_BYTES and tensor.shape[0] <= MOST_EXPERTS:
                stack = checkpoint.read(tensor).reshape(tensor.shape[0], -1)
                parts[tensor.name] = [to_float32(_sample(row), tensor.type) for row in stack]
        elif tensor.expert < MOST_EXPERTS:
            values = checkpoint.read(tensor).reshape(-1)
            parts.setdefault(expert_family(tensor.fqn), []).append(to_float32(_sample(values), tensor.type))
    sizes = [len(rows) for rows in parts.values()]
    if not sizes:
        return None
    experts = max(set(sizes), key=sizes.count)
    same = [rows for rows in parts.values() if len(rows) == experts and len({len(row) for row in rows}) == 1]
    if not same:
        return None
    joined = np.concatenate([np.stack(rows) for rows in same], axis=1).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # damaged numbers are refused below, in silence
        lengths = np.linalg.norm(joined, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or (lengths == 0).any():
        return None
    return joined / lengths


def _sample(values: Any) -> Any:
    return values[:: max(1, len(values) // SAMPLE)]


def _compare(layer: int, rows: npt.NDArray[np.float32], limit: float) -> Likeness:
    import numpy as np

    cosines = rows @ rows.T
    upper = np.triu_indices(len(rows), 1)
    values = cosines[upper]
    top = int(values.argmax())
    np.fill_diagonal(cosines, -1.0)
    return Likeness(layer, len(rows), float(np.median(values)), float(values.max()),
                    (int(upper[0][top]), int(upper[1][top])), int((cosines.max(axis=1) >= limit).sum()))
