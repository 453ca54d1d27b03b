"""The one place in pdtrain that unpickles. Pickles here come from strangers, and a pickle is a program.

    load(data)                                   builtins only: any reference to a class or function is refused
    load(data, allow={("torch", "Size"): Stub})  the pairs named are replaced by the stand-ins given, all else refused

Two dangers, two answers. A pickle that calls something (`__reduce__`) must name it first, and naming is what
`find_class` refuses. A pickle that calls nothing can still take all memory (a memo index of four thousand million),
crash the interpreter (a tuple nested a million deep as a dictionary key, hashed by recursion) or run for years (tuples
that share their parts, 2 to the 60th on the whole): `scan` walks the opcodes first, follows what they would build and
refuses that. The walk costs about 0.4 s per million opcodes, so large files are read unscanned in a child process with
limits instead (`diag.artefacts.guarded`).

Every complaint is an `ArtefactError` with the byte offset; nothing else escapes.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from diag.errors import ArtefactError

#: (module, name) in the pickle -> what stands in for it. Stand-ins must be harmless to call with any arguments.
Allow = Mapping[tuple[str, str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pickle may ask for. The defaults are far above what any trainer writes."""

    bytes: int = 2 << 30
    #: containers inside containers
    depth: int = 64
    #: nodes of the whole when shared parts are counted each time, as a walk over it would
    nodes: int = 1 << 26
    #: nodes inside one dictionary key
    key_nodes: int = 1 << 10


