"""BF16 products mean the same whether the machine multiplies BF16 itself or in FP32."""

from __future__ import annotations

import pytest
import torch

from pdtrain.model import gemm

GENERATOR = torch.Generator().manual_seed(0)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).bfloat16().requires_grad_()


@pytest.fixture(params=[True, False], ids=["native", "widened"])
def path(request, monkeypatch):
    """Both paths, whichever this machine would take."""
    monkeypatch.setattr(gemm, "_cpu_has_bf16", lambda: request.param)
    return request.param


def agrees(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """BF16 keeps 8 bits: half a unit in the last place, plus what the accumulation may add near zero."""
    return result.dtype == torch.bfloat16 and torch.allclose(result.double(), exact, rtol=2**-7, atol=0.02)


def check(function, reference, *operands: torch.Tensor) -> None:
    out = function(*operands)
    wide = [operand.detach().double().requires_grad_() for operand in operands]
    exact = reference(*wide)
    assert agrees(out, exact)
    seed = torch.randn(*exact.shape, generator=GENERATOR).bfloat16()
    for grad, exact_grad in zip(
        torch.autograd.grad(out, operands, seed), torch.autograd.grad(exact, wide, seed.double()), strict=True
    ):
        assert agrees(grad, exact_grad)


def test_linear(path):
    check(gemm.linear, lambda x, w: x @ w.T, bf16(24, 16), bf16(8, 16))


def test_grouped_with_an_empty_expert(path):
    sizes = [5, 0, 11]
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)

    def reference(rows, weights):
        return torch.cat([part @ weight for part, weight in zip(rows.split(sizes), weights, strict=True)])

    check(lambda rows, w: gemm.grouped(rows, w, offsets), reference, bf16(16, 16), bf16(3, 16, 8))


def test_attention_with_fewer_key_heads(path):
    def reference(q, k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    check(gemm.attention, reference, bf16(2, 4, 9, 8), bf16(2, 2, 9, 8), bf16(2, 2, 9, 8))


def test_fp32_stays_fp32(path):
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(gemm.linear(x, w), torch.nn.functional.linear(x, w))
