"""Link by link: the localiser of `diag.probes.localise`, run over the job's own store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from diag.errors import UsageError
from diag.probes.comm.ask import Ask
from diag.probes.comm.control import Control, Identity
from diag.schema import Finding

#: Largest saved probe that is read as a baseline.
MAX_BYTES = 64 << 20


@dataclass(slots=True)
class Located:
    """What rank 0 learnt of the links. `silent` are ranks that did not answer the localiser."""

    links: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def locate(ask: Ask, control: Control, rank: int, people: list[Identity], backend: str) -> Located | None:
    """Measure the links in `ask.mode`; the outcome on rank 0, None on the others. Every wait is bounded."""
    import torch.distributed as dist

    from diag.probes.comm.work import host_names
    from diag.probes.comm_pairs import locate_links
    from diag.probes.localise import Place
    from diag.probes.localise_findings import findings

    store = dist.PrefixStore("pdtrain-links", dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=max(ask.timeout, 60.0))))
    names = host_names(people)
    places = [Place(index, names[index], item.local_rank) for index, item in enumerate(people)]
    before = baseline(ask.baseline)
    try:
        outcome = locate_links(store, rank, places, backend=backend, mode=ask.mode or "quick",
                               passes=ask.passes, timeout=max(1.0, ask.timeout / 4), baseline=before,
                               progress=lambda *words: control.enter(" ".join(["links", *map(str, words)])[:60]))
    except UsageError as error:  # the conductor is gone: the heartbeats say who, and why
        raise RuntimeError(str(error)) from None
    if outcome is None:
        return None
    return Located(links=list(outcome.links), rounds=outcome.rounds, findings=list(findings(outcome)),
                   notes=list(outcome.notes))


def baseline(path: str | None) -> Any:
    """The links of a saved probe. Raises UsageError when it is none."""
    if path is None:
        return None
    from diag.probes.localise import read_baseline

    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        import msgspec

        value = msgspec.json.decode(data)
        if not isinstance(value, dict) or not value.get("links"):
            raise ValueError("it holds no links; save one with --thorough --save")
        return read_baseline(value)
    except OSError as error:
        raise UsageError(f"--baseline {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"--baseline {path}: is no saved probe: {error}") from None
