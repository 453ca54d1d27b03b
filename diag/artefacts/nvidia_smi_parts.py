"""The parts of nvidia-smi's output, each read line by line into the same GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diag.probes.host_facts import Gpu

_ABSENT = {"n/a", "[n/a]", "[not supported]", "not supported", "requested functionality has been deprecated",
           "[requested functionality has been deprecated]", "insufficient permissions", "none", ""}
_BROKEN = {"unknown error", "[unknown error]", "gpu is lost", "[gpu is lost]", "gpu requires reset", "err!",
           "[gpu requires reset]"}
_REASONS = {"idle": "idle", "applications clocks setting": "application_clocks", "sw power cap": "sw_power_cap",
            "hw slowdown": "hw_slowdown", "hw thermal slowdown": "hw_thermal_slowdown",
            "hw power brake slowdown": "hw_power_brake", "sync boost": "sync_boost",
            "sw thermal slowdown": "sw_thermal_slowdown", "display clock setting": "display_clock"}
#: path in `nvidia-smi -q` -> (field, kind)
_FIELDS = {
    "product name": ("name", "text"), "gpu uuid": ("uuid", "text"), "persistence mode": ("persistence", "on"),
    "mig mode/current": ("mig", "on"), "compute mode": ("compute_mode", "text"),
    "performance state": ("performance_state", "text"), "utilization/gpu": ("utilisation", "integer"),
    "fb memory usage/total": ("memory_total", "mib"), "fb memory usage/used": ("memory_used", "mib"),
    "temperature/gpu current temp": ("temperature", "integer"),
    "gpu power readings/current power limit": ("power_limit", "float"),
    "gpu power readings/default power limit": ("power_default", "float"),
    "power readings/power limit": ("power_limit", "float"),
    "power readings/default power limit": ("power_default", "float"),
    "clocks/sm": ("clock_sm", "integer"), "max clocks/sm": ("clock_sm_max", "integer"),
    "ecc mode/current": ("ecc_enabled", "on"), "remapped rows/correctable error": ("remapped_correctable", "integer"),
    "remapped rows/uncorrectable error": ("remapped_uncorrectable", "integer"),
    "remapped rows/pending": ("remap_pending", "yes"),
    "remapped rows/remapping failure occurred": ("remap_failure", "yes"),
    "retired pages/pending page blacklist": ("retired_pending", "yes"),
    "ecc errors/unrepairable memory": ("unrepairable", "yes"),
    "pci/gpu link info/pcie generation/current": ("pcie_generation", "integer"),
    "pci/gpu link info/pcie generation/max": ("pcie_generation_max", "integer"),
    "pci/gpu link info/link width/current": ("pcie_width", "integer"),
    "pci/gpu link info/link width/max": ("pcie_width_max", "integer"),
    "pci/replays since reset": ("pcie_replays", "integer"), "gpu recovery action": ("recovery_action", "text"),
    "gpu reset status/reset required": ("reset_required", "yes"), "fabric/state": ("fabric_state", "text"),
    "fabric/status": ("fabric_status", "text"),
}
#: `--query-gpu` fields (nvidia-smi --help-query-gpu) -> (field, kind)
_CSV_FIELDS = {
    "name": ("name", "text"), "uuid": ("uuid", "text"), "gpu_uuid": ("uuid", "text"),
    "pci.bus_id": ("bus_id", "text"), "gpu_bus_id": ("bus_id", "text"), "persistence_mode": ("persistence", "on"),
    "mig.mode.current": ("mig", "on"), "compute_mode": ("compute_mode", "text"),
    "pstate": ("performance_state", "text"),
    "utilization.gpu": ("utilisation", "integer"), "memory.total": ("memory_total", "mib"),
    "memory.used": ("memory_used", "mib"), "temperature.gpu": ("temperature", "integer"),
    "enforced.power.limit": ("power_limit", "float"), "power.default_limit": ("power_default", "float"),
    "clocks.current.sm": ("clock_sm", "integer"), "clocks.sm": ("clock_sm", "integer"),
    "clocks.max.sm": ("clock_sm_max", "integer"), "ecc.mode.current": ("ecc_enabled", "on"),
    "ecc.errors.uncorrected.volatile.total": ("ecc_volatile_uncorrected", "integer"),
    "ecc.errors.uncorrected.aggregate.total": ("ecc_aggregate_uncorrected", "integer"),
    "ecc.errors.corrected.volatile.total": ("ecc_volatile_corrected", "integer"),
    "retired_pages.pending": ("retired_pending", "yes"), "remapped_rows.pending": ("remap_pending", "yes"),
    "remapped_rows.failure": ("remap_failure", "yes"), "remapped_rows.correctable": ("remapped_correctable", "integer"),
    "remapped_rows.uncorrectable": ("remapped_uncorrectable", "integer"),
    "pcie.link.gen.current": ("pcie_generation", "integer"), "pcie.link.gen.max": ("pcie_generation_max", "integer"),
    "pcie.link.width.current": ("pcie_width", "integer"), "pcie.link.width.max": ("pcie_width_max", "integer"),
    "fabric.state": ("fabric_state", "text"), "fabric.status": ("fabric_status", "text"),
}
#: A count as it is printed; digits of other scripts and absurd lengths are none.
_COUNT = re.compile(r"[0-9]{1,18}")
_CSV_REASONS = {"hw_slowdown": "hw_slowdown", "hw_thermal_slowdown": "hw_thermal_slowdown",
                "hw_power_brake_slowdown": "hw_power_brake", "sw_thermal_slowdown": "sw_thermal_slowdown",
                "sw_power_cap": "sw_power_cap"}


def value_of(text: str, kind: str) -> object:
    """`text` as what a field of `kind` holds, or None for every way of saying that it is not known."""
    plain = text.strip()
    if plain.lower() in _ABSENT and not (kind == "text" and plain == "None"):
        return None
    if kind == "text":
        return plain
    if kind == "on":
        return {"enabled": True, "disabled": False}.get(plain.lower())
    if kind == "yes":
        return {"yes": True, "no": False, "1": True, "0": False}.get(plain.lower())
    number = re.match(r"-?[0-9]{1,18}(?![0-9])(?:\.[0-9]{1,9})?", plain)
    if number is None:
        return None
    if kind == "float":
        return float(number[0])
    return int(float(number[0])) << (20 if kind == "mib" else 0)


def fill(gpu: Gpu, name: str, kind: str, text: str, number: int, label: str) -> None:
    """Set a field of `gpu` from `text`; a reading that failed becomes its `error`."""
    if text.strip().lower() in _BROKEN:
        gpu.error = gpu.error or f"{label}: {text.strip().strip('[]')}"
        gpu.lines.setdefault("error", number)
        return
    value = value_of(text, kind)
    if value is not None:
        setattr(gpu, name, value)
        gpu.lines[name] = number


class Part:
    """A part of the output: takes lines, collects GPUs."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.driver = self.cuda = ""

    def line(self, number: int, line: str) -> bool:
        """Whether the line belongs to this part."""
        raise NotImplementedError


