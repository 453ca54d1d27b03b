"""Names of the machine that made a sample, replaced by neutral ones: host, user, paths, ports, process ids.

Each replacement is consistent within one sample, so that a port or a process can still be followed through its files.
"""

from __future__ import annotations

import getpass
import pickle
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

HOST = "node-a"
SITE = "/opt/env/lib/python3.11/site-packages"
#: Where a process id stands: torchrun's tables, glog prefixes, our own records.
_PID = (r"\bpid ?[:=] ?", r'"pid": ?', r"\bprocess(?:es)? ", r"\(pid: ", r"\bpid ", r"\bPID ",
        r"^(?:\[\w+\]:)?(?:\[rank\d+\]:)?\[?[WEIF]\d{4} \d\d:\d\d:\d\d\.\d+ ")
_PORT = (r"\bport[:=]? ?", r"\]:", r"localhost:", rf"{HOST}:", r"127\.0\.0\.1:", r'MASTER_PORT": ?"?')


class Neutral:
    """The replacements of one sample; `folder` is where it ran, `home` what stands in its place."""

    def __init__(self, folder: Path, home: str) -> None:
        site = next(path for path in sys.path if path.endswith("site-packages"))
        root = Path(__file__).resolve().parent.parent
        base = Path(sys.base_prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.paths = [
            (str(folder), home), (str(folder.parent), str(Path(home).parent)), (site, SITE), (sys.prefix, "/opt/env"),
            (str(root), "/home/ada/pdtrain"), (str(base), "/usr/lib/python3.11"),
            (platform.platform(), "Linux-6.1.0-x86_64-with-glibc2.36")]
        self.names = {socket.gethostname(): HOST, socket.getfqdn(): HOST}
        if getpass.getuser() != "root":  # the word stands in too many sentences
            self.names[getpass.getuser()] = "ada"
        self.addresses = _addresses()
        self.pids: dict[str, str] = {}
        self.ports: dict[str, str] = {}

    def text(self, text: str) -> str:
        """`text` with everything replaced."""
        for old, new in self.paths:
            text = text.replace(old, new)
        for old, new in self.names.items():
            if old != "localhost":
                text = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-])", new, text)
        for address in self.addresses:
            text = text.replace(address, "10.0.0.11")
        text = re.sub(r"(?<=torchelastic_)\w{8}|(?<=/none_)\w{8}", "k3x9q2ab", text)
        text = re.sub(r"(?<=torchinductor_)\w+", "ada", text)
        text = re.sub(rf"(?m)({'|'.join(_PID)})(\d{{2,7}})\b",
                      lambda m: m[1] + self.pids.setdefault(m[2], str(41_000 + 7 * len(self.pids))), text)
        return re.sub(rf"({'|'.join(_PORT)})(\d{{4,5}})\b",
                      lambda m: m[1] + self.ports.setdefault(m[2], str(29_500 + 11 * len(self.ports))), text)

    def value(self, value: Any) -> Any:
        """The same within the strings of plain data."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(item) for item in value)
        return value

    def file(self, source: Path, target: Path) -> None:
        """Write `source` to `target` in neutral terms: text, or a flight-recorder dump."""
        target.parent.mkdir(parents=True, exist_ok=True)
        data = source.read_bytes()
        if data[:1] == b"\x80":
            from diag.artefacts.restricted_pickle import load

            target.write_bytes(pickle.dumps(self.value(load(data)), protocol=2))
        else:
            target.write_text(self.text(data.decode()))


def _addresses() -> list[str]:
    """This machine's own addresses, without the loopback."""
    import psutil

    return [address.address.split("%")[0] for card in psutil.net_if_addrs().values() for address in card
            if address.family in (socket.AF_INET, socket.AF_INET6) and not address.address.startswith(("127.", "::1"))]
