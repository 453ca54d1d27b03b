"""The language-model loss, in FP32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nat/token of logits [b, s, v] against targets [b, s]; FP32 whatever the logits are."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
