"""Collectives over plain sockets, as an independent measure: `python -m tests.diag.probes.comm_ring RANK BYTES HOST...`

Prints the seconds of each of some repetitions of every exchange, as JSON. They send what Gloo's algorithms send: a ring
for send_recv, all_reduce (reduce-scatter, then all-gather) and all_gather, a whole all_reduce for reduce_scatter,
everybody to everybody for all_to_all, a binomial tree for broadcast. BYTES as nccl-tests counts them.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

PORT = 29777
REPEATS = 15
READY, DATA = b"r", b"d"
NAMES = ("send_recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class Mesh:
    """A connection to every other rank."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        self.rank, self.size = rank, len(addresses)
        server = socket.create_server((addresses[rank], PORT), backlog=self.size)
        self.peers: dict[int, socket.socket] = {}
        for other in range(rank):
            self.peers[other] = self._connect(addresses[other])
            self.peers[other].sendall(bytes([rank]))
        for _ in range(rank + 1, self.size):
            end, _ = server.accept()
            self.peers[end.recv(1)[0]] = end
        for end in self.peers.values():
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def _connect(address: str) -> socket.socket:
        for _ in range(200):
            try:
                return socket.create_connection((address, PORT), timeout=20)
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"no answer from {address}")

    def receive(self, source: int, into: memoryview) -> None:
        place = 0
        while place < len(into):
            place += self.peers[source].recv_into(into[place:])

    def together(self, *moves: Callable[[], object]) -> None:
        threads = [threading.Thread(target=move) for move in moves[1:]]
        for thread in threads:
            thread.start()
        moves[0]()
        for thread in threads:
            thread.join()

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        """One step of a ring: to the next, from the one before."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.together(lambda: self.receive(before, received), lambda: self.peers[after].sendall(sent))

    def barrier(self) -> None:
        token = bytearray(1)
        for _ in range(2 * self.size):
            self.exchange(memoryview(b"x"), memoryview(token))

    def all_reduce(self, data: np.ndarray, scratch: np.ndarray) -> None:
        parts = np.split(data, self.size)
        for step in range(self.size - 1):
            out, into = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            self.exchange(_bytes(parts[out]), _bytes(scratch))
            parts[into] += scratch
        self.all_gather(data, first=self.rank + 1)

    def all_gather(self, data: np.ndarray, first: int | None = None) -> None:
        parts, first = np.split(data, self.size), self.rank if first is None else first
        for step in range(self.size - 1):
            self.exchange(_bytes(parts[(first - step) % self.size]), _bytes(parts[(first - step - 1) % self.size]))

    def all_to_all(self, data: np.ndarray, other: np.ndarray) -> None:
        """Everybody to everybody, in Gloo's order and with its handshake: data leaves when the receiver said it waits,
        and that word queues behind whatever its host is sending already, to anybody."""
        out, into = np.split(data, self.size), np.split(other, self.size)
        ready = {peer: threading.Event() for peer in self.peers}
        busy = {peer: threading.Lock() for peer in self.peers}

        def listen(peer: int) -> None:
            kind = bytearray(1)
            for _ in range(2):
                self.receive(peer, memoryview(kind))
                if kind == READY:
                    ready[peer].set()
                else:
                    self.receive(peer, _bytes(into[peer]))

        def say(peer: int) -> None:
            with busy[peer]:
                self.peers[peer].sendall(READY)

        def give(peer: int) -> None:
            ready[peer].wait()
            with busy[peer]:
                self.peers[peer].sendall(DATA)
                self.peers[peer].sendall(_bytes(out[peer]))

        moves: list[Callable[[], object]] = [lambda peer=peer: listen(peer) for peer in self.peers]
        for step in range(1, self.size):
            after, before = (self.rank + step) % self.size, (self.rank - step) % self.size
            moves += [lambda peer=after: give(peer), lambda peer=before: say(peer)]
        self.together(*moves)

    def broadcast(self, data: np.ndarray) -> None:
        distance = 1
        while distance < self.size:  # those below `distance` have it and give it to who is that far away
            if self.rank < distance and self.rank + distance < self.size:
                self.peers[self.rank + distance].sendall(_bytes(data))
            elif distance <= self.rank < 2 * distance:
                self.receive(self.rank - distance, _bytes(data))
            distance *= 2


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")


def main(rank: int, size: int, addresses: list[str]) -> None:
    mesh = Mesh(rank, addresses)
    data, other = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
    scratch = np.zeros(size // 4 // mesh.size, np.float32)
    runs: tuple[Callable[[], object], ...] = (
        lambda: mesh.exchange(_bytes(data), _bytes(other)),
        lambda: mesh.all_reduce(data, scratch),
        lambda: mesh.all_gather(data),
        lambda: mesh.all_reduce(data, scratch),
        lambda: mesh.all_to_all(data, other),
        lambda: mesh.broadcast(data),
    )
    found = {}
    for name, run in zip(NAMES, runs, strict=True):
        mesh.barrier()
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
        found[name] = times
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
