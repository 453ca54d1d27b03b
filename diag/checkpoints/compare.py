"""`diff`: two checkpoints of any formats and layouts, tensor by tensor: the same weights?

Tensors meet by parameter and role. Where names differ by a container prefix only ("model.", "module."), the one that
makes most of them meet is cut. Values are compared piece by piece in blocks, so memory stays at a few blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diag.checkpoints import formats
from diag.checkpoints.canonical import Checkpoint, Tensor
from diag.checkpoints.dtypes import to_float32
from diag.checkpoints.naming import PREFIXES
from diag.checkpoints.report import input_of
from diag.checkpoints.verify.archives import Progress
from diag.checkpoints.verify.outcome import some
from diag.diagnose import build_report
from diag.errors import ArtefactError
from diag.schema import Finding, Report, Severity, Where

#: Elements compared at a time, of whole rows.
BLOCK = 1 << 22
MANY = 100
#: Names of one kind that are told in lines of their own; of more there is one line.
FEW = 6
Key = tuple[str, str]


@dataclass(slots=True)
class Difference:
    """How far two tensors are apart: largest |a - b|, squared norms of a - b and of a; `equal` bit for bit."""

    largest: float = 0.0
    squares: float = 0.0
    norm: float = 0.0
    equal: bool = True

    @property
    def relative(self) -> float:
        """|a - b| / |a|; infinite when a is zero and b is not, or one of them is not finite where the other is."""
        if math.isinf(self.squares):
            return math.inf
        return math.sqrt(self.squares / self.norm) if self.norm else (math.inf if self.squares else 0.0)


def compared(first: Path, second: Path, *, everything: bool = False, progress: Progress | None = None) -> Report:
    """The Report of `diag ckpt diff`. Differences are information, not faults: severity info, exit status 0.

    Raises `UsageError` and `ArtefactError`.
    """
    one, two = formats.read(first), formats.read(second)
    roles = None if everything else ("parameter", "buffer")
    masters = _without_weights(one) or _without_weights(two)
    ours, theirs = _keys(one, roles, masters), _keys(two, roles, masters)
    ours, theirs = _meet(ours, theirs)
    shared = [key for key in ours if key in theirs]
    lost = [key for key in ours if key not in theirs]
    new = [key for key in theirs if key not in ours]
    shapes, types, values, unread = [], [], [], []
    total = sum(ours[k].nbytes for k in shared)
    done = 0
    for key in shared:
        a, b = ours[key], theirs[key]
        if a.shape != b.shape:
            shapes.append((key, a, b))
        else:
            if a.dtype != b.dtype:
                types.append((key, a, b))
            try:
                values.append((key, difference(one, a, two, b)))
            except (ArtefactError, ValueError) as error:
                unread.append((key, str(error)))
        done += a.nbytes
        if progress is not None:
            progress(done, total)
    return _report(one, two, (lost, new, shapes, types, values, unread), ours, theirs)


def _keys(checkpoint: Checkpoint, roles: tuple[str, ...] | None, masters: bool) -> dict[Key, Tensor]:
    """(role, parameter) -> tensor; with `masters`, FP32 masters stand for the weights."""
    found: dict[Key, Tensor] = {(t.role, t.fqn): t for t in checkpoint.tensors.values() if not roles or t.role in roles}
    if masters:
        found |= {("parameter", t.fqn): t for t in checkpoint.tensors.values() if t.role == "master"}
    return found


def _without_weights(checkpoint: Checkpoint) -> bool:
    """DeepSpeed universal, and ZeRO-3, hold masters only."""
    return not any(t.role == "parameter" for t in checkpoint.tensors.values())


def _meet(ours: dict[Key, Tensor], theirs: dict[Key, Tensor]) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Both with a prefix cut from either side, the one under which most names meet."""

    def cut(table: dict[Key, Tensor], prefix: str) -> dict[Key, Tensor]:
        return {(role, name.removeprefix(prefix)): t for (role, name), t in table.items()}

    best = max(((a, b) for a in PREFIXES for b in PREFIXES),
               key=lambda p: (len(cut(ours, p[0]).keys() & cut(theirs, p[1]).keys()), -len(p[0]) - len(p[1])))
    return cut(ours, best[0]), cut(theirs, best[1])


def difference(one: Checkpoint, a: Tensor, two: Checkpoint, b: Tensor) -> Difference:
    """Compare two tensors of one shape. Raises `ArtefactError` when bytes of either are missing."""
    found = Difference()
    shape = a.shape
    row: int = math.prod(shape[1:]) if shape else 1
    step = max(1, BLOCK // max(1, row))
    for at in range(0, shape[0] if shape else 1, step):
        offsets = (at, *(0,) * (len(shape) - 1)) if shape else ()
        sizes = (min(step, shape[0] - at), *shape[1:]) if shape else ()
        x, y = one.read(a, offsets, sizes), two.read(b, offsets, sizes)
        if a.dtype == b.dtype and np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8)):
            found.norm += _squares(to_float32(x, a.type))
            continue
        found.equal = False
        left = to_float32(x, a.type).astype(np.float64, copy=False)
        right = to_float32(y, b.type).astype(np.float64, copy=False)
        # NaN and infinity in the same places are no difference; anywhere else nothing is further apart.
        with np.errstate(invalid="ignore"):
            delta = np.abs(left - right)
        if not np.isfinite(delta).all():
            alike = (left == right) | (np.isnan(left) & np.isnan(right))
            delta = np.where(alike, 0.0, np.where(np.isfinite(delta), delta, np.inf))
        found.largest = max(found.largest, float(delta.max(initial=0.0)))
        found.squares += float((delta * delta).sum())
        found.norm += _squares(left)
    return found