class Query(Part):
    """`nvidia-smi -q`: nested keys by indentation."""

    _NAME = re.compile(r"\w[\w .()/-]*")
    _GPU = re.compile(r"^GPU ([\dA-Fa-f]{4,8}:[\dA-Fa-f:.]+)\s*$")

    def __init__(self) -> None:
        super().__init__()
        self.attached: int | None = None
        self.odd: list[tuple[int, str]] = []
        self._path: list[tuple[int, str]] = []
        self._on = False
        self._order = 0

    def line(self, number: int, line: str) -> bool:
        if "NVSMI LOG" in line:
            self._on, self._order, self._path = True, 0, []
            return True
        if not self._on:
            return False
        if line.startswith(("#", "+--", "|")):
            self._on = False
            return False
        found = self._GPU.match(line)
        if found:
            bus = found[1].upper()
            self.gpus = [gpu for gpu in self.gpus if gpu.bus_id != bus]  # a later capture of the same card
            self.gpus.append(Gpu(index=self._order, bus_id=bus, lines={"gpu": number}))
            self._order += 1
            self._path = []
            return True
        bare = line.strip()
        word, colon, rest = bare.partition(" :")
        name, text = word.rstrip().lower(), rest.removeprefix(" ") if colon else None
        if not self._NAME.fullmatch(name):
            return bool(bare)
        depth = len(line) - len(line.lstrip())
        while self._path and self._path[-1][0] >= depth:
            self._path.pop()
        path = "/".join([part for _, part in self._path] + [name])
        if text is None:
            self._path.append((depth, name))
            return True
        if "slowdown" in name and ":" not in name and path.startswith("clocks ") and name not in _REASONS and \
                "counters" not in path:
            self.odd.append((number, line.strip()[:80]))
        self._value(path, name, text, number)
        self._path.append((depth, name))
        return True

    def _value(self, path: str, name: str, text: str, number: int) -> None:
        if not self.gpus or path in ("driver version", "cuda version", "attached gpus"):
            if path == "driver version":
                self.driver = text.strip()
            elif path == "cuda version":
                self.cuda = text.strip()
            elif path == "attached gpus" and _COUNT.fullmatch(text.strip()):
                self.attached = int(text)
            return
        gpu = self.gpus[-1]
        if path in _FIELDS:
            fill(gpu, *_FIELDS[path], text, number, name.title())
        elif path.startswith(("clocks event reasons/", "clocks throttle reasons/")):
            if text.strip() == "Active" and name in _REASONS:
                gpu.throttle.append(_REASONS[name])
                gpu.lines[_REASONS[name]] = number
        elif path.startswith("ecc errors/") and _COUNT.fullmatch(text.strip()):
            self._errors(gpu, path, int(text), number)
        elif text.strip().lower() in _BROKEN - {"unknown error", "[unknown error]"}:
            # Some drivers answer "Unknown Error" for what a card does not have (Addressing Mode of an RTX 4090).
            fill(gpu, "error", "text", text, number, name.title())

    @staticmethod
    def _errors(gpu: Gpu, path: str, count: int, number: int) -> None:
        """Sums of the places where errors are counted; before driver 440 by single and double bit with a total."""
        _, kind, *rest = path.split("/")
        leaf = rest[-1] if rest else ""
        uncorrected = "uncorrectable" in leaf or (rest[:1] == ["double bit"] and leaf == "total")
        corrected = leaf.endswith(" correctable") or (rest[:1] == ["single bit"] and leaf == "total")
        name = {"volatile": "ecc_volatile_", "aggregate": "ecc_aggregate_"}.get(kind)
        if name is None or not (uncorrected or corrected) or (corrected and kind == "aggregate"):
            return
        name += "uncorrected" if uncorrected else "corrected"
        before = getattr(gpu, name) or 0
        setattr(gpu, name, before + count)
        if count or name not in gpu.lines:
            gpu.lines[name] = number


