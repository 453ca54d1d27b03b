"""What a test makes the processes of a job do: modules of the trainer are patched as they are loaded, from outside."""

from __future__ import annotations

from pathlib import Path

_FINDER = """
import importlib.abc, importlib.util, sys

class Planter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        plant = PLANTS.get(name)
        if plant is None:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), plant(module))
        return spec

sys.meta_path.insert(0, Planter())
"""


def plant_modules(folder: Path, text: str) -> None:
    """Python processes with `folder` in their PYTHONPATH run `text` first; its PLANTS: module -> what is done to it."""
    (folder / "sitecustomize.py").write_text(text + _FINDER)
