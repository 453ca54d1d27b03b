"""PCI Express above the GPUs: access control services that send peer traffic through the root complex.

ACS is an extended capability (id 0x000D, PCI Express Base Specification, section 7.7.11) of bridges; its control
register has the bits Request Redirect and Completion Redirect. `root` replaces / so that a recorded tree can be read.
"""

from __future__ import annotations

from pathlib import Path

from diag.probes.host_facts import HostFacts
from diag.probes.host_gpu import gpu_folders

_ACS = 0x000D
_FIRST_EXTENDED = 0x100
_REDIRECTS = {0x04: "ReqRedir", 0x08: "CmpltRedir"}


def gather(facts: HostFacts, root: Path = Path("/")) -> None:
    """Fill `facts.acs` and `facts.virtual`; `facts.notes["acs"]` when the registers cannot be read."""
    try:
        facts.virtual = " hypervisor" in (root / "proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        facts.virtual = None
    bridges = {parent for folder in gpu_folders(root) for parent in folder.resolve().parents
               if (parent / "class").is_file()}
    for bridge in sorted(bridges):
        try:
            registers = (bridge / "config").read_bytes()
        except OSError:
            registers = b""
        if len(registers) <= _FIRST_EXTENDED:  # without CAP_SYS_ADMIN the kernel gives 64 bytes
            facts.notes["acs"] = "the registers of PCI bridges can be read by root only"
            return
        found = redirects(registers)
        if found:
            facts.acs[bridge.name] = " ".join(found)


def redirects(registers: bytes) -> list[str]:
    """The names of the redirections that are switched on in a device's configuration space; empty without ACS."""
    place, steps = _FIRST_EXTENDED, 0
    while _FIRST_EXTENDED <= place <= len(registers) - 8 and steps < 64:
        header = int.from_bytes(registers[place : place + 4], "little")
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(registers[place + 6 : place + 8], "little")
            return [name for bit, name in _REDIRECTS.items() if control & bit]
        place, steps = header >> 20, steps + 1
    return []
