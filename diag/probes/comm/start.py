"""Start the ranks of a probe on this machine: torchrun's own agent, through its public interface.

The ranks are forked from a server that has imported torch once, so that eight of them start in seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from diag.errors import MissingExtra, PdtrainError, UsageError
from diag.probes.comm.ask import Ask
from diag.probes.comm.rank import Shown, run_rank

#: After a rank has ended with a finding the others are given this long; they have said what they know by then.
GRACE_SECONDS = 5
#: Where a rank leaves the exit status of the report that it printed.
STATUS_FILE = "PDTRAIN_COMM_STATUS"
#: As of an internal error of any command.
BUG = 70


def entry(ask: Ask, shown: Shown) -> None:
    """One rank of a local job; its exit status goes to the file that the starter names."""
    try:
        status = run_rank(ask, shown)
    except PdtrainError as error:
        Path(os.environ[STATUS_FILE]).write_text(f"{error.exit_status}\n{error}", "utf-8")
        os._exit(error.exit_status)
    except Exception:
        traceback.print_exc()
        status = BUG
    if status is not None:
        Path(os.environ[STATUS_FILE]).write_text(str(status), "ascii")
    sys.stdout.flush()
    if status:
        os._exit(status)


def run_local(ask: Ask, shown: Shown, processes: int) -> int:
    """Measure among `processes` ranks of this machine; the status of the report that one of them printed.

    Raises:
        MissingExtra: torch is not installed.
        UsageError: what the ranks found wrong with what was asked.
    """
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    except ImportError:
        raise MissingExtra("pdtrain diag comm", "train", "torch") from None
    import multiprocessing

    more = ["pdtrain.config", "pdtrain.parallel.meshes"] if ask.config is not None else []
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "diag.probes.comm.rank", *more])
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # the report says it better
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="pdtrain-comm-") as folder, _environment(Path(folder)) as status:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="pdtrain-comm", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, start_method="forkserver", shutdown_timeout=GRACE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        failure = ""
        try:
            elastic_launch(config, entry)(ask, shown)
        except SignalException as received:
            return 128 + int(received.sigval)
        except (ChildFailedError, json.JSONDecodeError) as error:
            failure = _first(error)
        code, _, words = status.read_text("utf-8").partition("\n") if status.exists() else ("", "", "")
        if words:
            raise UsageError(words)
        if code:
            return int(code)
        print(f"pdtrain: no rank could report{failure and f': {failure}'}", file=sys.stderr)
        return 1


def _first(error: Exception) -> str:
    try:
        rank, first = error.get_first_failure()  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return str(error)
    code = int(first.exitcode)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return f"rank {rank} {how}"


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[Path]:
    """The variables that every rank inherits, in force only while the job runs."""
    before = dict(os.environ)
    status = folder / "status"
    os.environ |= {STATUS_FILE: str(status)}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # Gloo's own words of a lost peer; the report has better ones
    try:
        yield status
    finally:
        os.environ.clear()
        os.environ.update(before)
