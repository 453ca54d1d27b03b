"""Who is who: ranks, local ranks, hosts, processes and GPUs, joined from everything that the logs say about them.

Sources, strongest first: NCCL init lines of the largest communicator (host, pid, rank, bus id), torchrun summary
blocks (rank, local rank, host, pid), lines that name both rank and host, file names. A sub-communicator's ranks are
group-local and are not used. What the sources do not say stays unknown; ranks are never guessed from order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diag.artefacts.log_facts import Event, Log, Speaker


@dataclass
class Identity:
    """The joined tables. Every look-up returns None for what is not known."""

    host_of: dict[int, str] = field(default_factory=dict)
    rank_of_process: dict[tuple[str | None, int], int] = field(default_factory=dict)
    rank_of_local: dict[tuple[str | None, int], int] = field(default_factory=dict)
    rank_of_gpu: dict[tuple[str | None, str], int] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    world: int | None = None
    #: what "localhost" is called by the others, where that is certain
    localhost: str = "localhost"

    def named(self, host: str) -> str:
        """`host` as the rest of the logs call it."""
        return self.localhost if host == "localhost" else host

    def rank(self, speaker: Speaker, log: Log) -> int | None:
        """The global rank behind a line, if any source tells."""
        if speaker.rank is not None:
            return speaker.rank
        host = speaker.host or log.name_host
        if speaker.pid is not None:
            for key in ((host, speaker.pid), (None, speaker.pid)):
                if key in self.rank_of_process:
                    return self.rank_of_process[key]
        if log.name_rank is not None:
            return log.name_rank
        local = speaker.local_rank if speaker.local_rank is not None else log.name_local_rank
        return self.rank_from_local(local, host)

    def rank_from_local(self, local: int | None, host: str | None, *, alone: bool = False) -> int | None:
        """A local rank as global: known from a block, or the same number when the job has one host only.

        `alone`: the one launcher that speaks says it, so that its host is the only one unless something tells of more.
        """
        if local is None:
            return None
        found = self.rank_of_local.get((host, local))
        if found is None and host is None and self.one_host():
            candidates = {rank for (_, number), rank in self.rank_of_local.items() if number == local}
            found = candidates.pop() if len(candidates) == 1 else None
        if found is None and self.one_host():
            world = self.world if self.world is not None or not alone else max([local, *self.ranks]) + 1
            found = local if world is not None and local < world <= 16 else None
        return found

    def one_host(self) -> bool:
        """Whether everything that is known fits on one host."""
        return len(self.hosts) <= 1

    def host(self, speaker: Speaker, log: Log) -> str | None:
        """The host behind a line."""
        if speaker.host is not None:
            return speaker.host
        rank = self.rank(speaker, log)
        if rank is not None and rank in self.host_of:
            return self.host_of[rank]
        return log.name_host

    def only_host(self) -> str | None:
        """The host, when the logs speak of exactly one."""
        return next(iter(self.hosts)) if len(self.hosts) == 1 else None

    def gpu_ranks(self, bus: str, host: str | None) -> list[int]:
        """The ranks on a PCI bus id, in any notation ("0000:06:00.0", "6000")."""
        key = normal_bus(bus)
        return sorted({rank for (where, gpu), rank in self.rank_of_gpu.items()
                       if gpu == key and (host is None or where == host)})


def normal_bus(bus: str) -> str:
    """One form for PCI addresses: hex digits of bus and device without leading zeros. "0000:06:00.0" -> "6000"."""
    text = bus.lower().rstrip(":").removeprefix("0x")
    parts = text.split(":")
    if len(parts) >= 2:
        device = parts[-1].split(".")[0] if "." in parts[-1] or len(parts) == 3 else parts[-1]
        number = f"{parts[-2]}{device.zfill(2)}0"
        if len(parts) == 3 and parts[0].strip("0"):
            number = parts[0] + number.zfill(5)
        text = number
    return text.lstrip("0") or "0"


def identify(logs: list[Log]) -> Identity:
    """Build the tables from all logs together."""
    who = Identity()
    _from_nccl(logs, who)
    for log in logs:
        for block in summary_blocks(log):
            who.ranks.add(block.rank)
            if not block.host:
                continue  # the head of the block is missing
            who.rank_of_local.setdefault((block.host, block.local), block.rank)
            who.rank_of_process.setdefault((block.host, block.pid), block.rank)
            who.host_of.setdefault(block.rank, block.host)
            who.hosts.add(block.host)
        for event in log.events:
            _from_event(event, log, who)
        if log.name_rank is not None:
            who.ranks.add(log.name_rank)
            if log.name_host:
                who.host_of.setdefault(log.name_rank, log.name_host)
        if log.name_host:
            who.hosts.add(log.name_host)
        for speaker in (*(t.speaker for t in log.tracebacks), *(p.speaker for p in log.progress)):
            if speaker.rank is not None:
                who.ranks.add(speaker.rank)
            if speaker.host is not None:
                who.hosts.add(speaker.host)
    _name_localhost(who)
    if who.world is not None and who.ranks and max(who.ranks) >= who.world:
        who.world = None  # group-local numbers or several jobs: no statement about the world
    return who


def _name_localhost(who: Identity) -> None:
    """torchrun --standalone calls its host "localhost"; when others name the only host there is, that is it."""
    if "localhost" not in who.hosts or len(who.hosts) != 2:
        return
    who.hosts.discard("localhost")
    name = who.localhost = next(iter(who.hosts))
    for rank, host in who.host_of.items():
        who.host_of[rank] = who.named(host)
    for table in (who.rank_of_process, who.rank_of_local):
        for number, rank in [(key[1], rank) for key, rank in table.items() if key[0] == "localhost"]:
            table.setdefault((name, number), rank)


def _from_nccl(logs: list[Log], who: Identity) -> None:
    inits = [(log, event) for log in logs for event in log.events if event.rule == "nccl-init"]
    largest = max((int(event.groups["nranks"]) for _, event in inits), default=0)
    if largest:
        who.world = largest
    for _, event in inits:
        host, pid = event.speaker.host, event.speaker.pid
        if host is not None:
            who.hosts.add(host)
        if int(event.groups["nranks"]) != largest:
            continue
        rank = int(event.groups["rank"])
        who.ranks.add(rank)
        if host is not None:
            who.host_of[rank] = host
            who.rank_of_gpu[host, event.groups["bus"].lower().lstrip("0") or "0"] = rank
        if pid is not None:
            who.rank_of_process[host, pid] = rank


def _from_event(event: Event, log: Log, who: Identity) -> None:
    groups = event.groups
    if event.rule in ("identity", "nan-rank") and groups.get("host") and groups.get("rank"):
        who.host_of.setdefault(int(groups["rank"]), groups["host"])
        who.hosts.add(groups["host"])
    if event.rule == "srun-task" and groups.get("host"):
        who.hosts.add(groups["host"])
    if event.rule == "pdtrain-start" and groups.get("rank"):
        who.host_of.setdefault(int(groups["rank"]), groups["host"])
        who.rank_of_process.setdefault((groups["host"], int(groups["pid"])), int(groups["rank"]))
        who.hosts.add(groups["host"])
    if event.rule in ("pdtrain-start", "lightning-member", "world-size", "registered-processes", "store-barrier",
                      "distributed-init", "clients-joined") and groups.get("world"):
        who.world = max(who.world or 0, int(groups["world"]))
    if event.rule in ("lightning-member", "watchdog-timeout", "watchdog-status", "distributed-init", "store-barrier"):
        rank = groups.get("rank")
        if rank is not None and not event.speaker.mark.startswith("[rank"):
            who.ranks.add(int(rank))
    speaker = event.speaker
    if speaker.rank is not None:
        who.ranks.add(speaker.rank)
        if speaker.host is not None and not event.quoted:
            who.host_of.setdefault(speaker.rank, speaker.host)
            if speaker.pid is not None and event.rule != "nccl-init":
                who.rank_of_process.setdefault((speaker.host, speaker.pid), speaker.rank)
    if speaker.host is not None:
        who.hosts.add(speaker.host)


@dataclass(frozen=True, slots=True)
class Block:
    """One rank's entry in a torchrun summary. `root` marks the launcher's own idea of the first failure."""

    rank: int
    local: int
    host: str
    code: int
    pid: int
    time: str | None
    line: int
    root: bool


def summary_blocks(log: Log) -> list[Block]:
    """The entries of all torchrun summaries in a log. Fields of one entry stand on neighbouring lines."""
    found: list[Block] = []
    fields: dict[str, str] = {}
    line, root, last = 0, False, 0
    for event in log.events:
        if event.rule == "torchrun-root":
            root, fields = True, {}
            last = event.line
        elif event.rule == "torchrun-summary":
            root = False
        elif event.rule in ("torchrun-time", "torchrun-host", "torchrun-rank", "torchrun-exitcode"):
            if fields and event.line > line + 6:
                fields = {}
            if event.rule == "torchrun-time":
                fields = {}
            fields.update(event.groups)
            line = event.line
            if event.rule == "torchrun-exitcode" and {"rank", "local", "code", "pid"} <= fields.keys():
                found.append(Block(rank=int(fields["rank"]), local=int(fields["local"]), host=fields.get("host", ""),
                                   code=int(fields["code"]), pid=int(fields["pid"]), time=fields.get("time"),
                                   line=event.line, root=root and event.line > last))
                fields = {}
    return found


def expand_tasks(text: str) -> list[int]:
    """Slurm's task lists: "3,8-10" -> [3, 8, 9, 10]. Absurd ranges are cut."""
    tasks: list[int] = []
    for part in text.split(","):
        if m := re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip()):
            first, last = int(m[1]), int(m[2] or m[1])
            tasks.extend(range(first, min(last, first + 65_536) + 1))
    return tasks
