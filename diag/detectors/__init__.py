"""Detectors: artefacts in, findings out. This folder is the registry: a new detector is a new file here.

    @detector("router", needs=MetricsLog, subject="router metrics")
    def moe_router_collapse(artefacts: Artefacts) -> Iterator[Finding]:
        '''What it sees, what it cannot see, thresholds with their public source.'''

A detector is a pure generator: no I/O, no clock, no globals, no print. It is called once, with everything that was
read, when at least one artefact of every class in `needs` is there (`wants` may be absent). Otherwise the report says
"router: not checked, no router metrics among the inputs": silence never reads as health. A detector that finds its
subject missing only after a look inside yields `NotChecked`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diag.artefacts import Artefact, Artefacts
from diag.schema import Finding


@dataclass(frozen=True, slots=True)
class NotChecked:
    """What could not be checked and why; ends in the report's `not_checked`, never as a warning."""

    reason: str


Generator = Callable[[Artefacts], Iterator[Finding | NotChecked]]


@dataclass(frozen=True, slots=True)
class Detector:
    """A registered detector. `topic` is the command that runs it alone (`diag <topic>`)."""

    name: str
    topic: str
    needs: tuple[type[Artefact], ...]
    wants: tuple[type[Artefact], ...]
    subject: str
    run: Generator


_REGISTRY: dict[str, Detector] = {}
_TOPIC = re.compile(r'^@detector\(\s*"([\w-]+)"', re.M)


def detector(
    topic: str,
    *,
    needs: type[Artefact] | tuple[type[Artefact], ...],
    wants: type[Artefact] | tuple[type[Artefact], ...] = (),
    subject: str,
) -> Callable[[Generator], Generator]:
    """Register a generator of findings. `subject` names its need in words, for "not checked, no <subject>"."""

    def register(run: Generator) -> Generator:
        name = run.__name__
        _REGISTRY[name] = Detector(name, topic, _tuple(needs), _tuple(wants), subject, run)
        return run

    return register


def _tuple(kinds: type[Artefact] | tuple[type[Artefact], ...]) -> tuple[type[Artefact], ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


@cache
def _load(topics: tuple[str, ...] | None) -> None:
    """Import the modules whose source names one of `topics`: the others may need what takes long to import."""
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        source = Path(__path__[0], f"{name}.py")
        named = set(_TOPIC.findall(source.read_text("utf-8"))) if topics is not None and source.is_file() else None
        if topics is None or named is None or named & set(topics):
            importlib.import_module(f"{__name__}.{name}")


def detectors(only: str | tuple[str, ...] | None = None) -> list[Detector]:
    """All detectors sorted by name, or those whose topic is (one of) `only`."""
    topics = (only,) if isinstance(only, str) else only
    _load(topics)
    return [d for _, d in sorted(_REGISTRY.items()) if topics is None or d.topic in topics]
