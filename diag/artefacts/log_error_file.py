"""torchelastic's error files: what `@record` leaves when a rank dies of an exception.

`<log_dir>/<run_id>_<rand>/attempt_<k>/<local_rank>/error.json`, or the path in TORCHELASTIC_ERROR_FILE:

    {"message": {"message": "ValueError: ...",
                 "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"}, "errorCode": 1}}

`message` may also be plain text (torch 1.9 to 2.14). Read as a log whose lines are the call stack, so that everything
that is known about log lines and tracebacks applies; `line` counts the lines of the call stack.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

from diag.artefacts import Artefact, Source, Unreadable
from diag.artefacts import log as console
from diag.artefacts.log_facts import Log

NAME = "torchelastic-error"
#: A class of its own only so that `recognise` can tell the two readers apart; detectors ask for `Log`.
ARTEFACT = Log
#: A call stack is kilobytes; nothing that large is an error file.
MAX_BYTES = 16 << 20


def sniff(head: bytes, name: str) -> float:
    """JSON that begins with the one key these files have."""
    start = head[:400].lstrip()
    if not start.startswith(b"{") or b'"message"' not in start[:40]:
        return 0.0
    return 0.9 if b"py_callstack" in head or b'"extraInfo"' in head or name == "error.json" else 0.0


def read(source: Source) -> Artefact:
    """The exception as a log. `Unreadable` when it is not JSON of this shape."""
    if source.bytes > MAX_BYTES:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="is too large for an error file")
    with source.open() as stream:
        data = stream.read(MAX_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        problem = f"is not whole JSON: {error}"[:200]
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=problem)
    text, time = _text(content)
    if not text:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="holds no message")
    body = text.encode("utf-8", "replace")
    inner = replace(source, head=body[:65_536], bytes=len(body), open=lambda: io.BytesIO(body), compression=None,
                    real=None)
    log = console.read(inner)
    if isinstance(log, Log):
        log.format, log.bytes = NAME, source.bytes
        if time is not None:
            log.clock.append((1, time))
    return log


def _text(content: Any) -> tuple[str, float | None]:
    """The call stack (or message) and the time of an error file; empty when it has neither."""
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return message, None
    if not isinstance(message, dict):
        return "", None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack, words = extra.get("py_callstack"), message.get("message")
    text = stack if isinstance(stack, str) and stack.strip() else words if isinstance(words, str) else ""
    try:
        time = float(extra["timestamp"])
    except (KeyError, TypeError, ValueError):
        time = None
    return text, time
