"""Experts that are copies of each other, from the weights of a checkpoint.

Sees: the cosine between the experts of each layer (`diag.experts`). Independent seeds give 0; one seed for all gives 1
at the start and, in a measured run of this trainer, still 0.55 after 160 steps. Cannot see: whether copies were meant,
as when a dense model is upcycled; so this is a warning that says both, and never an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.expert_weights import ALIKE, ExpertWeights
from diag.detectors import NotChecked, detector
from diag.schema import Evidence, Finding, Where

#: Median cosine over all pairs of a layer from which its experts began as copies.
COMMON_ORIGIN = 0.4


@detector("router", needs=ExpertWeights, subject="checkpoint with expert weights")
def moe_identical_experts(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """One finding per run: its newest checkpoint with experts."""
    newest: dict[str, ExpertWeights] = {}
    for item in artefacts.of(ExpertWeights):
        known = newest.get(item.run_directory)
        if item.layers and (known is None or (item.step or 0) >= (known.step or 0)):
            newest[item.run_directory] = item
    for item in newest.values():
        sick = [layer for layer in item.layers if layer.median >= COMMON_ORIGIN or 2 * layer.alike >= layer.experts]
        if not sick:
            highest = max(layer.highest for layer in item.layers)
            at = f" at step {item.step:,}" if item.step is not None else ""
            yield Finding(cause="healthy", role="context", severity="info", confidence=0.9,
                          where=Where(module="experts"),
                          summary=f"Experts differ{at}: the most similar two have a cosine of {highest:.2f}.")
            continue
        worst = max(sick, key=lambda layer: layer.median)
        state = "are near copies of each other" if worst.median >= ALIKE else "began as copies of each other"
        yield Finding(
            cause="moe_identical_experts", severity="warning", confidence=0.8,
            summary=f"The experts of {len(sick)} of {len(item.layers)} layers {state}: in layer {worst.layer} the "
                    f"cosine between two experts is {worst.median:.2f} in the median, 0 for independent seeds. "
                    "One seed for all, unless a dense model was upcycled on purpose.",
            where=Where(module="experts", step=item.step),
            evidence=[Evidence(path=item.path, text=f"layer {layer.layer}: {layer.experts} experts, cosine median "
                               f"{layer.median:.3f}, highest {layer.highest:.3f} (experts {layer.pair[0]} and "
                               f"{layer.pair[1]})") for layer in sorted(sick, key=lambda s: -s.median)[:3]],
            numbers={"layers": [{"layer": layer.layer, "experts": layer.experts, "median_cosine": layer.median,
                                 "highest_cosine": layer.highest, "alike": layer.alike} for layer in item.layers]},
        )
    if not newest:
        yield NotChecked("no checkpoint among the inputs holds experts")
