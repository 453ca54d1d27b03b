"""What a run of this trainer read at a step: sequences, and the documents that its spike events name.

`run.batches` is filled by `know_batches` and read by `diag.loss.blame`. A step that was no spike to the trainer has no
event; its sequences follow from the tokens read per step, and a command that names their documents is part of the fix.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_events import EventLog
from diag.series import Batch

if TYPE_CHECKING:
    from diag.artefacts import Artefacts
    from diag.series import Run

MAX_DOCUMENTS = 64


def know_batches(run: Run, artefacts: Artefacts) -> None:
    """Attach what the events and the configuration beside the metrics of `run` say about its batches."""
    if run.style != "pdtrain" or len(run.artefacts) != 1:
        return
    folder = run.artefacts[0].directory
    config = next((item for item in artefacts.of(RunConfig) if item.directory == folder), None)
    for log in artefacts.of(EventLog):
        if str(Path(log.directory).parent) != folder:
            continue
        for event in log.events:
            step = event.fields.get("step")
            if event.name == "spike" and isinstance(step, int):
                run.batches[step] = Batch(_pair(event.fields.get("sequences")), _names(event.fields.get("documents")))
    length = config.number("train.sequence_length") if config is not None else None
    tokens = run.get("consumed_tokens")
    if config is None or tokens is None or not length or not len(tokens) or tokens.steps[-1] <= 0:
        return
    size = float(tokens.values[-1]) / (float(tokens.steps[-1]) * length)
    if size == int(size) > 0:
        run.train_batch, run.config_path = int(size), config.path


def command_of(run: Run, step: int) -> str:
    """A command that prints the documents of `step`; empty where the run does not tell enough."""
    if not run.train_batch or run.config_path is None:
        return ""
    code = ("from pdtrain.config import load_run; from pdtrain.data import open_data; "
            f"[print(*s, sep='\\n') for s in open_data(load_run({run.config_path!r}))"
            f".documents_of_step({step}, {run.train_batch})]")
    return f"python -c {shlex.quote(code)}"


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and 0 <= v < 1 << 53 for v in value):
        return value[0], value[1]
    return None


def _names(value: object) -> list[str | int]:
    if not isinstance(value, list):
        return []
    return [name[:200] if isinstance(name, str) else name for name in value[:MAX_DOCUMENTS]
            if isinstance(name, (str, int))]
