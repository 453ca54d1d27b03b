"""The black box: what a diagnosis needs from a training run, from any PyTorch loop in three lines.

    from pdtrain.recorder import Recorder

    recorder = Recorder("runs/mine")                             # rank and world size from torch.distributed or env
    ...
    recorder.log(step, loss=loss, lr=lr, grad_norm=norm)         # tensors welcome: read once per logging interval

Importing this package imports no torch. See docs/recorder.md, and docs/run-directory.md for the files.
"""

from __future__ import annotations

from pdtrain.recorder.environment import prepare_environment, write_config, write_environment
from pdtrain.recorder.recorder import Recorder

__all__ = ["Recorder", "prepare_environment", "write_config", "write_environment"]
