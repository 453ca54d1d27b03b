"""Real failures of real processes: eight ranks on Gloo under torchrun, broken on purpose, then a post-mortem.

The console alone cannot show who was guilty of a size or dtype mismatch (the receiver prints and aborts, often before
any dump), unless TORCH_DISTRIBUTED_DEBUG=DETAIL is set; nor of another order of two groups (everybody's stack is the
same): there the flight-recorder dumps do.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diag.diagnose import diagnose
from diag.schema import Finding
from tests.diag.real.launcher import launch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def root_of(*paths: Path) -> Finding:
    """The root finding of a post-mortem."""
    report = diagnose([str(path) for path in paths])
    root = next((f for f in report.findings if f.role == "root"), None)
    assert root is not None, report.headline
    return root


CONSOLE = [
    ("exception", {"peer_exception", "exception_unknown"}, [3]),
    ("kill", {"killed_unconfirmed"}, [3]),
    ("stop", {"collective_mismatch", "collective_missing_rank"}, [3]),
    ("sleep", {"collective_mismatch", "collective_missing_rank", "slow_rank_work"}, [3]),
    ("operation", {"collective_mismatch"}, [3]),
    ("early", {"uneven_batches", "collective_mismatch"}, [3]),
    ("memory", {"host_oom"}, [3]),
    ("segfault", {"segfault"}, [3]),
    ("checkpoint", {"ckpt_corrupt"}, []),
    ("size", {"collective_mismatch"}, []),
]


@pytest.mark.parametrize("fault, causes, ranks", CONSOLE, ids=[row[0] for row in CONSOLE])
def test_the_console_shows_the_cause(tmp_path, fault, causes, ranks):
    launch(tmp_path, fault)
    root = root_of(tmp_path / "console.log")
    assert root.cause in causes
    assert root.where.ranks == ranks


def test_the_dumps_name_the_rank_that_the_console_cannot(tmp_path):
    launch(tmp_path, "order", TORCH_FR_BUFFER_SIZE="2000", DUMPS=str(tmp_path))
    root = root_of(tmp_path)
    assert root.cause == "group_order_deadlock"
    assert root.where.ranks == [3]


@pytest.mark.parametrize("fault", ["size", "dtype"])
def test_with_detail_on_the_console_names_the_rank(tmp_path, fault):
    launch(tmp_path, fault, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    root = root_of(tmp_path / "console.log")
    assert root.cause == "collective_mismatch"
    assert root.where.ranks == [3]


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        launch(tmp_path, "none", torchrun=("--master-addr", "127.0.0.1", "--master-port", port), world=2)
    assert root_of(tmp_path / "console.log").cause == "port_in_use"


def test_a_node_that_never_joins(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch(tmp_path, "none", world=4,
           torchrun=("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
                     "--rdzv-conf", "join_timeout=8,timeout=20"))
    assert root_of(tmp_path / "console.log").cause in ("rendezvous_timeout", "missing_rank_init")


def test_a_healthy_run_is_quiet(tmp_path):
    launch(tmp_path, "none")
    report = diagnose([str(tmp_path / "console.log")])
    assert (report.verdict, report.exit_status()) == ("healthy", 0), report.headline
