"""Corpora, tokenizers, packing, order and the way from a step back to its documents. NumPy only: no torch here."""

from __future__ import annotations

from pdtrain.data.corpus import Data, open_data
from pdtrain.data.store import DocumentSpan

__all__ = ["Data", "DocumentSpan", "open_data"]
