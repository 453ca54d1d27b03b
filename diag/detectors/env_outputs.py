"""Saved outputs of nvidia-smi, ibstat and nccl-tests: the machine as somebody's tool described it.

Sees: what `pdtrain diag env` sees of GPUs and ports on the live machine, by the same checks; NVLink topology; wrong or
low results of nccl-tests where the hardware's floor is known. Cannot see: whether processes on a GPU are the job's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from diag.artefacts import Artefact, Artefacts
from diag.artefacts.ibstat import Ibstat
from diag.artefacts.nccl_tests import NcclTests, Run
from diag.artefacts.nvidia_smi import NvidiaSmi
from diag.artefacts.nvidia_smi_parts import Topology
from diag.detectors import NotChecked, detector
from diag.probes import hardware, host_checks_gpu, host_checks_network
from diag.probes.host_facts import HostFacts
from diag.probes.host_words import Place, plural, size
from diag.schema import Evidence, Finding, Where

#: Links of fewer GPUs than this have no majority.
LEAST_GPUS = 4
#: Below this two decimals of GB/s may be 0 on sound links.
LEAST_BYTES = 1 << 20


@detector("env", needs=NvidiaSmi, subject="output of nvidia-smi")
def env_nvidia_smi(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """GPUs and topology of every file."""
    for item in artefacts.of(NvidiaSmi):
        place = Place(HostFacts(gpus=item.gpus, driver=item.driver, driver_cuda=item.cuda, p2p=item.p2p), item.path,
                      live=False)
        for line, text in item.failures:
            lost = "device handle" in text or "lost" in text
            yield place.finding("gpu_fell_off_bus" if lost else "driver_mismatch", "error", f"nvidia-smi says: {text}",
                                at="nvidia-smi", text=text, line=line)
        if item.gpus:
            yield from host_checks_gpu.check(place)
        else:
            yield from host_checks_gpu.peers(place)
        for topology in item.topologies:
            yield from odd_links(place, topology)
        yield _seen(item, _gpus(item))


def odd_links(place: Place, topology: Topology) -> Iterator[Finding]:
    """Pairs of GPUs without NVLink, or with fewer links, where most pairs of the host have them."""
    if topology.gpus < LEAST_GPUS or not topology.pairs:
        return
    usual, count = Counter(topology.pairs.values()).most_common(1)[0]
    if not usual.startswith("NV") or count <= len(topology.pairs) * 2 // 3:
        return
    odd = {pair: cell for pair, cell in topology.pairs.items()
           if cell != usual and (not cell.startswith("NV") or int(cell[2:]) < int(usual[2:]))}
    if not odd:
        return
    shares = Counter(gpu for pair in odd for gpu in pair)
    worst, times = shares.most_common(1)[0]
    named = f"GPU {worst}" if times >= max(2, len(odd) // 2) and times > min(shares.values()) else \
        ", ".join(f"GPU {a}-{b}" for a, b in sorted(odd) if a < b)[:80]
    first = min(odd)
    yield place.finding("nvlink_error", "warning", f"{named}: {odd[first]} where the other pairs of the host have "
                        f"{usual}", at="nvidia-smi topo -m", text=f"GPU{first[0]} to GPU{first[1]}: {odd[first]}",
                        line=topology.rows.get(first[0]), gpus=[str(worst)], confidence=0.85, pairs=len(odd) // 2)


def _gpus(item: NvidiaSmi) -> str:
    names = Counter(gpu.name or item.cut_names.get(gpu.bus_id) or "GPU" for gpu in item.gpus)
    words = ", ".join(f"{count} × {name}" for name, count in names.items())
    topologies = f"{plural(len(item.topologies), 'topology') if len(item.topologies) == 1 else ''}" \
                 f"{f'{len(item.topologies)} topologies' if len(item.topologies) > 1 else ''}"
    peers = f"peer access of {plural(len(item.p2p), 'pair')} of GPUs" if item.p2p else ""
    driver = f"driver {item.driver}" if item.driver else ""
    failed = "nvidia-smi failed" if item.failures else ""
    return ", ".join(part for part in (words, driver, topologies, peers, failed) if part)


@detector("env", needs=Ibstat, subject="output of ibstat")
def env_ibstat(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Ports of every file."""
    for item in artefacts.of(Ibstat):
        place = Place(HostFacts(ib=item.ports), item.path, live=False)
        for line, text in item.failures:
            yield place.finding("ib_hca_failure", "warning", f"ibstat could not go on: {text}", at="ibstat", text=text,
                                line=line, confidence=0.7)
        active = sum(port.state == "Active" for port in item.ports)
        if item.problem and not active:
            yield NotChecked(f"ports of {item.path}: none that could be read is active, and the rest is missing")
        elif item.ports:
            yield from host_checks_network.ports(place, item.ports)
        yield _seen(item, f"{active} of {plural(len(item.ports), 'port')} active")


