"""Checkpoints that lie beside the logs of a run: which step a resume may take, without reading tensors.

For the post-mortem. It must stay cheap: directories are told by the names of their steps, structure alone is checked
(headers, metadata, file sizes, archives' directories), of the newest steps until one is whole, within the limits below.
What lies beyond them is named with the command that checks it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diag.checkpoints.steps import Step, step_of_name
from diag.schema import Evidence, Finding, Where

log = logging.getLogger(__name__)

#: Directories of steps, steps of each, files of a step and bytes of one metadata file that are looked at.
DIRECTORIES, STEPS, FILES, METADATA_BYTES = 4, 3, 2000, 32 << 20
#: No further step is begun after so many seconds.
SECONDS = 2.0
#: A step without its commit mark whose files are younger than this may be on its way.
WRITING_SECONDS = 120.0
#: Suffixes of files that hold tensors: where none of a step's is here, only its small files were copied.
_PAYLOAD = (".distcp", ".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def step_directories(files: Iterable[str], roots: Iterable[str]) -> list[Path]:
    """Directories below `roots` with folders named after steps, of which `files` holds something; each once."""
    found: dict[Path, None] = {}
    given = [Path(root) for root in roots]
    for folder in dict.fromkeys(Path(file).parent for file in files):
        root = next((root for root in given if folder.is_relative_to(root)), None)
        below = folder.relative_to(root).parts if root is not None else ()
        at = next((n for n, part in enumerate(below) if step_of_name(part) is not None), None)
        if root is not None and at is not None:
            found.setdefault(root.joinpath(*below[:at]))
    return list(found)


def beside(directories: list[Path]) -> tuple[list[Finding], list[str]]:
    """(a warning for each directory whose newest step is not whole, notes on what was not checked)."""
    findings: list[Finding] = []
    notes: list[str] = []
    until = time.monotonic() + SECONDS
    for directory in directories[:DIRECTORIES]:
        try:
            finding, note = _directory(directory, until)
        except Exception as error:  # a bug of ours here must not cost the post-mortem
            if os.environ.get("PDTRAIN_STRICT"):
                raise
            log.info("checkpoints in %s", directory, exc_info=error)
            finding, note = None, (f"the checkpoints in {directory}, on which pdtrain failed ({type(error).__name__}; "
                                   "please report this)")
        findings += [finding] if finding is not None else []
        notes += [note] if note else []
    if len(directories) > DIRECTORIES:
        notes.append(f"{len(directories) - DIRECTORIES:,} more folders of checkpoints; pdtrain diag ckpt verify PATH")
    return findings, notes


def _directory(directory: Path, until: float) -> tuple[Finding | None, str]:
    from diag.checkpoints import formats, steps
    from diag.errors import PdtrainError

    command = f"pdtrain diag ckpt verify {directory}"
    try:
        place = formats.place_of(str(directory))
        newest = sorted((s for s in steps.find(place) if not s.leftover), key=lambda s: s.step or 0, reverse=True)
        listed = [s for s in newest[:STEPS] if formats.reader_of(formats.place_of(s.path))]
    except (PdtrainError, OSError):
        return None, ""
    broken: list[tuple[Step, str]] = []
    writing = ""
    for step in listed:
        if time.monotonic() > until or _too_large(step.path):
            break
        look = _look(step.path)
        if look.writing:
            writing = f"{step.path}, which is being written or was interrupted just now"
        elif look.absent:
            return None, f"the checkpoints in {directory}, whose tensors are not here; where they are, {command}"
        elif look.why:
            broken.append((step, look.why))
        elif broken:
            return _finding(broken, step, command), writing
        else:
            return None, writing or f"the bytes of {step.path}, which has all it needs; {command} --deep reads them"
    else:
        return (_finding(broken, None, command) if broken else None), writing
    return (_finding(broken, None, command) if broken else None,
            writing or f"the {'older ' if broken else ''}checkpoints in {directory}, which are large; {command}")


def _finding(broken: list[tuple[Step, str]], safe: Step | None, command: str) -> Finding:
    step, why = broken[0]
    if safe is not None:
        go_on = f"{safe.path.name} before it is whole"
        fix = [f"Resume from {safe.path}", f"{command} --deep"]
    else:
        count = len(broken)
        others = "is the one" if count == 2 else f"are the {count - 1}"
        go_on = "it is the only one" if count == 1 else f"nor {others} before it"
        fix = [f"Find a step that is whole: {command} --deep"]
    return Finding(cause="ckpt_incomplete", severity="warning", role="context", confidence=0.9,
                   summary=f"The newest checkpoint, {step.path.name}, is not safe to resume from: {why}; {go_on}",
                   where=Where(file=str(step.path), step=step.step),
                   evidence=[Evidence(path=str(step.path), text=why)], fix=fix, numbers={"check": "structure"})


def _too_large(folder: Path) -> bool:
    count = 0
    for _, _, names in os.walk(folder):
        count += len(names)
        if count > FILES:
            return True
    metadata = folder / ".metadata"
    return metadata.is_file() and metadata.stat().st_size > METADATA_BYTES


@dataclass(frozen=True, slots=True)
class _Look:
    """What the structure of one step says: `why` it is not whole; its tensors are `absent`; somebody is `writing`."""

    why: str = ""
    absent: bool = False
    writing: bool = False


def _look(folder: Path) -> _Look:
    from diag.checkpoints import formats
    from diag.checkpoints.verify import Options, verify
    from diag.errors import PdtrainError

    try:
        checkpoint = formats.read(folder)
        wanted = sorted(checkpoint.expected | checkpoint.files)
        here = [name for name in wanted if checkpoint.folder.size(name) is not None]
        if not any(name.endswith(_PAYLOAD) for name in here):
            return _Look(absent=True)
        if checkpoint.committed is False:
            last = max(checkpoint.folder.path(name).stat().st_mtime for name in here)
            if time.time() - last < WRITING_SECONDS:
                return _Look(writing=True)
        outcomes = verify(checkpoint, Options(bytes=False))
    except (PdtrainError, OSError) as error:
        return _Look(str(error).removeprefix(f"{folder}: "))
    return _Look(next((p.text for o in outcomes for p in o.problems if p.severity == "error"), ""))
