"""What a list of shape mismatches says: another model-parallel degree, or another model."""

from __future__ import annotations

from diag.logs.view import Item
from diag.schema import Finding

#: Degrees that model parallelism comes in; another ratio is another vocabulary or another model.
DEGREES = {2, 4, 8, 16, 32, 64}
#: Tables whose size changes with the vocabulary alone.
VOCABULARY = ("embed", "wte", "lm_head", "output_layer", "word_embeddings", "tok_")


def refine_shapes(finding: Finding, items: list[Item]) -> None:
    """`ckpt_shape_mismatch` -> `ckpt_parallel_mismatch` when every tensor is a clean slice of, or composed of, the
    other. Layer norms are not split by tensor parallelism: a norm that differs means another width."""
    ratios: set[float] = set()
    inner = 0
    for item in items:
        if "saved" not in item.groups or "model" not in item.groups:
            continue
        saved, model = _shape(item.groups["saved"]), _shape(item.groups["model"])
        if len(saved) != len(model) or not saved:
            return
        changed = [(a, b) for a, b in zip(saved, model, strict=True) if a != b]
        name = item.groups.get("tensor", "")
        if len(changed) != 1 or "norm" in name or (len(saved) == 1 and "bias" not in name):
            return
        a, b = changed[0]
        ratio = max(a, b) / max(1, min(a, b))
        ratios.add(ratio)
        inner += not any(word in name for word in VOCABULARY)
    if len(ratios) == 1 and ratios <= DEGREES and inner:
        ratio = int(ratios.pop())
        finding.cause = "ckpt_parallel_mismatch"
        finding.confidence = 0.75
        finding.summary = f"Every tensor differs by exactly {ratio} times in one dimension: the checkpoint was saved " \
                          f"with another model-parallel degree ({finding.summary})"
        finding.numbers["ratio"] = ratio


def _shape(text: str) -> list[int]:
    return [int(n) for n in text.replace(" ", "").split(",") if n.isdigit()]
