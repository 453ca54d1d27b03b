"""Run directories of separated runs that never ran: what docs/run-directory.md says the ranks would have recorded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARAMETERS = 263_424
BEGAN = 1_700_000_000.0


@dataclass
class Run:
    """A separated run. `compute_seconds` and `update_seconds`: what a rank of each pool works per step.

    `change(rank, step)` multiplies the work of a rank; `events` are added to the ranks' files, by rank.
    """

    compute: int = 2
    update: int = 2
    mode: str = "stream"
    steps: int = 60
    compute_seconds: float = 0.30
    update_seconds: float = 0.26
    send_seconds: float = 0.004
    blocked_seconds: float = 0.0  # of `send_seconds`, while the link took nothing more
    link_seconds: float = 0.004
    overlap: float = 1.0
    staleness: int = 0
    lag: Callable[[int], int] = lambda step: 0
    queue: Callable[[int, int], int] = lambda rank, step: 5
    change: Callable[[int, int], float] = lambda rank, step: 1.0
    state: Callable[[int], int] | None = None
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    tensor: int = 1
    expert: int = 1
    noise: float = 0.02

    def write(self, path: Path) -> Path:
        """The run directory at `path`."""
        (path / "events").mkdir(parents=True)
        for rank in range(self.compute + self.update):
            rows = self._rank(rank)
            text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
            (path / "events" / f"rank_{rank}.jsonl").write_text(text)
        (path / "config.toml").write_text(self.config())
        (path / "environment.json").write_text(json.dumps(
            {"versions": {"torch": "2.13.0"}, "host": {"name": "node0"}, "gpus": [], "pools": self.told()}))
        step, _, _ = self.times(10)
        (path / "metrics.jsonl").write_text("".join(json.dumps(
            {"step": s, "time": BEGAN + s * step, "loss": 3.0 + 1 / s, "step_seconds": step,
             "tokens_per_second": 8192 / step}) + "\n" for s in range(1, self.steps + 1)))
        return path

    def told(self) -> dict[str, Any]:
        """environment.json's own description."""
        ranks = range(self.compute), range(self.compute, self.compute + self.update)
        return {"mode": self.mode, "compute": list(ranks[0]), "update": list(ranks[1]), "payload": "fp32",
                "pairs": [[c, self.owner(c)] for c in ranks[0]], "staleness": self.staleness,
                "bytes_up": 4 * PARAMETERS, "bytes_down": 4 * PARAMETERS}

    def config(self) -> str:
        """config.toml."""
        return (f'[model]\nlayers = 2\n[parallel]\nranks = {self.compute}\n'
                f'[modules.attention]\ntensor = {self.tensor}\n'
                f'[modules.experts]\nexpert = {self.expert}\n[train]\ntrain_batch = 48\nmicro_batch = 4\n'
                f'[pools]\nmode = "{self.mode}"\nupdate_ranks = {self.update}\nstaleness = {self.staleness}\n')

    def owner(self, rank: int) -> int:
        """The update rank that serves a compute rank."""
        return self.compute + rank * self.update // self.compute

    def role(self, rank: int) -> str:
        """The pool of a rank."""
        return "compute" if rank < self.compute else "update"

    def times(self, step: int) -> tuple[float, float, float]:
        """Seconds of the step, and what the slowest rank of each pool works."""
        ours = max(self.compute_seconds * self.change(r, step) for r in range(self.compute))
        theirs = max(self.update_seconds * self.change(r, step)
                     for r in range(self.compute, self.compute + self.update))
        together = 0.0 if self.mode == "sync" else self.overlap * min(ours, theirs)
        return ours + theirs - together + self.send_seconds + self.link_seconds, ours, theirs

    def _rank(self, rank: int) -> list[dict[str, Any]]:
        role, chance = self.role(rank), random.Random(rank)
        peers = [self.owner(rank)] if role == "compute" else [c for c in range(self.compute) if self.owner(c) == rank]
        state = self.state(rank) if self.state is not None else 12 * PARAMETERS // self.update
        rows: list[dict[str, Any]] = [
            {"event": "start", "time": BEGAN, "rank": rank, "host": f"node{rank // 2}"},
            {"event": "pool", "time": BEGAN, "role": role, "index": 0, "mode": self.mode, "peers": peers,
             "incarnation": 1, "working_bytes": 2_000_000, "state_bytes": state if role == "update" else 0}]
        extra = sorted(self.events.get(rank, []), key=lambda row: row.get("step", 0))
        for step in range(1, self.steps + 1):
            rows += [row for row in extra if row.get("step") == step]
            rows += self._step(rank, role, peers, step, state, chance)
        rows += [row for row in extra if not 1 <= row.get("step", 0) <= self.steps]
        end = self.ends.get(rank, "finished")
        return rows + ([{"event": end, "time": BEGAN + 999, "step": self.steps}] if end else [])

    def _step(self, rank: int, role: str, peers: list[int], step: int, state: int,
              chance: random.Random) -> list[dict[str, Any]]:
        whole, ours, _ = self.times(step)
        jitter = 1 + chance.uniform(-self.noise, self.noise)
        time, per = BEGAN + step * whole, 4 * PARAMETERS // self.compute
        send = self.send_seconds
        if role == "compute":  # the pool's own collectives make all of its ranks as slow as the slowest
            work = {"data": 0.002 * self.change(rank, step), "forward": ours / 3, "backward": 2 * ours / 3}
            waits = "pool_wait_weights"
        else:
            work = {"optimizer": self.update_seconds * self.change(rank, step) * jitter}
            waits = "pool_wait_gradients"
        busy = min(sum(work.values()) + send, whole)
        blocked = self.blocked_seconds if role == "compute" else 0.0
        lag = self.lag(step)
        link = {"bytes": per, "seconds": 0.008 * jitter, "latency_seconds": 0.002,
                "queue_depth": self.queue(rank, step), "resends": 0, "checksum_errors": 0}
        direction = "up" if role == "compute" else "down"
        row = {"event": "pool_step", "time": time, "step": step, "role": role, "incarnation": 1,
               "version": step - 1 - lag if role == "compute" else step, "staleness": lag, "step_seconds": whole,
               "busy_seconds": busy - blocked, "wait_seconds": whole - busy, "send_wait_seconds": blocked,
               "bytes_sent": per * len(peers),
               "bytes_received": per * len(peers), "messages_sent": 9 * len(peers), "messages_received": 9 * len(peers),
               "resends": 0, "checksum_errors": 0, "duplicates": 0, "version_mismatches": 0,
               "queue_depth": self.queue(rank, step), "latency_seconds": 0.002,
               "state_bytes": state if role == "update" else 0, "resident_bytes": 500_000_000,
               "links": [{"peer": peer, "direction": direction, **link} for peer in peers]}
        spans = [{"span": name, "step": step, "start": time, "seconds": seconds} for name, seconds in
                 {**work, "pool_send": send, waits: whole - busy}.items()]
        rows = [*spans, row]
        if role == "compute" and step % 5 == 0:
            own = self.compute_seconds * self.change(rank, step) * jitter
            rows.append({"times": {"attention": own / 2, "experts": own / 2}, "step": step})
        return rows


def trouble(name: str, step: int, peer: int, **fields: Any) -> dict[str, Any]:
    """One event of trouble, as the rank that saw it writes it."""
    return {"event": name, "time": BEGAN + step, "step": step, "peer": peer, **fields}