def _squares(array: Any) -> float:
    flat = np.abs(array.reshape(-1)).astype(np.float64, copy=False)
    if not np.isfinite(flat).all():
        flat = flat[np.isfinite(flat)]
    return float(flat @ flat)


def _report(one: Checkpoint, two: Checkpoint, parts: Any, ours: dict[Key, Tensor], theirs: dict[Key, Tensor]) -> Report:
    lost, new, shapes, types, values, unread = parts
    changed = [(key, d) for key, d in values if not d.equal]
    rounded = [(key, d) for key, d in changed if d.squares == 0.0]
    findings: list[Finding] = []

    def add(text: str, tensor: Tensor, severity: Severity = "info", **numbers: Any) -> None:
        chunk = tensor.chunks[0] if tensor.chunks else None
        findings.append(Finding(cause="ckpt_differs", severity=severity, role="context", confidence=1.0, summary=text,
                                where=Where(file=chunk.file if chunk else None),
                                numbers={"tensor": tensor.name, **numbers}))

    for key, a, b in shapes[:MANY]:
        add(f"{key[1]} is {list(a.shape)} in the first and {list(b.shape)} in the second", a, shapes=[list(a.shape),
                                                                                                   list(b.shape)])
    for keys, table, which in ((lost, ours, "first"), (new, theirs, "second")):
        if len(keys) <= FEW:
            for key in keys:
                add(f"{key[1]} ({key[0]}) is only in the {which}", table[key], only_in=which)
        else:
            names = [f"{key[1]} ({key[0]})" if key[0] != "parameter" else key[1] for key in keys]
            add(f"only in the {which}: {some(names, FEW)}", table[keys[0]], only_in=which,
                tensors=[key[1] for key in keys[:MANY]], count=len(keys))
    for key, why in unread[:MANY]:
        add(f"{key[1]} could not be compared: {why}", ours[key], severity="warning")
    same = not (lost or new or shapes or unread) and not [d for _, d in changed if d.squares != 0.0]
    rows = _modules(values)
    summary = f"{len(values):,} tensors compared: {len(values) - len(changed):,} equal bit for bit, " \
              f"{len(changed):,} not; {len(lost):,} only in the first, {len(new):,} only in the second, " \
              f"{len(shapes):,} of another shape, {len(types):,} of another type"
    findings.insert(0, Finding(cause="ckpt_differs", severity="info", role="context", confidence=1.0, summary=summary,
                               numbers={"same_weights": same, "equal": len(values) - len(changed),
                                        "changed": len(changed),
                                        "only_in_first": len(lost), "only_in_second": len(new), "shapes": len(shapes),
                                        "dtypes": len(types), "modules": rows[:MANY]}))
    report = build_report(findings, inputs=[input_of(one), input_of(two)])
    report.headline = _headline(same, bool(rounded or types), values, changed, bool(lost or new or shapes), summary)
    if unread and values:
        known = report.headline if changed or lost or new or shapes else "What could be read is the same."
        report.headline = f"{len(unread):,} of {len(unread) + len(values):,} tensors could not be read. {known}"
    if not values:
        report.verdict = "unknown"
    return report


def _headline(same: bool, retyped: bool, values: Any, changed: Any, structure: bool, summary: str) -> str:
    if not values:
        return "Nothing could be compared: no tensor is in both."
    if same:
        return f"The same weights: all {len(values):,} tensors " + (
            "are equal in value, some in another type." if retyped else "are equal bit for bit.")
    if structure and not changed:
        return f"Not the same: what both hold is equal, but {summary.partition('; ')[2]}."
    biggest = max(changed, key=lambda item: item[1].relative) if changed else None
    far = f"; furthest apart is {biggest[0][1]}" if biggest else ""
    if biggest and math.isinf(biggest[1].largest):
        far += ", which is NaN or infinite in one of them only"
    elif biggest and math.isfinite(biggest[1].relative):
        far += f", by {biggest[1].relative:.2g} of its norm"
    return f"Not the same weights: {len(changed):,} of {len(values):,} tensors differ{far}."


def _modules(values: list[tuple[Key, Difference]]) -> list[dict[str, Any]]:
    """Largest difference and relative norm per module, the furthest first."""
    found: dict[str, Difference] = defaultdict(Difference)
    counts: dict[str, int] = defaultdict(int)
    for (role, name), d in values:
        module = ".".join(name.split(".")[:-1]) or name
        module = module if role in ("parameter", "buffer") else f"{module} ({role})"
        held = found[module]
        held.largest = max(held.largest, d.largest)
        held.squares += d.squares
        held.norm += d.norm
        held.equal = held.equal and d.equal
        counts[module] += 1
    rows = [{"module": name, "tensors": counts[name], "max |Δ|": d.largest, "relative norm": d.relative,
             "equal": d.equal} for name, d in found.items()]
    return sorted(rows, key=lambda r: -float(r["relative norm"]))  # type: ignore[arg-type]
