"""The measuring thread of a rank: what is done, in an order that is the same on every rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from diag.probes.comm.ask import QUICK, Ask
from diag.probes.comm.control import Control, Identity, Verdict
from diag.probes.comm.operations import Bench
from diag.probes.comm.records import Extra, Link, Probe, Row, rates_of, restore
from diag.probes.comm.sweep import MEMORY_SHARE, sweep

#: Timeouts after which Gloo and NCCL give up by themselves, beyond the budget; the heartbeats are quicker and say more.
OWN_LIMIT = 4


class Work(threading.Thread):
    """Measures everything that `ask` wants. `error` is set when it ended early, `probe` holds what it knows so far."""

    def __init__(self, ask: Ask, control: Control, rank: int, world: int, device: str) -> None:
        super().__init__(name="pdtrain-measure", daemon=True)
        self.ask, self.control, self.rank, self.world, self.device = ask, control, rank, world, device
        self.error: BaseException | None = None
        self.begun = time.monotonic()
        self.probe = Probe(created=datetime.now(UTC).isoformat(timespec="seconds"), world=world, timeout=ask.timeout,
                           mode=ask.mode, backend="nccl" if device != "cpu" else "gloo")

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # the main thread decides what it means
            self.error = error

    def early(self, verdict: Verdict, records: list[tuple[str, Any]]) -> Probe:
        """What is known when the probe ends early, other ranks' records included."""
        rows, extras = restore(records)
        probe = self.probe
        probe.rows = _unique([*probe.rows, *rows])
        probe.extras = _unique([*probe.extras, *extras])
        probe.lost, probe.position = verdict.lost, verdict.position
        probe.stopped = f"{verdict.kind}: {verdict.text}" if verdict.text else verdict.kind
        if not probe.hosts:
            known = self.control.identities
            probe.hosts = [known[r].host if r in known else "" for r in range(self.world)]
        self._finish(probe)
        return probe

    # ----------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        import torch
        import torch.distributed as dist

        enter = self.control.enter
        self.probe.torch = str(torch.__version__)
        torch.set_num_threads(1)
        options: dict[str, Any] = {}
        if self.device != "cpu":
            local = int(os.environ.get("LOCAL_RANK", "0"))
            torch.cuda.set_device(local)
            options["device_id"] = torch.device("cuda", local)
        enter("connecting")
        patience = timedelta(seconds=self.ask.budget + OWN_LIMIT * self.ask.timeout)
        dist.init_process_group(self.probe.backend, timeout=patience, **options)
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, msgspec.to_builtins(self.control.me))
        people = [msgspec.convert(item, Identity) for item in gathered]
        self.probe.hosts = host_names(people)
        self.probe.devices = [item.device for item in people]
        self.probe.ranks_per_node = self.ask.ranks_per_node or _per_node([item.node for item in people])
        world = Bench(None, tuple(range(self.world)), self.rank, self.device)
        try:
            if self.ask.mode:
                self._locate(dist, people)
            if self.ask.config is not None:
                self._configured(world)
            else:
                self._world(world)
            if self.ask.extras:
                self._extras(world, dist)
            enter("the end")
            dist.barrier()
            self.control.done = True
        finally:
            self._finish(self.probe)
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def _finish(self, probe: Probe) -> None:
        probe.seconds = round(time.monotonic() - self.begun, 2)
        probe.rates = rates_of(probe.rows, probe.hosts)

    def _take(self, found: Iterable[Row | str], speaks: bool = True) -> None:
        for item in found:
            if isinstance(item, str):
                if item not in self.probe.notes:
                    self.probe.notes.append(item)
                continue
            self.probe.rows.append(item)
            if speaks:
                self.control.publish("row", item)

    def _world(self, world: Bench) -> None:
        quick = bool(self.ask.mode) and not self.ask.chosen
        self._take(sweep(world, QUICK if quick else self.ask.operations, self.ask.sizes, self.ask, self.control.enter,
                         group="world", budget=self.ask.budget, memory=self._memory()), self.rank == 0)

    def _configured(self, world: Bench) -> None:
        """Every group of the run: all of a family at once (--concurrent), or one after the other."""
        from diag.probes.comm import groups

        config = self.ask.config or ""
        groups.check_world(config, self.ask.overrides, self.world)
        families = groups.families(config, self.ask.overrides, self.device)
        expected = groups.dispatch(config, self.ask.overrides)
        if expected is not None:
            self._extra(expected)
        turns = max(1, sum(1 if self.ask.concurrent else len(family.groups) for family in families))
        for family in families:
            names, sizes, note = self.ask.of_family(family.name), self.ask.sizes, ""
            if family.name == "ep" and expected is not None:
                sizes = sorted({*sizes, min(int(expected.numbers["bytes_per_rank"]), self.ask.max_bytes)})
            for turn in ([family.groups] if self.ask.concurrent else [[group] for group in family.groups]):
                for ranks in turn:
                    if self.rank in ranks:
                        bench = Bench(family.mine, tuple(ranks), list(ranks).index(self.rank), self.device)
                        self._take(sweep(bench, names, sizes, self.ask, self.control.enter, group=family.title(ranks),
                                         budget=self.ask.budget / turns, memory=self._memory(), note=note,
                                         concurrent=self.ask.concurrent), self.rank == ranks[0])
                self.control.enter(f"the other {family.name} groups")
                world.largest(0.0)
        self._gather_rows()

    def _gather_rows(self) -> None:
        """Rank 0 prints the rows of all groups, of which it has measured its own."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world
        mine = [msgspec.to_builtins(row) for row in self.probe.rows if row.ranks and row.ranks[0] == self.rank]
        dist.all_gather_object(gathered, mine)
        self.probe.rows = [msgspec.convert(row, Row) for part in gathered for row in part]
        order = {name: index for index, name in enumerate(("world", "tp", "ep", "dp", "edp"))}
        self.probe.rows.sort(key=lambda row: (order.get(row.group.split("[")[0], 9), row.ranks))

    def _extras(self, world: Bench, dist: Any) -> None:
        from diag.probes.comm import hierarchy, overlap, payload

        bytes_ = min(self.ask.max_bytes, 8 << 20)
        enter = self.control.enter
        per_node = self.probe.ranks_per_node
        for label, measured in (
            ("hierarchical all-to-all", lambda: hierarchy.compare(world, per_node, bytes_)),
            ("overlap", lambda: overlap.measure(world, bytes_)),
            ("payload dtypes", lambda: payload.compare(world, bytes_)),
        ):
            enter(label)
            for found in measured():
                if isinstance(found, str):
                    self.probe.notes.append(found)
                else:
                    self._extra(found)

    def _extra(self, found: Extra) -> None:
        self.probe.extras.append(found)
        if self.rank == 0:
            self.control.publish("extra", found)

    def _locate(self, dist: Any, people: list[Identity]) -> None:
        """Link by link, by `diag.probes.localise`; rank 0 gets the outcome."""
        from diag.probes.comm.links import locate

        self.control.enter("links")
        outcome = locate(self.ask, self.control, self.rank, people, self.probe.backend)
        if outcome is not None:
            self.probe.links = [msgspec.convert(link, Link) for link in outcome.links]
            self.probe.rounds, self.probe.link_findings = outcome.rounds, outcome.findings
            self.probe.notes += outcome.notes
        self.control.enter("after the links")
        dist.barrier()

    def _memory(self) -> float:
        """Bytes that the buffers of this rank may take."""
        if self.device != "cpu":
            import torch

            return float(torch.cuda.mem_get_info()[0]) * MEMORY_SHARE
        import psutil

        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        return float(psutil.virtual_memory().available) * MEMORY_SHARE / local


def _unique(items: list[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def host_names(people: list[Identity]) -> list[str]:
    """A name for each rank's host, equal only where it is one host: hosts may share a name."""
    names: dict[str, str] = {}
    for item in people:
        if item.node not in names:
            taken = sum(name == item.host or name.startswith(f"{item.host}#") for name in names.values())
            names[item.node] = f"{item.host}#{taken + 1}" if taken else item.host
    return [names[item.node] for item in people]


def _per_node(nodes: list[str]) -> int:
    """Ranks of each host when all have as many and they follow each other, else 0."""
    counts = {node: nodes.count(node) for node in nodes}
    size = counts[nodes[0]]
    even = all(count == size for count in counts.values())
    ordered = all(len(set(nodes[start : start + size])) == 1 for start in range(0, len(nodes), size))
    return size if even and ordered else 0