class Table(Part):
    """The default table."""

    _HEAD = re.compile(r"^\| NVIDIA-SMI [\d.]+ +Driver Version: ([\d.]+) +CUDA Version: ([\d.]+|N/A)")
    _FIRST = re.compile(r"^\| +(\d{1,4}) {2}(\S.*?) +(On|Off|N/A) *\| +([\dA-Fa-f:.]+) +\S+ *\| +(\S+) *\|$")
    _SECOND = re.compile(r"^\| *(\S+) +(\S+) +(P\d+|\S+) +(\S+) */ *(\S+) *\| *(\d{1,12})MiB / *(\d{1,12})MiB *"
                         r"\| *(\S+) +(.*?) *\|$")

    def __init__(self) -> None:
        super().__init__()
        self._open: Gpu | None = None
        #: Names as the table has room for them, to be shown and not to be looked up, by bus id.
        self.cut_names: dict[str, str] = {}

    def line(self, number: int, line: str) -> bool:
        if not line.startswith("|"):
            self._open = None
            return False
        if found := self._HEAD.match(line):
            self.driver, self.cuda = found[1], found[2]
            return True
        if found := self._FIRST.match(line):
            bus = found[4].upper()
            self.gpus = [gpu for gpu in self.gpus if gpu.bus_id != bus]
            name = "" if "..." in found[2] else found[2]
            self.cut_names[bus] = found[2]
            gpu = Gpu(index=int(found[1]), name=name, bus_id=bus, lines={"gpu": number})
            fill(gpu, "ecc_volatile_uncorrected", "integer", found[5], number, "Volatile Uncorr. ECC")
            self.gpus.append(gpu)
            self._open = gpu
            return True
        if (found := self._SECOND.match(line)) and self._open is not None:
            gpu, self._open = self._open, None
            fill(gpu, "memory_used", "mib", found[6], number, "Memory")
            fill(gpu, "memory_total", "mib", found[7], number, "Memory")
            fill(gpu, "utilisation", "integer", found[8], number, "GPU-Util")
            fill(gpu, "temperature", "integer", found[2], number, "Temp")
            fill(gpu, "performance_state", "text", found[3], number, "Perf")
            for label, text in (("Fan", found[1]), ("Pwr", found[4])):
                if text.lower() in _BROKEN:
                    fill(gpu, "error", "text", text, number, label)
        return True


