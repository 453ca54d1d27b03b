"""What is to be measured: the options of `pdtrain diag comm`, as every rank gets them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from diag.errors import UsageError

#: In the order in which they are measured. `all_to_all_skewed` sends half of everything to rank 0: a hot expert.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_skewed", "broadcast", "send_recv")
#: What a group of each family of a run does, when --op does not say otherwise.
OF_FAMILY = {
    "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    "ep": ("all_to_all", "all_to_all_skewed"),
    "dp": ("all_reduce", "all_gather", "reduce_scatter"),
    "edp": ("all_reduce", "all_gather", "reduce_scatter"),
}
#: What --quick sweeps beside the links.
QUICK = ("all_reduce", "all_to_all", "send_recv")
#: Sizes grow by this factor from --min to --max.
STEP = 4


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, `budget` (of all sweeps together) and `timeout` (of any wait) in seconds."""

    operations: tuple[str, ...] = OPERATIONS
    chosen: bool = False
    min_bytes: int = 1 << 10
    max_bytes: int = 1 << 30
    iterations: int = 20
    budget: float = 30.0
    timeout: float = 30.0
    mode: Literal["", "quick", "thorough"] = ""
    passes: int = 1
    extras: bool = True
    config: str | None = None
    overrides: tuple[str, ...] = ()
    concurrent: bool = False
    ranks_per_node: int | None = None
    baseline: str | None = None

    @property
    def sizes(self) -> list[int]:
        """From `min_bytes` by factors of `STEP`; `max_bytes` is the last."""
        found = []
        size = self.min_bytes
        while size < self.max_bytes:
            found.append(size)
            size *= STEP
        return [*found, self.max_bytes]

    def of_family(self, family: str) -> tuple[str, ...]:
        """The operations to measure in groups of `family`."""
        return self.operations if self.chosen else OF_FAMILY.get(family, self.operations)


def parse_size(text: str, option: str) -> int:
    """`64M`, `64MiB`, `1K`, `4096` in bytes (binary units, as nccl-tests).

    Raises:
        UsageError: not a size, or not between 4 B and 16 GiB.
    """
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    size = int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()] if found else 0
    if not 4 <= size <= 16 << 30:
        raise UsageError(f"{option} {text!r} is no size between 4 and 16G; write 1K, 64M or 1G")
    return size


def absolute(path: str | None) -> str | None:
    """`path` as the ranks find it, wherever they run."""
    return None if path is None else str(Path(path).absolute())
