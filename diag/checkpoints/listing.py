"""`ls`: what a checkpoint holds, as a tree of modules, and what each rank wrote."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from diag.checkpoints import formats
from diag.checkpoints.canonical import Checkpoint, Tensor, boxes
from diag.checkpoints.naming import expert_family
from diag.checkpoints.report import input_of
from diag.diagnose import build_report
from diag.report.model import size
from diag.schema import Finding, Report, Where

#: Rows of a table in the report.
MANY = 400
OPTIMIZER = ("exp_avg", "exp_avg_sq", "step", "master")


@dataclass(slots=True)
class Node:
    """Everything below one module."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    state_bytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    splits: set[str] = field(default_factory=set)


def listed(path: str, depth: int = 3) -> Report:
    """The Report of `diag ckpt ls`. Raises `UsageError` and `ArtefactError`."""
    checkpoint = formats.read(path)
    tree = module_tree(checkpoint, depth)
    rows = [{"module": "  " * (name.count(".") + 1 if name else 0) + _last_part(name),
             "tensors": node.tensors, "parameters": node.elements, "weights": size(node.nbytes),
             "optimizer": size(node.state_bytes) if node.state_bytes else "", "dtype": " ".join(sorted(node.dtypes)),
             "split": " ".join(sorted(node.splits))} for name, node in tree.items()][:MANY]
    total = tree[""]
    meta = checkpoint.meta
    numbers: dict[str, Any] = {
        "parameters": total.elements, "weights_bytes": total.nbytes, "optimizer_bytes": total.state_bytes,
        "files": len(checkpoint.files), "objects": len(checkpoint.items), "modules": rows,
    }
    writers = balance(checkpoint)
    if len(writers) > 1:
        numbers["ranks"] = writers[:MANY]
        heaviest, mean = max(r["bytes"] for r in writers), sum(r["bytes"] for r in writers) / len(writers)
        numbers["heaviest over mean"] = round(heaviest / mean, 3) if mean else 1.0
    layout = " ".join(f"{axis} {n}" for axis, n in meta.layout.items())
    said = [f"{checkpoint.format}"] + ([f"step {meta.step:,}"] if meta.step is not None else []) + (
        [f"world {meta.world:,}"] if meta.world else []) + ([layout] if layout else [])
    finding = Finding(cause="ckpt_checked", severity="info", role="context", confidence=1.0,
                      summary=f"{', '.join(said)}: {total.elements:,} parameters in {total.tensors:,} tensors",
                      where=Where(step=meta.step), numbers=numbers)
    notes = [f"{p.check}: {p.text}" for p in checkpoint.problems[:10]]
    report = build_report([finding], inputs=[input_of(checkpoint)], not_checked=notes + ["the bytes: use verify"])
    report.headline = finding.summary + "."
    return report


def _last_part(name: str) -> str:
    return name.rpartition(".")[2] or ("(no name)" if name else "(all)")


def module_tree(checkpoint: Checkpoint, depth: int) -> dict[str, Node]:
    """Dotted module -> what is below it, to `depth` levels, in the checkpoint's order; "" is the whole.

    Experts that have a tensor each are counted under one row `experts.*`.
    """
    tree: dict[str, Node] = defaultdict(Node)
    tree[""] = Node()
    for tensor in checkpoint.tensors.values():
        if tensor.role == "state" and tensor.fqn == tensor.name and not tensor.name.endswith(("scale_inv", "scale")):
            continue
        name = expert_family(tensor.fqn)
        parts = name.split(".")
        for level in range(min(depth, len(parts)) + 1):
            node = tree[".".join(parts[:level])]
            if tensor.role in OPTIMIZER or tensor.role == "state":
                node.state_bytes += tensor.nbytes
                continue
            node.tensors += 1
            node.elements += tensor.elements if tensor.dtype else 0
            node.nbytes += tensor.nbytes
            node.dtypes.add(tensor.dtype or "?")
            node.splits.add(split_of(tensor))
    return {name: tree[name] for name in [""] + sorted(n for n in tree if n)}


def split_of(tensor: Tensor) -> str:
    """How a tensor is cut: "whole", "axis 0 / 4", "flat / 8", "axes 0, 1 / 8"."""
    found = list(boxes(tensor.chunks))
    pieces = sum(len(chunks) for _, _, chunks in found)
    if pieces <= 1:
        return "whole"
    if any(c.flat is not None for _, _, chunks in found for c in chunks) and len(found) == 1:
        return f"flat / {pieces}"
    axes = [d for d in range(len(tensor.shape)) if len({offsets[d] for offsets, _, _ in found}) > 1]
    return f"ax{'is' if len(axes) == 1 else 'es'} {', '.join(map(str, axes))} / {pieces}"


def balance(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Bytes and chunks that each rank wrote, where the files tell the rank."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in checkpoint.tensors.values():
        for chunk in (*tensor.chunks, *tensor.copies):
            if chunk.rank is not None and tensor.dtype:
                found[chunk.rank][0] += 1
                found[chunk.rank][1] += tensor.type.nbytes(chunk.elements)
    return [{"rank": rank, "chunks": count, "bytes": total} for rank, (count, total) in sorted(found.items())]
