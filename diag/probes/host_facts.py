"""What is known of one host: plain facts, no judgement. Saved by `pdtrain diag env --save`, gathered from all ranks.

A fact that could not be learnt is absent (None, empty), and `notes` says why; it is never guessed. Sizes are bytes,
rates bytes per second, times seconds, clocks MHz.
"""

from __future__ import annotations

import msgspec

SCHEMA = "pdtrain.host/1"


class _Fact(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base: absent facts are left out of the file; unknown keys of newer versions are ignored."""


class GpuProcess(_Fact):
    """A process that holds memory of a GPU."""

    pid: int
    name: str = ""
    memory: int | None = None
    user: str = ""


class Gpu(_Fact):
    """One GPU as NVML or nvidia-smi describes it. `lines` says where in a saved output each fact stands."""

    index: int
    name: str = ""
    uuid: str = ""
    bus_id: str = ""
    memory_total: int | None = None
    memory_used: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    compute_mode: str = ""
    performance_state: str = ""
    utilisation: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    clock_sm: int | None = None
    clock_sm_max: int | None = None
    #: reasons that hold the clock down now: hw_slowdown, hw_thermal_slowdown, hw_power_brake, sw_thermal_slowdown, ...
    throttle: list[str] = []
    ecc_enabled: bool | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    ecc_volatile_corrected: int | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failure: bool | None = None
    retired_pending: bool | None = None
    unrepairable: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    nvlinks_active: int | None = None
    nvlinks_inactive: int | None = None
    #: errors of all links since the driver was loaded, by kind: replay, recovery, crc flit, crc data
    nvlink_errors: dict[str, int] = {}
    #: by the same kinds, per second, those that were counted while the host was looked at
    nvlink_error_rates: dict[str, float] = {}
    #: None, Reset, Reboot, Drain P2P, Drain and Reset
    recovery_action: str = ""
    reset_required: bool | None = None
    fabric_state: str = ""
    fabric_status: str = ""
    processes: list[GpuProcess] = []
    #: what reading this GPU answered instead of facts
    error: str = ""
    lines: dict[str, int] = {}


class IbPort(_Fact):
    """One port of an InfiniBand or RoCE adapter. `rate` in Gb/s."""

    device: str
    port: int = 1
    state: str = ""
    physical_state: str = ""
    rate: float | None = None
    link_layer: str = ""
    adapter: str = ""
    #: system image GUID: the ports of one card share it, also where each is a device of its own
    card: str = ""
    firmware: str = ""
    counters: dict[str, int] = {}
    lines: dict[str, int] = {}


class Nic(_Fact):
    """One network interface. `speed` in Mb/s."""

    name: str
    state: str = ""
    carrier: bool | None = None
    speed: int | None = None
    mtu: int | None = None
    virtual: bool = False
    addresses: list[str] = []
    counters: dict[str, int] = {}


class Mount(_Fact):
    """A file system that a run uses. `hung` when asking for its size did not come back in time."""

    path: str
    why: str = ""
    device: str = ""
    kind: str = ""
    total: int | None = None
    free: int | None = None
    inodes: int | None = None
    inodes_free: int | None = None
    read_only: bool = False
    hung: bool = False
    problem: str = ""


class Storage(_Fact):
    """What writing a small file to a path showed. `stage` is the call that did not come back, or that failed."""

    path: str
    bytes: int = 0
    write_rate: float | None = None
    fsync_seconds: float | None = None
    seconds: float | None = None
    stage: str = ""
    hung: bool = False
    problem: str = ""


class Cgroup(_Fact):
    """Limits of the control group the process is in; None means no limit was found."""

    version: int = 0
    memory_limit: int | None = None
    memory_used: int | None = None
    #: of `memory_used`, what is file cache that the kernel gives back
    memory_cache: int | None = None
    oom_kills: int | None = None
    cpus: float | None = None
    pids_limit: int | None = None
    pids_used: int | None = None


class Resolution(_Fact):
    """What a host name resolved to, and how long it took."""

    name: str
    why: str = ""
    addresses: list[str] = []
    seconds: float | None = None
    problem: str = ""


class Port(_Fact):
    """The rendezvous endpoint as seen from here. `state`: free, in use, accepts, refused, unreachable."""

    address: str
    port: int
    state: str = ""
    problem: str = ""
    #: the address was given (MASTER_PORT), not only the launcher's default
    given: bool = True


class Clock(_Fact):
    """The clock against rank 0's (`offset`, known to +- `error`), and whether the kernel says it is synchronised."""

    offset: float | None = None
    error: float | None = None
    synchronised: bool | None = None


class KernelLine(_Fact):
    """One line of the kernel log worth keeping."""

    text: str
    time: str = ""
    line: int | None = None


class HostFacts(_Fact):
    """Everything that is known of one host."""

    schema: str = SCHEMA
    host: str = ""
    time: float = 0.0
    seconds: float = 0.0
    ranks: list[int] = []
    local_ranks: int | None = None
    world_size: int | None = None
    kernel: str = ""
    system: str = ""
    cpu: str = ""
    cpus: int | None = None
    cpus_usable: int | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    swap_total: int | None = None
    python: str = ""
    #: distributions that matter to a distributed run, name -> version
    packages: dict[str, str] = {}
    #: what an installed distribution pins exactly, "torch: nvidia-nccl-cu12" -> version
    pins: dict[str, str] = {}
    torch_cuda: str | None = None
    torch_rocm: str | None = None
    #: files of the NCCL library that a loader could find, path -> version ("" where the file does not say)
    nccl_libraries: dict[str, str] = {}
    driver: str = ""
    driver_cuda: str = ""
    kernel_module: str = ""
    gpus_on_bus: int | None = None
    gpus: list[Gpu] = []
    #: peer access between GPUs: row, column -> "OK" or why not
    p2p: dict[str, str] = {}
    #: PCI bridges above GPUs that redirect peer traffic -> what they redirect
    acs: dict[str, str] = {}
    #: whether this is a virtual machine
    virtual: bool | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    shm_leftovers: int | None = None
    #: name -> (soft, hard); -1 is unlimited
    limits: dict[str, tuple[int, int]] = {}
    cgroup: Cgroup | None = None
    huge_pages: int | None = None
    huge_pages_free: int | None = None
    huge_page_size: int | None = None
    transparent_huge_pages: str = ""
    mounts: list[Mount] = []
    storage: Storage | None = None
    nics: list[Nic] = []
    ib: list[IbPort] = []
    #: of the environment and of NCCL's own files, as NCCL sees them; `variable_files`: those that a file sets, by file
    variables: dict[str, str] = {}
    variable_files: dict[str, str] = {}
    #: values that a file of NCCL sets and the environment overrides: name -> "value (file)"
    overridden: dict[str, str] = {}
    #: lines of NCCL's files that set nothing it reads: "file: line"
    conf_odd: list[str] = []
    names: list[Resolution] = []
    port: Port | None = None
    clock: Clock | None = None
    kernel_log: list[KernelLine] = []
    #: subject -> why it could not be looked at
    notes: dict[str, str] = {}


def encode(facts: HostFacts) -> bytes:
    """`facts` as the JSON of a saved file."""
    plain = {"schema": SCHEMA} | msgspec.to_builtins(facts)  # first, and there although it is the default
    return msgspec.json.format(msgspec.json.encode(plain), indent=1)


def decode(data: bytes) -> HostFacts:
    """The facts in `data`. Raises `ValueError` when it is no JSON, or not of this schema."""
    facts = msgspec.json.decode(data, type=HostFacts)
    if b'"schema"' not in data[:4096]:
        raise ValueError("has no schema")
    if facts.schema != SCHEMA:
        raise ValueError(f"schema is {facts.schema!r}; this version reads {SCHEMA}")
    return facts
