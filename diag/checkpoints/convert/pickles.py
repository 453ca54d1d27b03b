"""Writing pickles without the classes that they name: torch's metadata and state dicts, from plain data.

Protocol 2, as torch.save writes. A `Global` is written as the name of a class or function, a `Call` as a call of one,
a `New` as an instance with a state, a `Stored` as a tensor whose storage lies beside the pickle. Nothing is imported.
"""

from __future__ import annotations

import argparse
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diag.checkpoints.dtypes import STORAGES

#: dtype -> torch's typed storage class
_TYPED = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


@dataclass(frozen=True, slots=True)
class Global:
    """module.name"""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """function(*args)"""

    function: Global
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class New:
    """An instance of `cls` made without its __init__, then given `state`."""

    cls: Global
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A row-major tensor that owns a storage; `payload` is whatever the writer of the archive keeps for it."""

    dtype: str
    shape: tuple[int, ...]
    payload: Any
    nbytes: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dictionary whose keys are themselves `New` or `Call`."""

    pairs: list[tuple[Any, Any]]


def size(shape: tuple[int, ...]) -> Call:
    """torch.Size"""
    return Call(Global("torch", "Size"), (tuple(shape),))


def dumps(value: Any) -> tuple[bytes, list[Stored]]:
    """The pickle of `value` and its tensors; the n-th has the storage key str(n). Raises `TypeError`."""
    writer = _Writer()
    writer.out += b"\x80\x02"
    writer.put(value)
    writer.out += b"."
    return bytes(writer.out), writer.stored


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self.memo: dict[Any, int] = {}
        self.stored: list[Stored] = []

    def put(self, value: Any) -> None:
        out = self.out
        if value is None:
            out += b"N"
        elif value is True or value is False:
            out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            self._once(value, b"X" + struct.pack("<I", len(raw)) + raw)
        elif isinstance(value, Global):
            self._once(value, b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n")
        elif isinstance(value, tuple):
            self._tuple(value)
        elif isinstance(value, list):
            out += b"]"
            if value:
                out += b"("
                for item in value:
                    self.put(item)
                out += b"e"
        elif isinstance(value, OrderedDict):
            self.put(Call(Global("collections", "OrderedDict")))
            self._items(value.items())
        elif isinstance(value, dict):
            out += b"}"
            self._items(value.items())
        elif isinstance(value, Pairs):
            out += b"}"
            self._items(value.pairs)
        elif isinstance(value, Call):
            self.put(value.function)
            self._tuple(value.args)
            out += b"R"
        elif isinstance(value, New):
            self.put(value.cls)
            out += b")\x81"
            self.put(value.state)
            out += b"b"
        elif isinstance(value, argparse.Namespace):
            self.put(New(Global("argparse", "Namespace"), vars(value)))
        elif isinstance(value, Stored):
            self._tensor(value)
        else:
            raise TypeError(f"{type(value).__name__} is not written")

    def _once(self, value: Any, code: bytes) -> None:
        """Write `code`, or a reference to where it was written before."""
        index = self.memo.get(value)
        if index is not None:
            self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
            return
        index = self.memo[value] = len(self.memo)
        self.out += code
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def _integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(raw)]) + raw

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out += b")"
            return
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.put(item)
        self.out += b"t" if len(value) > 3 else bytes([0x84 + len(value)])

    def _items(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        listed = list(pairs)
        if listed:
            self.out += b"("
            for key, item in listed:
                self.put(key)
                self.put(item)
            self.out += b"u"

    def _tensor(self, value: Stored) -> None:
        """As torch reduces a tensor: typed storages for the old types, an untyped one and the dtype for the new."""
        key = str(len(self.stored))
        self.stored.append(value)
        typed = _TYPED.get(value.dtype)
        elements = 1
        for length in value.shape:
            elements *= length
        strides, step = [], 1
        for length in reversed(value.shape):
            strides.append(step)
            step *= max(length, 1)
        cls = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
        self.put(Global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"))
        self.out += b"("
        self.put(("storage", cls, key, "cpu", elements if typed else value.nbytes))
        self.out += b"Q"
        for item in (0, value.shape, tuple(reversed(strides)), False, Call(Global("collections", "OrderedDict"))):
            self.put(item)
        if not typed:
            self.put(Global("torch", value.dtype))
        self.out += b"tR"
