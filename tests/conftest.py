"""`make test` runs every fast test and a seeded sample of the slow ones; `--all` (make acceptance) runs everything."""

from __future__ import annotations

import os
import random
import shutil
import signal

import pytest

#: How many slow tests an ordinary run takes, and the seed that picks them (PDTRAIN_TEST_SEED to vary).
SLOW_SAMPLE = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every slow test, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["COLUMNS"] = "100"  # as where there is no terminal; a runner with workers sets its own
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: children must hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    if not config.getoption("--all") and len(items) != len(slow) and len(slow) > SLOW_SAMPLE:
        seed = int(os.environ.get("PDTRAIN_TEST_SEED", "0"))
        chosen = set(random.Random(seed).sample([item.nodeid for item in slow], SLOW_SAMPLE))
        left_out = [item for item in slow if item.nodeid not in chosen]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if os.geteuid() != 0:
        _skip(items, "root", "needs root")
    if not (shutil.which("chromium") or shutil.which("chromium-browser")):
        _skip(items, "chromium", "needs the Debian package chromium")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))
