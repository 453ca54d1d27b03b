"""Gradients as payloads, and error feedback: what rounding (`pools.payload`) and thinning (`pools.top_k`) take from a
gradient is added to the next one of its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdtrain.config.schema import Pools
from pdtrain.pools.message import DTYPES
from pdtrain.pools.plan import Bucket
from pdtrain.pools.wire import encode, thinned


class Feedback:
    """What was taken from the gradients of a rank's `buckets`. An attempt at a step counts only once it is applied."""

    def __init__(self, settings: Pools, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.dtype = DTYPES[settings.payload]
        self.top_k = settings.top_k
        self.on = settings.error_feedback and (self.dtype is not torch.float32 or self.top_k < 1)
        self._taken: dict[int, Tensor] = {}  # bucket -> from the gradients applied so far
        self._attempt: dict[int, Tensor] = {}  # the same with the attempt under way

    def begin(self) -> None:
        """An attempt at a step begins."""
        self._attempt = dict(self._taken)

    def applied(self) -> None:
        """The attempt under way is the one that counts."""
        self._taken = self._attempt

    def payload(self, bucket: Bucket, gradients: Sequence[Tensor]) -> Tensor:
        """What travels of `gradients`; they may share its memory, so nobody changes them before it has been sent."""
        if not self.on:
            return encode(gradients, self.dtype, share=True)
        wanted = encode(gradients, torch.float32)
        if bucket.index in self._attempt:
            wanted += self._attempt[bucket.index]
        if self.top_k < 1:
            payload, carried = thinned(wanted, self.top_k, self.dtype)
        else:
            carried = (payload := wanted.to(self.dtype)).float()
        self._attempt[bucket.index] = wanted - carried
        return payload

    def residuals(self) -> list[Tensor]:
        """What was taken from the gradients applied so far, one tensor per bucket, live; empty without feedback."""
        if not self.on:
            return []
        return [self._taken.setdefault(bucket.index, torch.zeros(bucket.numel)) for bucket in self.buckets]
