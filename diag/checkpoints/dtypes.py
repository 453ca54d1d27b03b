"""Element types under torch's names, and what they are in numpy. No torch, no ml_dtypes: bytes are never converted.

A type that numpy lacks is held as unsigned integers of the same width (bfloat16: uint16, float8: uint8); `to_float32`
decodes such values for arithmetic, `non_finite` finds NaN and infinities on the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Dtype:
    """`bits` per element; `held` is the numpy type of a memory map; `exponent`, `mantissa` of a float (0: no float).

    `finite` floats have no infinities: their NaN is all ones (e4m3fn), or the one pattern 0x80 (fnuz).
    """

    name: str
    bits: int
    held: str
    exponent: int = 0
    mantissa: int = 0
    special: str = "ieee"

    @property
    def is_float(self) -> bool:
        return self.exponent > 0

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements, packed."""
        return (elements * self.bits + 7) // 8


_ROWS = (
    Dtype("float64", 64, "<f8", 11, 52), Dtype("float32", 32, "<f4", 8, 23), Dtype("float16", 16, "<f2", 5, 10),
    Dtype("bfloat16", 16, "<u2", 8, 7),
    Dtype("float8_e4m3fn", 8, "u1", 4, 3, "ones"), Dtype("float8_e5m2", 8, "u1", 5, 2),
    Dtype("float8_e4m3fnuz", 8, "u1", 4, 3, "fnuz"), Dtype("float8_e5m2fnuz", 8, "u1", 5, 2, "fnuz"),
    Dtype("float8_e8m0fnu", 8, "u1", 8, 0, "e8m0"),
    Dtype("float4_e2m1fn_x2", 8, "u1"), Dtype("float6_e2m3", 6, "u1"), Dtype("float6_e3m2", 6, "u1"),
    Dtype("float4_e2m1", 4, "u1"),
    Dtype("int64", 64, "<i8"), Dtype("int32", 32, "<i4"), Dtype("int16", 16, "<i2"), Dtype("int8", 8, "i1"),
    Dtype("uint64", 64, "<u8"), Dtype("uint32", 32, "<u4"), Dtype("uint16", 16, "<u2"), Dtype("uint8", 8, "u1"),
    Dtype("bool", 8, "?"), Dtype("complex64", 64, "<c8"), Dtype("complex128", 128, "<c16"),
    Dtype("complex32", 32, "<u4"),
)
#: name (torch's, without "torch.") -> Dtype
DTYPES: dict[str, Dtype] = {row.name: row for row in _ROWS}

#: safetensors' name -> ours; https://huggingface.co/docs/safetensors, and dtypes added in 0.6
SAFETENSORS: dict[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1", "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}

#: torch's typed storage classes, as pickles of .pt files name them -> dtype name
STORAGES: dict[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}


def non_finite(array: Any, dtype: Dtype) -> int:
    """How many elements of `array` (held type, any shape) are NaN or infinite; 0 for types that have no such values."""
    if not dtype.is_float:
        return 0
    if dtype.special == "fnuz":
        return int(np.count_nonzero(array == 0x80))
    if dtype.special == "e8m0":
        return int(np.count_nonzero(array == 0xFF))
    if dtype.special == "ones":
        return int(np.count_nonzero((array & 0x7F) == 0x7F))
    if dtype.held[-2] == "f":
        return int(array.size - np.count_nonzero(np.isfinite(array)))
    mask = ((1 << dtype.exponent) - 1) << dtype.mantissa
    return int(np.count_nonzero((array & array.dtype.type(mask)) == mask))


def to_float32(array: Any, dtype: Dtype) -> Any:
    """`array` (held type) as float32 (float64 stays), a copy. Raises `ValueError` for packed types (4, 6 bits)."""
    if dtype.name in ("float64", "int64", "uint64"):
        return array.astype(np.float64)
    if dtype.name == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.bits == 8 and dtype.is_float:
        return _table(dtype.name)[array]
    if dtype.bits < 8 or dtype.name in ("float4_e2m1fn_x2", "complex32"):
        raise ValueError(f"{dtype.name} is not decoded here")
    if dtype.held[-2] == "c":
        return array
    return array.astype(np.float32)


@cache
def _table(name: str) -> Any:
    """The 256 values of an 8-bit float; OCP 8-bit floating point specification, and its fnuz variants."""
    dtype = DTYPES[name]
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        values = np.exp2(codes.astype(np.float64) - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> dtype.mantissa) & ((1 << dtype.exponent) - 1)
    fraction = codes & ((1 << dtype.mantissa) - 1)
    bias = (1 << (dtype.exponent - 1)) - 1 + (dtype.special == "fnuz")
    scaled = fraction / (1 << dtype.mantissa)
    values = np.where(exponent == 0, scaled * 2.0 ** (1 - bias), (1 + scaled) * np.exp2(exponent - float(bias))) * sign
    if dtype.special == "fnuz":
        values[0x80] = np.nan
    elif dtype.special == "ones":
        values[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == (1 << dtype.exponent) - 1
        values = np.where(top, np.where(fraction == 0, sign * np.inf, np.nan), values)
    return values.astype(np.float32)
