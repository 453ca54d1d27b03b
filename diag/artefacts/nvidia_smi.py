"""Saved output of nvidia-smi: `-q`, the table, `-L`, `nvlink -s` and `-e`, `topo -m` and `-p2p`, `--query-gpu` as csv.

One file may hold several of them one below the other (a capture script, a bug report), with headings and Markdown
between. Seen: drivers 525 to 590, A10, RTX 4090, TITAN V, H100, H200 with MIG. Job scripts print such tables at the
beginning of a run's log: a file with other lines that look logged is left to the log reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diag.artefacts import Artefact, Source, Unreadable
from diag.artefacts.nvidia_smi_parts import Csv, Links, Query, Table, Topology, TopoReader
from diag.probes.host_facts import Gpu

NAME = "nvidia-smi"
MAX_BYTES = 64 << 20

_ANSI = re.compile(r"\x1b\[[\d;]*m")
_MARKS = re.compile(rb"=+NVSMI LOG=+|^\| NVIDIA-SMI [\d.]+|^# \$ nvidia-smi|^GPU \d+: .*\(UUID: ", re.M)
#: What the headings hold, to be looked for first: most files hold none of it.
_WORDS = (b"NVSMI LOG", b"NVIDIA-SMI", b"$ nvidia-smi", b"(UUID: ", b"GPU0")
_TOPO = re.compile(rb"^(?:\x1b\[4m|[ \t])*GPU0[ \t]+(?:GPU1|CPU Affinity|NIC0|mlx5_)", re.M)
_CSV = re.compile(rb"^[\w.]+(?: \[\w+\])?, [^\n]*(?:pci\.bus_id|driver_version|memory\.total|ecc\.errors|ecc\.mode"
                  rb"|utilization\.gpu|clocks_(?:throttle|event)_reasons|temperature\.gpu|pcie\.link)[^\n]*\n", re.M)
_LOGGED = re.compile(rb"NCCL (?:INFO|WARN)|Traceback \(most|\biteration +\d+/|^\[rank\d|\bloss[ :=]+\d|%\||NVRM: "
                     rb"|\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", re.M)


@dataclass(kw_only=True)
class NvidiaSmi(Artefact):
    """GPUs and topologies that the output describes; the later of two descriptions of one GPU counts."""

    driver: str = ""
    cuda: str = ""
    attached: int | None = None
    gpus: list[Gpu] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    p2p: dict[str, str] = field(default_factory=dict)
    #: names of GPUs that the table cut short, by bus id
    cut_names: dict[str, str] = field(default_factory=dict)
    #: line and text of what nvidia-smi could not do
    failures: list[tuple[int, str]] = field(default_factory=list)


ARTEFACT = NvidiaSmi
_FAILURE = re.compile(r"Unable to determine the device handle|NVIDIA-SMI has failed|Failed to initialize NVML"
                      r"|No devices were found")


def sniff(head: bytes, name: str) -> float:
    """One of the headings, and nothing that looks logged."""
    first = head.lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0] + b"\n"
    if not any(word in head for word in _WORDS) and b", " not in first or _LOGGED.search(head):
        return 0.0
    if _MARKS.search(head) or _TOPO.search(head):
        return 0.95
    return 0.97 if _CSV.match(first) else 0.0


def read(source: Source) -> NvidiaSmi | Unreadable:
    """Every part that is understood; GPUs of all parts joined by bus id, UUID or index."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes,
                          problem=f"is larger than {MAX_BYTES >> 20} MiB")
    found = NvidiaSmi(path=source.path, format=NAME, bytes=source.bytes)
    parts = (Query(), Table(), Links(), Csv())
    topo = TopoReader()
    number = 0
    for number, raw in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = _ANSI.sub("", raw)
        if _FAILURE.search(line):
            found.failures.append((number, line.strip()[:300]))
        for part in parts:
            if part.line(number, line):
                break
        topo.line(number, line)
    found.lines = number
    query, table = parts[0], parts[1]
    assert isinstance(query, Query) and isinstance(table, Table)
    found.cut_names = table.cut_names
    found.driver = query.driver or parts[1].driver or parts[3].driver
    found.cuda, found.attached = query.cuda or parts[1].cuda, query.attached
    for part in parts:
        for gpu in part.gpus:
            _join(found.gpus, gpu)
    found.topologies, found.p2p = [item for item in topo.found if item.pairs or not topo.p2p], topo.p2p
    if not (found.gpus or found.topologies or found.p2p or found.failures):
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="describes no GPU")
    described = len(query.gpus)
    if query.attached is not None and described and described < query.attached:
        found.problem = f"says that {query.attached} GPUs are attached and describes {described}: cut off"
        found.problem_severity = "warning"
    if query.odd:
        place, text = query.odd[0]
        found.problem = (found.problem + "; " if found.problem else "") + \
            f"line {place} is none that nvidia-smi writes: {text!r}"
        found.problem_severity = "warning"
    return found


def _join(known: list[Gpu], gpu: Gpu) -> None:
    """Add `gpu`, or what it says more than the description that is already there."""
    same = next((g for g in known if (g.bus_id and g.bus_id == gpu.bus_id) or (g.uuid and g.uuid == gpu.uuid) or
                 (not (g.bus_id and gpu.bus_id) and g.index == gpu.index)), None)
    if same is None:
        known.append(gpu)
        return
    for key in gpu.__struct_fields__:
        value = getattr(gpu, key)
        if key not in ("lines", "index") and value not in (None, "", [], {}) and \
                getattr(same, key) in (None, "", [], {}):
            setattr(same, key, value)
            if key in gpu.lines:
                same.lines[key] = gpu.lines[key]
    same.lines = gpu.lines | same.lines
