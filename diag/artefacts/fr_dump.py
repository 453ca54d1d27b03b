"""What is kept of one flight-recorder dump: the frontier of each process group, not the two thousand entries.

Made by `diag.artefacts.fr_digest` in whichever process reads the file; these structures are all that leaves it.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

#: Longer member lists are no group's.
MAX_MEMBERS = 1 << 20


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a Python call stack; the innermost comes first."""

    filename: str
    line: int
    name: str


class Op(msgspec.Struct, frozen=True, array_like=True):
    """What was called: sizes are one shape per tensor. `name` has no backend prefix ("all_reduce", "send 0->1")."""

    backend: str
    name: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One call on one group by one rank. `seq` counts collectives or, for p2p, sends and receives of the group.

    `record` orders all calls of the rank. `done` is completion, whatever the backend calls it. `site` stands for the
    line of the program that made the call (0 for unknown); `stack` is kept for a few calls only.
    """

    seq: int
    record: int
    op: Op
    done: bool
    p2p: bool = False
    timed_out: bool = False
    started: bool = False
    time_ns: int = 0
    timeout_ms: int = 0
    site: int = 0
    stack: tuple[Frame, ...] = ()


class GroupLog(msgspec.Struct, array_like=True):
    """What one rank recorded about one group. `ranks` is the member list as text, "" where the dump does not tell.

    `issued` and `done` are the highest collective sequence numbers seen in the ring, 0 for none; `pending` is how
    many collectives are not complete; `p2p_counts` is how often each "send 0->1" stands in the ring. `status_*` come
    from pg_status: the last enqueued and completed number of whatever kind, -1 for unknown. `unlisted` (Gloo): sends
    and receives after the last entry, which are counted and not recorded.
    """

    name: str
    desc: str
    ranks: str
    issued: int = 0
    done: int = 0
    pending: int = 0
    p2p_pending: int = 0
    has_p2p: bool = False
    p2p_counts: dict[str, int] = {}
    status_issued: int = -1
    status_done: int = -1
    unlisted: int = 0
    entries: list[Entry] = []


class Dump(msgspec.Struct):
    """One rank's dump. `wrapped`: older entries were overwritten. Times in ns since the epoch, 0 for unknown."""

    version: str
    groups: list[GroupLog]
    entries: int = 0
    wrapped: bool = False
    newest_record: int = -1
    newest_ns: int = 0
    last: tuple[int, Entry] | None = None


@lru_cache(maxsize=4096)
def members(text: str) -> tuple[int, ...]:
    """Sorted global ranks of a member list as written, "[0, 1]"; () when it is unknown or not such a list."""
    try:
        ranks = msgspec.json.decode(text, type=list[int]) if text else []
    except msgspec.DecodeError:
        return ()
    return tuple(sorted(set(ranks))) if len(ranks) <= MAX_MEMBERS else ()