class Links(Part):
    """`nvidia-smi -L`, `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e`."""

    _GPU = re.compile(r"^GPU (\d{1,4}): (.+?) \(UUID: (\S+?)\)$")
    _LINK = re.compile(r"^\s+Link \d{1,3}: (<inactive>|inactive|disabled|[\d.]+ GB/s)$", re.I)
    _ERRORS = re.compile(r"^\s+Link \d{1,3}: (Replay|Recovery|CRC|CRC FLIT|CRC Data) Errors: (\d{1,18})$", re.I)

    def line(self, number: int, line: str) -> bool:
        if found := self._GPU.match(line.rstrip()):
            index = int(found[1])
            if not any(gpu.index == index for gpu in self.gpus):
                self.gpus.append(Gpu(index=index, name=found[2], uuid=found[3], lines={"gpu": number}))
            self._now = index
            return True
        if not self.gpus or not line[:1].isspace():
            if self.gpus and line.strip() in ("...", "…", "[...]", "<snip>"):  # somebody left the rest out
                gpu = next(gpu for gpu in self.gpus if gpu.index == self._now)
                gpu.nvlinks_active = gpu.nvlinks_inactive = None
            return False
        gpu = next(gpu for gpu in self.gpus if gpu.index == self._now)
        if found := self._ERRORS.match(line.rstrip()):
            kind, count = found[1].lower(), int(found[2])
            gpu.nvlink_errors[kind] = gpu.nvlink_errors.get(kind, 0) + count
            if count:
                gpu.lines.setdefault("nvlink_errors", number)
            return True
        found = self._LINK.match(line.rstrip())
        if found is None:
            return False
        up = found[1].lower().endswith("gb/s")
        gpu.nvlinks_active = (gpu.nvlinks_active or 0) + up
        gpu.nvlinks_inactive = (gpu.nvlinks_inactive or 0) + (not up)
        if not up or "nvlinks" not in gpu.lines:
            gpu.lines["nvlinks"] = number
        return True

    _now = 0


