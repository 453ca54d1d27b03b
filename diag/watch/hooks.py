"""Telling others about alarms: a command that gets the alarm on standard input, a URL that gets it by POST.

Both run beside the watch, one alarm after the other, each in bounded time. What fails is said once and changes nothing
else: a watch that dies of its pager is worse than none.
"""

from __future__ import annotations

import queue
import shlex
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from diag.errors import UsageError

COMMAND_SECONDS = 30.0
REQUEST_SECONDS = 5.0
#: Alarms that may wait for a slow receiver; what comes on top is dropped, and that is said.
WAITING = 200


class Hooks:
    """Sends alarms to `commands` (argument lists) and `urls`. `complain` gets each kind of failure once."""

    def __init__(self, commands: Sequence[Sequence[str]], urls: Sequence[str], complain: Callable[[str], None]) -> None:
        self.complain = complain
        self._said: set[str] = set()
        self._actions: list[tuple[str, Callable[[bytes], str | None]]] = [
            *((f"--exec {command[0]}", lambda body, command=command: self._run(command, body)) for command in commands),
            *((f"--webhook {host_of(url)}", lambda body, url=url: post(url, body)) for url in urls),
        ]
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._running: subprocess.Popen[bytes] | None = None

    def send(self, body: bytes) -> None:
        """Queue one alarm; never blocks."""
        if not self._actions:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="watch-hooks", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(body)
        except queue.Full:
            self._once("hooks", "alarms come faster than they are taken; some are not sent")

    def close(self, seconds: float = 10.0) -> None:
        """Let what waits be sent, for so long at most."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
                self._thread.join(seconds)
            except queue.Full:
                pass
            if (running := self._running) is not None:  # nothing of the watch outlives it
                running.kill()

    def _work(self) -> None:
        while (body := self._queue.get()) is not None:
            for name, action in self._actions:
                try:
                    problem = action(body)
                except Exception as error:  # whatever a receiver does, the watch goes on
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    self._once(name, problem)

    def _run(self, command: Sequence[str], body: bytes) -> str | None:
        """Start `command` without a shell, give it `body`; what went wrong, in words."""
        try:
            with subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE) as process:
                self._running = process
                try:
                    _, error = process.communicate(body, timeout=COMMAND_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return f"took longer than {COMMAND_SECONDS:.0f} s and was ended"
                finally:
                    self._running = None
        except OSError as problem:
            return f"cannot be started: {problem.strerror or problem}"
        if process.returncode:
            said = error.decode("utf-8", "replace").strip().splitlines()
            return f"exit status {process.returncode}{f': {said[-1][:200]}' if said else ''}"
        return None

    def _once(self, name: str, problem: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self.complain(f"{name}: {problem}")


def post(url: str, body: bytes) -> str | None:
    """POST `body` as JSON; what went wrong, in words."""
    request = urllib.request.Request(url, data=body, method="POST", headers={
        "Content-Type": "application/json", "User-Agent": "pdtrain-watch"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        return f"answered {error.code} {error.reason}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None


def command_of(text: str) -> list[str]:
    """The argument list that the user wrote. Raises `UsageError`."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--exec {text!r}: {error}") from None
    if not parts:
        raise UsageError("--exec: no command")
    return parts


def checked_url(url: str) -> str:
    """`url` when it is one that can be posted to. Raises `UsageError`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--webhook {url}: not a http or https URL")
    return url


def host_of(url: str) -> str:
    """The host and port of a URL: the rest may hold a secret."""
    return urlsplit(url).netloc.rpartition("@")[2] or "?"
