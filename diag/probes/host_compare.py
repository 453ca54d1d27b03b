"""The hosts of one job side by side: what should be the same everywhere and is not, and who is the odd one out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from diag.probes.host_facts import HostFacts
from diag.probes.host_words import Place, size
from diag.schema import Evidence, Finding, Severity, Where

#: Clocks of two hosts this far apart order nothing (host_checks_system.SKEW_MOST judges each against rank 0).
#: Values that differ by less than this share are the same: memory that firmware reserved differently.
SAME_SHARE = 0.02
_ABSENT = "-"
#: With more hosts the table shows the odd ones only, beside the usual value.
MAX_COLUMNS = 6


def _gpus(facts: HostFacts) -> str:
    counts = Counter(gpu.name or "?" for gpu in facts.gpus)
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())) or "none"


def _ecc(facts: HostFacts) -> str:
    modes = {gpu.ecc_enabled for gpu in facts.gpus if gpu.ecc_enabled is not None}
    return ", ".join("on" if mode else "off" for mode in sorted(modes)) if modes else ""


def _ib(facts: HostFacts) -> str:
    counts = Counter((port.rate, port.link_layer) for port in facts.ib if port.state == "Active")
    return ", ".join(f"{count} × {rate:g} Gb/s {layer}" if rate else f"{count} × {layer}"
                     for (rate, layer), count in sorted(counts.items(), key=str))


def _nics(facts: HostFacts) -> str:
    return ", ".join(sorted(f"{nic.name} {nic.mtu}" for nic in facts.nics if not nic.virtual and nic.state == "up"))


def _package(name: str) -> Callable[[HostFacts], str]:
    return lambda facts: facts.packages.get(name, "")


def _limit(name: str) -> Callable[[HostFacts], str]:
    def read(facts: HostFacts) -> str:
        if name not in facts.limits:
            return ""
        soft = facts.limits[name][0]
        return "unlimited" if soft < 0 else str(soft)

    return read


def _bytes(value: int | None) -> str:
    return "" if value is None else size(value)


def _nccl(facts: HostFacts) -> str:
    return next((v for n, v in sorted(facts.packages.items()) if n.startswith("nvidia-nccl")), "")


def _mount(facts: HostFacts) -> str:
    return next((f"{m.kind} {m.device}" for m in facts.mounts if m.why == "checkpoints" and m.kind), "")


#: (what, how to read it, severity when hosts differ): a warning where ranks that differ fail or compute differently.
ROWS: tuple[tuple[str, Callable[[HostFacts], str], Severity], ...] = (
    ("GPUs", _gpus, "warning"),
    ("driver", lambda f: f.driver, "warning"),
    ("CUDA of the driver", lambda f: f.driver_cuda, "warning"),
    ("ECC", _ecc, "warning"),
    ("active RDMA ports", _ib, "warning"),
    ("interfaces and MTU", _nics, "info"),
    ("torch", _package("torch"), "warning"),
    ("CUDA of torch", lambda f: f.torch_cuda or "", "warning"),
    ("NCCL", _nccl, "warning"),
    ("numpy", _package("numpy"), "info"),
    ("triton", _package("triton"), "warning"),
    ("transformer-engine", _package("transformer-engine"), "warning"),
    ("flash-attn", _package("flash-attn"), "warning"),
    ("deepspeed", _package("deepspeed"), "warning"),
    ("Python", lambda f: f.python, "warning"),
    ("kernel", lambda f: f.kernel, "info"),
    ("system", lambda f: f.system, "info"),
    ("processors", lambda f: str(f.cpus or ""), "info"),
    ("processor", lambda f: f.cpu, "info"),
    ("memory", lambda f: _bytes(f.memory_total), "info"),
    ("memory limit", lambda f: _bytes(f.cgroup.memory_limit) if f.cgroup and f.cgroup.memory_limit else "", "warning"),
    ("/dev/shm", lambda f: _bytes(f.shm_total), "warning"),
    ("open files", _limit("nofile"), "warning"),
    ("locked memory", _limit("memlock"), "warning"),
    ("checkpoint file system", _mount, "warning"),
    ("huge pages", lambda f: str(f.huge_pages) if f.huge_pages is not None else "", "info"),
    ("transparent huge pages", lambda f: f.transparent_huge_pages, "info"),
)
#: Variables that name a rank or a place: they differ by design.
_OWN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "HOME", "TMPDIR", "TORCHELASTIC_RESTART_COUNT", "SLURM_",
        "TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "XDG_CACHE_HOME",
        "TORCHELASTIC_", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_")
#: Size of a host's memory and of what depends on it is equal when it is nearly so.
_NEARLY = {"memory", "/dev/shm", "memory limit"}


def compare(places: Sequence[Place]) -> Iterator[Finding]:
    """One finding with the table of differences, its severity that of the worst row. Silent when all are alike.

    Of two hosts that differ nobody is the odd one; of more, whoever differs from the majority is.
    """
    hosts = [place.facts for place in places]
    if len(hosts) < 2:
        return
    rows: list[dict[str, str]] = []
    worst: Severity = "info"
    odd: Counter[str] = Counter()
    labels = labels_of(hosts)
    for what, values, severity in _values(hosts):
        kinds = Counter(values)
        if len(kinds) < 2:
            continue
        usual, count = kinds.most_common(1)[0]
        majority = count > len(values) / 2
        strange = [labels[i] for i, value in enumerate(values) if majority and value != usual]
        odd.update(strange)
        if severity == "warning":
            worst = "warning"
        rows.append({"what": what, "odd": ", ".join(strange) or "nobody: no majority",
                     "usual": (usual or _ABSENT) if majority else _ABSENT}
                    | {label: (value or _ABSENT) + (" ←" if label in strange else "")
                       for label, value in zip(labels, values, strict=True)})
    if not rows:
        return
    rows.sort(key=lambda row: row["what"] not in {what for what, _, severity in ROWS if severity == "warning"})
    guilty = [label for label, _ in odd.most_common()]
    if guilty and len(hosts) > MAX_COLUMNS:
        shown = {"what", "odd", "usual", *guilty[:MAX_COLUMNS]}
        rows = [{key: value for key, value in row.items() if key in shown} for row in rows]
    named = f"{', '.join(guilty[:4])}{' and more' if len(guilty) > 4 else ''}" if guilty else "no majority"
    first = rows[0]
    # Rows are cut to the guilty hosts above: the example is theirs as well.
    example = "; ".join(f"{label} {first[label].removesuffix(' ←')}" for label in (guilty or labels)[:2])
    summary = f"{len(hosts)} hosts of one job differ in {', '.join(str(row['what']) for row in rows[:4])}" \
              f"{' and more' if len(rows) > 4 else ''}: {named} ({first['what']}: {example})"
    yield Finding(cause="hosts_differ", role="context", severity=worst, confidence=0.9, summary=summary,
                  where=Where(hosts=guilty), numbers={"standing": True, "differences": rows, "hosts": len(hosts)},
                  evidence=[Evidence(path=place.path or f"{label}:live", text=f"{first['what']}: {first[label]}")
                            for place, label in sorted(zip(places, labels, strict=True),
                                                       key=lambda pair: pair[1] not in guilty) if label in first][:8])


def labels_of(hosts: Sequence[HostFacts]) -> list[str]:
    """A name for each host, told apart by rank or number when two have the same."""
    names = [facts.host or f"host {i}" for i, facts in enumerate(hosts)]
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} (rank {facts.ranks[0]})" if facts.ranks else f"{name} #{i + 1}"
            for i, (name, facts) in enumerate(zip(names, hosts, strict=True))]


def _values(hosts: Sequence[HostFacts]) -> Iterator[tuple[str, list[str], Severity]]:
    for what, read, severity in ROWS:
        values = [read(facts) for facts in hosts]
        if what in _NEARLY and _near(what, hosts):
            continue
        yield what, values, severity
    names = sorted({name for facts in hosts for name in facts.variables if not name.startswith(_OWN)})
    for name in names:
        yield name, [facts.variables.get(name, "") for facts in hosts], \
            "warning" if name.startswith(("NCCL_", "GLOO_", "TORCH_", "PYTORCH_")) else "info"


def _near(what: str, hosts: Sequence[HostFacts]) -> bool:
    """Whether the sizes differ by so little that they are the same."""
    sizes = [facts.memory_total if what == "memory" else facts.shm_total if what == "/dev/shm" else
             facts.cgroup.memory_limit if facts.cgroup else None for facts in hosts]
    known = [value for value in sizes if value is not None]
    return len(known) == len(sizes) and (max(known) - min(known)) <= SAME_SHARE * max(known)
