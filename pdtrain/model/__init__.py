"""The model: plain single-device PyTorch that reads like the paper. Nothing here mentions rank, group or degree.

Shape legend used in this package: b batch, s sequence, t tokens (b x s), h hidden, n heads, d head dimension,
f FFN hidden, e experts, k experts per token, r routed rows (t x k, less when tokens are dropped).
"""

from pdtrain.model.build import build_model
from pdtrain.model.transformer import Transformer

__all__ = ["Transformer", "build_model"]
