"""A directory of many steps: which folders are checkpoints, of which step, and what the tracker names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

#: step_00000042 (this trainer), step-42 (torchtitan), step42 (OLMo), iter_0000042 (Megatron), global_step42
#: (DeepSpeed), checkpoint-42 (HF Trainer), checkpoint_42, epoch_3, ckpt_42
_STEP = re.compile(
    r"^(?:step|iter|iteration|global_step|checkpoint|ckpt|epoch|it|tag)[-_]?(?P<step>\d+)(?:[-_]universal)?$")
_LEFTOVER = re.compile(
    r"(?:\.|-|_)(?:tmp|temp|incomplete|partial|replaced|deleted|abandoned)(?:$|[-_.])|^(?:tmp|temp)[-_.]")
#: Files that name the newest checkpoint: this trainer and DeepSpeed, Megatron, nanotron, DeepSpeed universal.
TRACKERS = ("latest", "latest_checkpointed_iteration.txt", "latest.txt", "latest_universal")


@dataclass(frozen=True, slots=True)
class Step:
    """One folder of a directory of steps."""

    path: Path
    step: int | None
    leftover: bool = False


@dataclass(frozen=True, slots=True)
class Tracker:
    """What a tracker file says, and the folder it means (which may not be there)."""

    file: str
    text: str
    target: str


def step_of_name(name: str) -> int | None:
    """42 for step_00000042, step-42, iter_0000042, global_step42, checkpoint-42; None for other names."""
    match = _STEP.match(name)
    return int(match["step"]) if match else None


def is_leftover(name: str) -> bool:
    """Whether a name is of something a save left behind before it was complete."""
    return _LEFTOVER.search(name) is not None


def find(place: Place) -> list[Step]:
    """The step folders directly below, oldest first; `release` (Megatron) has no step."""
    found = []
    for name in place.names:
        path = place.folder / name
        if not path.is_dir():
            continue
        step = step_of_name(name)
        stem = re.split(r"\.|-tmp|_tmp", name)[0]
        if step is not None or name == "release":
            found.append(Step(path, step))
        elif is_leftover(name) and step_of_name(stem) is not None:
            found.append(Step(path, step_of_name(stem), leftover=True))
        elif is_leftover(name) and re.search(r"(\d+)$", name):
            found.append(Step(path, int(re.search(r"(\d+)$", name).group(1)), leftover=True))  # type: ignore[union-attr]
    return sorted(found, key=lambda s: (s.step if s.step is not None else -1, s.path.name))


def tracker(place: Place) -> Tracker | None:
    """The tracker file of a directory of steps."""
    for file in TRACKERS:
        if file in place.names:
            text = place.head(file, 4096).decode("utf-8", "backslashreplace").strip()
            target = text
            if file == "latest_checkpointed_iteration.txt" and text.isdigit():
                target = f"iter_{int(text):07d}"
            return Tracker(file, text, target)
    return None


def newest(place: Place) -> Path | None:
    """The folder that a resume would take: what the tracker names when it is there, else the newest step."""
    steps = [s for s in find(place) if not s.leftover]
    named = tracker(place)
    for step in steps:
        if named is not None and step.path.name == named.target:
            return step.path
    if named is not None and named.target and "/" not in named.target and (place.folder / named.target).is_dir() \
            and named.target not in ("", ".", ".."):
        return place.folder / named.target
    if steps:
        return steps[-1].path
    if "checkpoints" in place.names or "checkpoint" in place.names:
        from diag.checkpoints.formats import place_of

        below = place.folder / ("checkpoints" if "checkpoints" in place.names else "checkpoint")
        return newest(place_of(below)) if below.is_dir() else None
    return None
