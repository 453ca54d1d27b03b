"""Files that a user names: regular ones, up to a size. A device or a pipe has no end and is refused."""

from __future__ import annotations

import stat
from pathlib import Path

from diag.errors import UsageError


def read_regular(path: Path, limit: int, label: str) -> bytes:
    """The whole of `path`; `label` begins every complaint.

    Raises:
        FileNotFoundError: for the caller, who knows which command writes such a file.
        UsageError: no regular file, larger than `limit` bytes, or not readable.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            what = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise UsageError(f"{label}: is {what}")
        if found.st_size > limit:
            raise UsageError(f"{label}: has {found.st_size:,} bytes, more than the {limit:,} that are read")
        with path.open("rb") as stream:
            data = stream.read(limit + 1)  # files of /proc say 0
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{label}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"{label}: cannot be read: {error}") from None
    if len(data) > limit:
        raise UsageError(f"{label}: has more than the {limit:,} bytes that are read")
    return data