class Csv(Part):
    """`--query-gpu=... --format=csv`, with or without units."""

    def __init__(self) -> None:
        super().__init__()
        self._header: list[str] = []

    def line(self, number: int, line: str) -> bool:
        cells = [cell.strip() for cell in line.split(", ")]
        names = [re.sub(r" \[\w+\]$", "", cell) for cell in cells]
        known = sum(name in _CSV_FIELDS or name in ("driver_version", "index", "count") for name in names)
        if known >= 2 and not any(cell.isdigit() for cell in cells):
            self._header = names
            return True
        if not self._header or len(cells) != len(self._header) or not line.strip():
            self._header = []
            return False
        row = dict(zip(self._header, cells, strict=True))
        if row.get("pid"):
            return True  # a list of processes, not of GPUs
        self.driver = row.get("driver_version", self.driver)
        index = row.get("index", "")
        gpu = Gpu(index=int(index) if _COUNT.fullmatch(index) else len(self.gpus), lines={"gpu": number})
        for name, text in row.items():
            if name in _CSV_FIELDS:
                fill(gpu, *_CSV_FIELDS[name], text, number, name)
            elif "_reasons." in name and text == "Active" and name.rpartition(".")[2] in _CSV_REASONS:
                reason = _CSV_REASONS[name.rpartition(".")[2]]
                if reason not in gpu.throttle:
                    gpu.throttle.append(reason)
                    gpu.lines[reason] = number
        gpu.bus_id = gpu.bus_id.upper()
        self.gpus = [g for g in self.gpus if not (gpu.bus_id and g.bus_id == gpu.bus_id)]
        self.gpus.append(gpu)
        return True


@dataclass
class Topology:
    """One matrix of `topo -m`: `pairs` of GPUs -> NV18, PIX, PXB, PHB, NODE, SYS. `rows` says where each row stands."""

    line: int
    gpus: int
    pairs: dict[tuple[int, int], str] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


class TopoReader:
    """`nvidia-smi topo -m`, by tabs or by spaces, and `topo -p2p`, whose cells become `p2p`."""

    _PEER = {"OK": "OK", "CNS": "chipset not supported", "GNS": "GPU not supported", "TNS": "topology not supported",
             "NS": "not supported", "DR": "disabled by registry key", "U": "unknown"}
    _CELL = re.compile(r"^(?:X|NV[0-9]{1,3}|SYS|NODE|PHB|PXB|PIX|PXN|P2C|SOC|N/A|-)$")

    def __init__(self) -> None:
        self.found: list[Topology] = []
        self.p2p: dict[str, str] = {}
        self._columns: list[str] = []

    def line(self, number: int, line: str) -> None:
        """Take one line."""
        words = line.split()
        if words[:1] == ["GPU0"] and (words[1:2] == ["GPU1"] or words[1:3] == ["CPU", "Affinity"] or
                                      (len(words) > 1 and re.match(r"NIC\d|mlx5_\d", words[1]))):
            self._columns = []
            for word in words:
                if not re.match(r"^(?:GPU[0-9]{1,4}|(?:NIC|mlx\d_|MLX)\w*\d)$", word):
                    break
                self._columns.append(word)
            self.found.append(Topology(line=number, gpus=sum(c.startswith("GPU") for c in self._columns)))
            return
        row = re.match(r"^GPU([0-9]{1,4})$", words[0]) if words else None
        if row is None or not self._columns or len(words) <= len(self._columns):
            return
        cells = words[1 : 1 + len(self._columns)]
        if set(cells) - {"X"} and all(cell in self._PEER or cell == "X" for cell in cells):
            for column, cell in zip(self._columns, cells, strict=True):
                if cell != "X" and int(row[1]) < int(column[3:]):
                    self.p2p[f"{int(row[1])},{int(column[3:])}"] = self._PEER[cell]
            return
        if not all(self._CELL.match(cell) for cell in cells):
            return
        topology, index = self.found[-1], int(row[1])
        topology.rows[index] = number
        for column, cell in zip(self._columns, cells, strict=True):
            if column.startswith("GPU") and cell != "X":
                topology.pairs[index, int(column[3:])] = cell
