"""The facts of the host this process runs on. Each part may fail alone; what is not known stays absent."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diag.probes import host_gpu, host_network, host_pci, host_software, host_storage, host_system
from diag.probes.host_facts import HostFacts, Mount, Storage

#: How long the parts that ask subprocesses and resolvers may take together, beside the write probe's own limit.
WAIT_SECONDS = 8.0


def gather(path: str | None = None, *, root: Path = Path("/"), environ: Mapping[str, str] | None = None,
           nvml: Any = None, host: str | None = None) -> HostFacts:
    """Facts of this host; `path` is a directory whose write and fsync rate is measured (a checkpoint directory).

    `root`, `environ`, `nvml` and `host` replace the live machine's, for recorded ones.
    """
    begun = time.monotonic()
    environ = os.environ if environ is None else environ
    facts = HostFacts(host=host or socket.gethostname(), time=time.time())
    for name, setter in (("RANK", "ranks"), ("WORLD_SIZE", "world_size"), ("LOCAL_WORLD_SIZE", "local_ranks")):
        value = environ.get(name, "")
        if value.isdigit():
            setattr(facts, setter, [int(value)] if setter == "ranks" else int(value))
    results: dict[str, Any] = {}
    jobs = [threading.Thread(target=_sizes, args=(results, path, environ, root), daemon=True)]
    if path is not None:
        jobs.append(threading.Thread(target=_write, args=(results, path), daemon=True))
    for job in jobs:
        job.start()
    _part(facts, "gpus", host_gpu.gather, facts, nvml, root)
    _part(facts, "PCI", host_pci.gather, facts, root)
    _part(facts, "system", host_system.gather, facts, root)
    facts.nics, facts.ib = host_network.interfaces(root), host_network.ib_ports(root)
    facts.clock = host_system.clock()
    if root == Path("/"):
        _part(facts, "kernel log", host_system.kernel_log, facts)
        _part(facts, "names", host_network.names, facts, environ)
        facts.port = host_network.rendezvous(facts, environ)
    _part(facts, "software", host_software.gather, facts, environ, root)
    deadline = time.monotonic() + WAIT_SECONDS
    for job in jobs:
        job.join(max(deadline - time.monotonic(), 0.0))
    facts.mounts, facts.storage = results.get("mounts", []), results.get("storage")
    facts.seconds = time.monotonic() - begun
    return facts


def _part(facts: HostFacts, name: str, run: Any, *arguments: Any) -> None:
    """One part; a surprise in it is a note, not the end of the others."""
    try:
        run(*arguments)
    except Exception as error:
        if os.environ.get("PDTRAIN_STRICT"):
            raise
        facts.notes[name] = f"pdtrain's own check failed ({type(error).__name__}: {error}); please report this"


def watched(path: str | None, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The directories whose file systems a run needs, each once: (path, why)."""
    home = environ.get("HOME", "")
    rows = [(path or "", "checkpoints"), ("/", "system"), (environ.get("TMPDIR") or "/tmp", "temporary files"),  # noqa: S108
            (home, "home"), (environ.get("TRITON_CACHE_DIR", ""), "compiler cache"),
            (environ.get("TORCHINDUCTOR_CACHE_DIR", ""), "compiler cache"), (environ.get("HF_HOME", ""), "models")]
    found: dict[str, str] = {}
    for name, why in rows:
        if name and name not in found:
            found[name] = why
    return list(found.items())


def _sizes(results: dict[str, Any], path: str | None, environ: Mapping[str, str], root: Path) -> None:
    mounts: list[Mount] = host_storage.sizes(watched(path, environ))
    host_storage.describe(mounts, root)
    results["mounts"] = mounts


def _write(results: dict[str, Any], path: str) -> None:
    probe: Storage = host_storage.write(path)
    results["storage"] = probe