class _Unpickler(pickle.Unpickler):
    """C speed; resolves nothing but what `allow` lists."""

    def __init__(self, stream: BinaryIO, allow: Allow, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(stream)
        self._allow, self._persistent = allow, persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allow[module, name]
        except KeyError:
            raise ArtefactError(f"asks for {module}.{name}, which is not plain data; nothing was run") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise ArtefactError("refers to objects outside the file, which is not plain data")
        return self._persistent(pid)


def load(
    data: bytes,
    *,
    allow: Allow | None = None,
    persistent: Callable[[Any], Any] | None = None,
    limits: Limits | None = None,
    scanned: bool = True,
) -> Any:
    """The object in `data`. With `scanned=False` the opcode walk is left out: only inside a guarded process.

    `persistent` answers persistent ids (the storages of a torch checkpoint). Raises `ArtefactError`, always.
    """
    limits = limits or Limits()
    if len(data) > limits.bytes:
        raise ArtefactError(f"is {len(data):,} bytes long; more than {limits.bytes:,} are not read")
    if scanned:
        scan(data, classes=bool(allow), persistent=persistent is not None, limits=limits)
    # Without peek() the C unpickler asks for every opcode by itself: three times slower.
    stream = cast(BinaryIO, io.BufferedReader(io.BytesIO(data), 1 << 18))
    collecting = gc.isenabled()
    gc.disable()  # a hundred thousand new dictionaries would be walked again and again; nothing here is garbage
    try:
        return _Unpickler(stream, allow or {}, persistent).load()
    except ArtefactError:
        raise
    except EOFError as error:
        raise ArtefactError(f"is cut: the pickle ends early, after {len(data):,} bytes") from error
    except MemoryError as error:
        raise ArtefactError("asks for more memory than a reader may take") from error
    except Exception as error:  # a damaged pickle can raise anything; what it raises is not our bug
        at = f"near byte {stream.tell():,} of {len(data):,}"
        if "truncated" in str(error) or "ran out of input" in str(error).lower():
            raise ArtefactError(f"is cut: the pickle ends early, after {len(data):,} bytes") from error
        raise ArtefactError(f"is damaged {at} ({type(error).__name__})") from error
    finally:
        if collecting:
            gc.enable()


# What each opcode does to the stack, in the few ways that matter for depth and size.
_SCALARS_FIXED = {b"N": 0, b"\x88": 0, b"\x89": 0, b"K": 1, b"M": 2, b"J": 4, b"G": 8}
_SCALARS_COUNTED = {b"U": 1, b"T": 4, b"X": 4, b"\x8c": 1, b"\x8d": 8, b"B": 4, b"C": 1, b"\x8e": 8, b"\x8a": 1,
                    b"\x8b": 4}
_SCALARS_LINE = (b"I", b"L", b"F", b"S", b"V")
_FIXED: dict[int, int] = {k[0]: n for k, n in _SCALARS_FIXED.items()}
_COUNTED: dict[int, int] = {k[0]: n for k, n in _SCALARS_COUNTED.items()}
_LINES = frozenset(k[0] for k in _SCALARS_LINE)
_EMPTY = frozenset(b"]})\x8f")
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_FROM_MARK = frozenset(b"tld\x91")
_INTEGERS = frozenset(b"IL\x8a\x8b")
_CALLS = {"c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "\x81": "NEWOBJ", "\x92": "NEWOBJ_EX"}
_WORDS = {ord(code): name for code, name in _CALLS.items()}
_NEVER = {ord("i"): "INST", ord("o"): "OBJ", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x96: "BYTEARRAY8",
          0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER"}
#: A number of more bytes than this has no place in a dump, and as a dictionary key could be made to collide.
_INTEGER_BYTES = 8

# Nodes of the imitated stack: (depth, nodes). Scalars share one; containers grow, so theirs are lists.
_SCALAR = (0, 1)
_MARK = None


def scan(
    data: bytes, *, classes: bool = False, persistent: bool = False, limits: Limits | None = None
) -> int:
    """Follow the opcodes of `data` without building anything; the number of opcodes. Raises `ArtefactError`.

    Checks: only opcodes of plain data (with `classes`, also those that build objects); every length and memo index
    fits the file; depth, size and keys as in `limits`; ends with STOP. What the C unpickler would refuse by itself
    (a wrong type in a place) is left to it.
    """
    try:
        return _Scan(data, classes, persistent, limits or Limits()).run()
    except (IndexError, TypeError, ValueError) as error:
        # An empty stack, a mark where a value belongs, a file that ends inside an argument.
        raise ArtefactError(f"is damaged or cut: its {len(data):,} bytes are no complete pickle") from error


class _Scan:
    def __init__(self, data: bytes, classes: bool, persistent: bool, limits: Limits) -> None:
        self.data, self.classes, self.persistent, self.limits = data, classes, persistent, limits
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.at = 0

    def run(self) -> int:
        data, stack, memo, limits = self.data, self.stack, self.memo, self.limits
        end, at, count = len(data), 0, 0
        fixed, counted = _FIXED, _COUNTED
        while True:
            if at >= end:
                raise ArtefactError(f"is cut: the pickle ends early, after {end:,} bytes")
            code = data[at]
            self.at = at
            at += 1
            count += 1
            if code == 0x68:  # BINGET
                stack.append(memo[self._known(data[at])])
                at += 1
            elif code in fixed:
                stack.append(_SCALAR)
                at += fixed[code]
            elif code in counted:
                width = counted[code]
                length = int.from_bytes(data[at : at + width], "little")
                if length > end - at - width:
                    raise ArtefactError(f"is cut: the item at byte {self.at:,} of {end:,} should take {length:,} bytes")
                if code in _INTEGERS and length > _INTEGER_BYTES:
                    raise ArtefactError(f"has a number of {length:,} bytes at byte {self.at:,}; that is no dump's")
                stack.append(_SCALAR)
                at += width + length
            elif code == 0x71:  # BINPUT
                memo[data[at]] = self._top()
                at += 1
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = self._top()
            elif code == 0x28:
                stack.append(_MARK)
            elif code in _EMPTY:
                stack.append([1, 1])
            elif code == 0x61:  # APPEND
                item = stack.pop()
                self._grow(stack[-1], (item,))
            elif code == 0x65 or code == 0x90:  # APPENDS, ADDITEMS
                items = self._pop_to_mark()
                if code == 0x90:
                    self._keys(items)
                self._grow(stack[-1], items)
            elif code == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                self._keys((key,))
                self._grow(stack[-1], (key, value))
            elif code == 0x75:  # SETITEMS
                items = self._pop_to_mark()
                self._keys(items[::2])
                self._grow(stack[-1], items)
            elif code in _TUPLES:
                size = _TUPLES[code]
                if len(stack) < size:
                    raise IndexError
                items = stack[-size:]
                del stack[-size:]
                self._new(items)
            elif code in _FROM_MARK:
                items = self._pop_to_mark()
                if code in b"d\x91":
                    self._keys(items[::2] if code == 0x64 else items)
                self._new(items)
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[self._known(int.from_bytes(data[at : at + 4], "little"))])
                at += 4
            elif code == 0x72:  # LONG_BINPUT
                memo[self._index(int.from_bytes(data[at : at + 4], "little"))] = self._top()
                at += 4
            elif code == 0x95:  # FRAME: the C unpickler reads it at once, so it must be there
                if int.from_bytes(data[at : at + 8], "little") > end - at - 8:
                    raise ArtefactError(f"is cut: the pickle ends early, after {end:,} bytes")
                at += 8
            elif code == 0x80:
                if data[at] > pickle.HIGHEST_PROTOCOL:
                    raise ArtefactError(f"is a pickle of protocol {data[at]}, which is not known here")
                at += 1
            elif code == 0x2E:
                self._top()
                return count
            elif code in _LINES or code in b"gp":
                at = self._line(code, at)
            elif code == 0x30:
                stack.pop()
            elif code == 0x31:
                self._pop_to_mark()
            elif code == 0x32:
                stack.append(self._top())
            else:
                at = self._object(code, at)
            if len(stack) > limits.nodes:
                raise ArtefactError(f"holds more than {limits.nodes:,} items")

    def _object(self, code: int, at: int) -> int:
        """Opcodes that make or call something; refused unless the caller said that classes are allowed."""
        if code in b"PQ" and self.persistent:
            if code == 0x51:
                self.stack.pop()
            self.stack.append(_SCALAR)
            return at if code == 0x51 else self.data.index(b"\n", at) + 1
        if code not in _WORDS or not self.classes:
            word = _WORDS.get(code) or _NEVER.get(code) or ("PERSID" if code in b"PQ" else f"0x{code:02x}")
            known = code in _WORDS or code in _NEVER or code in b"PQ"
            what = "wants to build or call an object" if known else "is damaged: no such opcode"
            raise ArtefactError(f"{what} ({word} at byte {self.at:,}); nothing was run")
        stack = self.stack
        if code == 0x63:  # GLOBAL
            at = self.data.index(b"\n", self.data.index(b"\n", at) + 1) + 1
            stack.append(_SCALAR)
        elif code == 0x62:  # BUILD: state goes into the object below
            state = stack.pop()
            if isinstance(stack[-1], list):
                self._grow(stack[-1], (state,))
        else:  # STACK_GLOBAL, REDUCE, NEWOBJ take two; NEWOBJ_EX three
            size = 3 if code == 0x92 else 2
            items = stack[-size:]
            del stack[-size:]
            self._new(items)
        return at

    def _line(self, code: int, at: int) -> int:
        stop = self.data.index(b"\n", at)
        if code in b"gp":
            index = int(self.data[at:stop][:20])
            if code == 0x67:
                self.stack.append(self.memo[self._known(index)])
            else:
                self.memo[self._index(index)] = self._top()
        else:
            if code in _INTEGERS and stop - at > 21:
                raise ArtefactError(f"has a number of {stop - at:,} digits at byte {self.at:,}; that is no dump's")
            self.stack.append(_SCALAR)
        return stop + 1

    def _top(self) -> Any:
        if self.stack[-1] is _MARK:
            raise ValueError
        return self.stack[-1]

    def _known(self, index: int) -> int:
        if index not in self.memo:
            raise ArtefactError(f"is damaged: item {index:,} is used at byte {self.at:,} before it is there")
        return index

    def _index(self, index: int) -> int:
        if not 0 <= index <= len(self.data):
            raise ArtefactError(f"numbers an item {index:,} at byte {self.at:,}; that is no dump's")
        return index

    def _pop_to_mark(self) -> list[Any]:
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def _new(self, items: list[Any]) -> None:
        node = [1, 1]
        self._grow(node, items)
        self.stack.append(node)

    def _grow(self, node: Any, items: tuple[Any, ...] | list[Any]) -> None:
        depth, nodes = node
        for item in items:
            if item is _SCALAR:
                nodes += 1
                continue
            if item[0] >= depth:
                depth = item[0] + 1
            nodes += item[1]
        if depth > self.limits.depth:
            raise ArtefactError(f"is nested more than {self.limits.depth} deep at byte {self.at:,}")
        if nodes > self.limits.nodes:
            raise ArtefactError(f"expands to more than {self.limits.nodes:,} items at byte {self.at:,}")
        node[0], node[1] = depth, nodes

    def _keys(self, items: tuple[Any, ...] | list[Any]) -> None:
        for item in items:
            if item is not _SCALAR and item[1] > self.limits.key_nodes:
                raise ArtefactError(f"has a dictionary key of {item[1]:,} parts at byte {self.at:,}")
