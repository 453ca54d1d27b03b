"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` beside `path` and take its name then: whoever reads `path` never sees half of it, and what was there
    stays when the disk is full. A device or a named pipe is written as it is.

    Raises OSError.
    """
    if path.exists() and not path.is_file():  # /dev/null, a named pipe
        path.write_bytes(data)
        return
    with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp",
                                     delete=False) as scratch:
        try:
            scratch.write(data)
            scratch.flush()
            umask = os.umask(0)
            os.umask(umask)
            Path(scratch.name).chmod(0o666 & ~umask)
            Path(scratch.name).replace(path)
        except BaseException:
            Path(scratch.name).unlink(missing_ok=True)
            raise
