"""The typed run configuration: schema, presets, overrides, rules."""

from pdtrain.config.dump import to_toml
from pdtrain.config.load import Loaded, load_run, presets, read_run
from pdtrain.config.mistakes import Mistake
from pdtrain.config.resolved import Resolved, resolve
from pdtrain.config.schema import MODULES, Run

__all__ = [
    "MODULES",
    "Loaded",
    "Mistake",
    "Resolved",
    "Run",
    "load_run",
    "presets",
    "read_run",
    "resolve",
    "to_toml",
]
