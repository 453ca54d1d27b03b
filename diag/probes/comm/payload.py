"""One all-to-all of the same numbers as FP32, BF16 and FP8, with what conversion costs on both sides.

FP8 is E4M3 with one FP32 scale per row of `HIDDEN`, as FP8 dispatch sends it; it travels as bytes, scales after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diag.probes.comm.hierarchy import median
from diag.probes.comm.operations import ITEM, Bench
from diag.probes.comm.records import Extra

#: Elements that share a scale: a token's hidden vector of a small model.
HIDDEN = 1024
E4M3_MAX = 448.0


def compare(bench: Bench, bytes_: int) -> Iterator[Extra | str]:
    """Three results for `bytes_` of FP32 per rank: exchange alone, conversions alone, their sum, the error left."""
    import torch
    import torch.distributed as dist

    size = bench.size
    rows = max(1, bytes_ // ITEM // HIDDEN // size) * size
    generator = torch.Generator(device="cpu").manual_seed(bench.me)
    x = torch.randn(rows, HIDDEN, generator=generator).to(bench.device)
    plain = torch.empty_like(x)
    dist.all_to_all_single(plain, x)

    def pack_fp8() -> tuple[Any, ...]:
        scale = x.abs().amax(1, keepdim=True).clamp_(min=1e-12) / E4M3_MAX
        return (x / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale

    def unpack_fp8(values: Any, scale: Any) -> Any:
        return values.view(torch.float8_e4m3fn).to(torch.float32) * scale

    kinds: list[tuple[str, Any, Any]] = [
        ("fp32", lambda: (x,), lambda values: values),
        ("bf16", lambda: (x.to(torch.bfloat16),), lambda values: values.to(torch.float32)),
        ("fp8", pack_fp8, unpack_fp8),
    ]
    for name, pack, unpack in kinds:
        packed = pack()
        received = tuple(torch.empty_like(part) for part in packed)

        def exchange(packed: Any = packed, received: Any = received) -> None:
            for sent, place in zip(packed, received, strict=True):
                # Gloo knows no 2-byte floats in some versions: bytes are bytes
                dist.all_to_all_single(place.view(torch.uint8), sent.view(torch.uint8))

        def both_ends(pack: Any = pack, unpack: Any = unpack, received: Any = received) -> None:
            pack()
            unpack(*received)

        moved = median(bench, exchange)
        convert = 0.0 if name == "fp32" else median(bench, both_ends)
        error = float((unpack(*received) - plain).abs().amax() / plain.abs().amax())
        yield Extra(kind="payload", name=name, numbers={
            "bytes": sum(part.numel() * part.element_size() for part in packed), "exchange_seconds": moved,
            "convert_seconds": convert, "total_seconds": moved + convert, "largest_error": bench.largest(error)[0]})
