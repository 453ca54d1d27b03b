"""Experts that are copies of each other, from the weights of checkpoints.

Sees: the cosine between the experts of each layer (`diag.experts`). Independent seeds give 0; one seed for all gives 1
at the start and falls as the experts part: in measured runs of this trainer 0.59 after 160 steps at a learning rate of
0.002, 0.16 at 0.01. So the checkpoint that shows the most counts. Cannot see: whether copies were meant, as when a
dense model is upcycled; so this is a warning that says both, and never an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from diag.artefacts import Artefacts
from diag.artefacts.expert_weights import ALIKE, ExpertWeights
from diag.detectors import NotChecked, detector
from diag.schema import Evidence, Finding, Where

#: Median cosine over all pairs of a layer from which its experts began as copies; trained experts of distinct seeds
#: stay below 0.05 in this trainer's runs.
COMMON_ORIGIN = 0.2
#: Below this in the newest checkpoint the experts have parted: information, not a warning.
PARTED = 0.1


@detector("router", needs=ExpertWeights, subject="checkpoint with expert weights")
def moe_identical_experts(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """One finding per run, over its checkpoints that hold experts."""
    groups: dict[str, list[ExpertWeights]] = {}
    for item in artefacts.of(ExpertWeights):
        if item.layers:
            groups.setdefault(item.run_directory, []).append(item)
    for items in groups.values():
        yield _judge(sorted(items, key=lambda item: item.step or 0))
    if not groups:
        yield NotChecked("no checkpoint among the inputs holds experts")


def _level(item: ExpertWeights) -> float:
    return max(layer.median for layer in item.layers)


def _judge(items: list[ExpertWeights]) -> Finding:
    newest, worst = items[-1], max(items, key=_level)
    sick = [layer for layer in worst.layers if layer.median >= COMMON_ORIGIN or 2 * layer.alike >= layer.experts]
    if not sick:
        highest = max(layer.highest for layer in newest.layers)
        return Finding(cause="healthy", role="context", severity="info", confidence=0.9, where=Where(module="experts"),
                       summary=f"Experts differ{_at(newest)}: the cosine between two is {_level(newest):.2f} in the "
                               f"median, {highest:.2f} at most.")
    top = max(sick, key=lambda layer: layer.median)
    state = "are near copies of each other" if _level(newest) >= ALIKE else "began as copies of each other"
    now = f", {_level(newest):.2f}{_at(newest)}" if newest is not worst else ""
    return Finding(
        cause="moe_identical_experts", severity="warning" if _level(newest) >= PARTED else "info", confidence=0.8,
        summary=f"The experts of {len(sick)} of {len(worst.layers)} layers {state}: in layer {top.layer} the cosine "
                f"between two experts is {top.median:.2f} in the median{_at(worst)}{now}; independent seeds give 0. "
                "One seed for all, unless a dense model was upcycled on purpose.",
        where=Where(module="experts", step=worst.step),
        evidence=[_evidence(item) for item in ([worst] if newest is worst else [worst, newest])],
        numbers={"layers": [{"layer": layer.layer, "experts": layer.experts, "median_cosine": layer.median,
                             "highest_cosine": layer.highest, "alike": layer.alike} for layer in worst.layers],
                 "median_over_layers": median(layer.median for layer in newest.layers)},
    )


def _at(item: ExpertWeights) -> str:
    return f" at step {item.step:,}" if item.step is not None else ""


def _evidence(item: ExpertWeights) -> Evidence:
    layer = max(item.layers, key=lambda layer: layer.median)
    text = f"{layer.experts} experts of layer {layer.layer}: cosine {layer.median:.3f} in the median, at most " \
           f"{layer.highest:.3f} (experts {layer.pair[0]} and {layer.pair[1]})"
    return Evidence(path=item.path, text=text)
