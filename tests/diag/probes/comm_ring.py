"""A ring over plain sockets, as an independent measure: `python -m tests.diag.probes.comm_ring RANK BYTES ADDRESS...`

Prints the seconds of each of some send-receives of BYTES around the ring and of some ring all-reduces of BYTES
(reduce-scatter, then all-gather), one after the other, as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import numpy as np

PORT = 29777
REPEATS = 9


class Ring:
    def __init__(self, rank: int, addresses: list[str]) -> None:
        self.rank, self.size = rank, len(addresses)
        server = socket.create_server((addresses[rank], PORT))
        self.after = self._connect(addresses[(rank + 1) % self.size])
        self.before, _ = server.accept()
        for end in (self.after, self.before):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def _connect(address: str) -> socket.socket:
        for _ in range(200):
            try:
                return socket.create_connection((address, PORT), timeout=20)
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"no answer from {address}")

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        thread = threading.Thread(target=self.after.sendall, args=(sent,))
        thread.start()
        place = 0
        while place < len(received):
            place += self.before.recv_into(received[place:])
        thread.join()

    def together(self) -> None:
        token = bytearray(1)
        for _ in range(2 * self.size):
            self.exchange(memoryview(b"x"), memoryview(token))

    def all_reduce(self, data: np.ndarray, scratch: np.ndarray) -> None:
        parts = np.split(data, self.size)
        for step in range(self.size - 1):
            out, into = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            self.exchange(_bytes(parts[out]), _bytes(scratch))
            parts[into] += scratch
        for step in range(self.size - 1):
            out, into = (self.rank + 1 - step) % self.size, (self.rank - step) % self.size
            self.exchange(_bytes(parts[out]), _bytes(parts[into]))


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")


def main(rank: int, size: int, addresses: list[str]) -> None:
    ring = Ring(rank, addresses)
    data, other = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
    scratch = np.zeros(size // 4 // ring.size, np.float32)
    found = {}
    for name, run in (("send_recv", lambda: ring.exchange(_bytes(data), _bytes(other))),
                      ("all_reduce", lambda: ring.all_reduce(data, scratch))):
        ring.together()
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
        found[name] = times
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
