"""A run directory belongs to one job at a time: its launcher and every rank hold a shared lock on it while they live.

A new job takes the lock alone first, which fails while anybody of another still writes there, orphans included. Locks
are the kernel's (flock), on the directory itself: nothing is left behind, whatever is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from diag.errors import UsageError


def take(run_dir: Path) -> int:
    """The launcher's part; a descriptor that holds the lock until it is closed, or -1 where there are no locks.

    Raises UsageError: another job is writing there.
    """
    descriptor = share(run_dir, fcntl.LOCK_EX)
    if descriptor >= 0:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def share(run_dir: Path, kind: int = fcntl.LOCK_SH) -> int:
    """A rank's part, as `take`; `kind`: of lock."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:  # also: a file system without locks
        os.close(descriptor)
        if kind == fcntl.LOCK_EX and error.errno == errno.EWOULDBLOCK:
            raise UsageError(
                f"{run_dir} is in use: a job is still writing there; wait for its end, or choose another --run-dir"
            ) from None
        return -1
    return descriptor
