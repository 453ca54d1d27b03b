"""Checkpoints on torch.distributed.checkpoint: atomic commit, per-module cadence, any layout into any layout."""

from pdtrain.checkpoint.checkpointer import Checkpointer, Restored

__all__ = ["Checkpointer", "Restored"]