@detector("env", needs=NcclTests, subject="results of nccl-tests")
def env_nccl_tests(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """Wrong numbers, and bandwidth against the floor of the hardware, where one is known."""
    for item in artefacts.of(NcclTests):
        for run in item.runs:
            yield from nccl_run(item, run)


def nccl_run(item: NcclTests, run: Run) -> Iterator[Finding | NotChecked]:
    """One table."""
    place = Place(HostFacts(), item.path, live=False)
    wrong = [row for row in run.rows if row.wrong]
    name = run.operation or "the collective"
    if wrong or run.failed:
        count = sum(row.wrong or 0 for row in wrong) or run.out_of_bounds or 0
        words = f"{name} returned {count:,} wrong values" if wrong else \
            f"{name} did not pass its own check ({count:,} results out of bounds)"
        yield place.finding("collective_wrong_result", "error", words, at="nccl-tests", text=f"#wrong {count}",
                            line=wrong[0].line if wrong else None, confidence=0.95, wrong=count)
    top = max(run.rows, key=lambda row: (row.bytes, row.bus))
    gpus = plural(len(run.devices), "GPU") if run.devices else "an unknown number of GPUs"
    words = f"{run.operation or 'unknown operation'} of {size(top.bytes)} on {gpus} reaches {top.bus:g} GB/s (bus " \
            "bandwidth)"
    hosts, models = {host for _, host, _ in run.devices}, {name for _, _, name in run.devices}
    floor = hardware.floor_of(models.pop(), run.operation, len(run.devices), top.bytes) \
        if len(hosts) == 1 and len(models) == 1 else None
    large = [row.bus for row in run.rows if row.bytes >= LEAST_BYTES]
    if large and not any(large):
        copies = f", {len(run.devices)} times as rank 0" if len(run.devices) > 1 else ""
        yield NotChecked(f"bandwidth of {item.path}: it is 0 because each process ran on one GPU{copies} and sent to "
                         "nobody; start it with -g GPUS, or build it with MPI=1") if _alone(run) else \
            NotChecked(f"bandwidth of {item.path}: 0 at every size")
    elif floor is None:
        yield NotChecked(f"bandwidth of {item.path}: floor unknown for this hardware, operation and size")
    elif top.bus < floor.bus_bandwidth:
        yield place.finding("bandwidth_low", "warning", f"{words}; sound {floor.model} shows at least "
                            f"{floor.bus_bandwidth:g}", at="nccl-tests", text=f"busbw {top.bus}", line=top.line,
                            bus_bandwidth=top.bus, floor=floor.bus_bandwidth, source=floor.source)
    yield _seen(item, words)


def _alone(run: Run) -> bool:
    """Whether every process of `run` was the only one of its own communicator."""
    return bool(run.devices) and all(rank == 0 for rank, _, _ in run.devices)


def _seen(item: Artefact, words: str) -> Finding:
    """What a file describes, in one line; never a warning."""
    return Finding(cause="host_checked", role="context", severity="info", confidence=1.0, where=Where(),
                   summary=f"{item.path}: {words}", evidence=[Evidence(path=item.path, text=words)],
                   numbers={"standing": True})
