"""What a torch.save archive's data.pkl says, without torch and without running anything.

Tensors come out as `TensorRef` (which storage, where in it, shape, strides), storages as `StorageRef`, dtypes as
`DtypeRef`. Any other class or function named in the pickle becomes an inert stand-in that remembers its name: a
trainer's arguments hold enums and config classes of its own, and refusing them would leave the tensors beside them
unread. What can only be there to do harm (`os.system`, `builtins.eval`, ...) is refused by name, and the whole pickle
with it.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from diag.artefacts import restricted_pickle
from diag.checkpoints.dtypes import DTYPES, STORAGES
from diag.errors import ArtefactError

#: Modules that no checkpoint needs and that run programs, reach the system or build code.
DANGEROUS_MODULES = frozenset({
    "os", "posix", "nt", "subprocess", "sys", "importlib", "runpy", "pty", "socket", "shutil", "ctypes",
    "_ctypes", "commands", "webbrowser", "code", "codeop", "types", "marshal", "pickle", "_pickle", "dill",
    "cloudpickle", "asyncio", "multiprocessing", "threading", "_thread", "signal", "tempfile", "platform",
    "pdb", "bdb", "timeit", "cProfile", "profile", "trace", "pip", "urllib", "http", "requests", "ftplib",
    "smtplib", "imp", "pkgutil", "zipimport", "operator", "_operator", "inspect", "gc", "idlelib", "lib2to3",
    "ensurepip", "venv", "distutils", "setuptools", "numpy.f2py", "numpy.distutils", "torch.hub",
    "torch.utils.cpp_extension", "torch.utils._config_module", "torch._inductor", "torch._dynamo", "torch.jit",
})
#: The only names of builtins that plain data needs.
SAFE_BUILTINS = frozenset({"set", "frozenset", "complex", "bytearray", "slice", "range", "list", "dict", "tuple", "int",
                           "float", "str", "bool", "bytes", "object"})
#: data.pkl of a rank is kilobytes; one with a loader's state may be megabytes. Beyond this it is read by nobody here.
LIMITS = restricted_pickle.Limits(bytes=256 << 20, depth=64, nodes=1 << 25)


@dataclass(slots=True, eq=False)
class StorageRef:
    """A storage: member `data/<key>` of the archive."""

    key: str
    dtype: str
    elements: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor in a storage; `offset` and `strides` in elements. `parameter`: it was an nn.Parameter."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class DtypeRef:
    """torch.<name>."""

    name: str


class Opaque:
    """Stands in for an instance of a class that is not known here; does nothing, keeps what it is given."""

    global_name = ""

    def __new__(cls, *args: Any, **_: Any) -> Opaque:
        made = object.__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str) and not k.startswith("__")})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[key if isinstance(key, (str, int)) else repr(key)] = value

    def append(self, value: Any) -> None:
        self.__dict__.setdefault("values", []).append(value)

    def extend(self, values: Any) -> None:
        self.__dict__.setdefault("values", []).extend(values)

    def __repr__(self) -> str:
        return f"<{self.global_name}>"


class Inert(dict[tuple[str, str], Any]):
    """An allow-list that knows torch's own names and answers every other one with an `Opaque` class of that name.

    `seen` collects the names that were answered so. Raises `ArtefactError` for the dangerous ones.
    """

    def __init__(self, known: dict[tuple[str, str], Any]) -> None:
        super().__init__(known)
        self.seen: set[str] = set()

    def __missing__(self, key: tuple[str, str]) -> Any:
        module, name = key
        refuse_dangerous(module, name)
        self.seen.add(f"{module}.{name}")
        made = type(name.rpartition(".")[2] or "unnamed", (Opaque,), {"global_name": f"{module}.{name}"})
        self[key] = made
        return made


def refuse_dangerous(module: str, name: str) -> None:
    """Raises `ArtefactError` when (module, name) can only be there to do harm."""
    parts = module.split(".")
    listed = any(".".join(parts[:n]) in DANGEROUS_MODULES for n in range(1, len(parts) + 1))
    builtin = module in ("builtins", "__builtin__") and name not in SAFE_BUILTINS
    if listed or builtin or name.rpartition(".")[2] in ("__import__", "eval", "exec", "system", "popen", "getattr"):
        raise ArtefactError(f"is a hostile pickle: it asks for {module}.{name}, which runs or reaches other code; "
                            "nothing was run")


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    dtype = rest[2].name if len(rest) > 2 and isinstance(rest[2], DtypeRef) else getattr(storage, "dtype", "")
    whole = all(isinstance(n, int) and 0 <= n < 1 << 63 for n in (offset, *size, *stride))
    if not isinstance(storage, StorageRef) or not whole or len(size) != len(stride):
        raise ArtefactError("describes a tensor whose parts make no sense")
    return TensorRef(storage, offset, tuple(size), tuple(stride), dtype)


def _parameter(data: Any, *_: Any) -> Any:
    if isinstance(data, TensorRef):
        data.parameter = True
    return data


def _from_type(_: Any, __: Any, args: Any, ___: Any = None) -> Any:
    """torch._tensor._rebuild_from_type_v2(function, type, arguments, state): the tensor is all that matters."""
    arguments = tuple(args)
    return _rebuild(*arguments) if arguments and isinstance(arguments[0], StorageRef) else Opaque(*arguments)


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _quiet(*args: Any, **_: Any) -> Opaque:
    return Opaque(*args)


def _encode(text: Any, _: Any = "latin1") -> bytes:
    """_codecs.encode, which pickles of protocol 2 use for bytes."""
    return text.encode("latin1") if isinstance(text, str) else b""


class Namespace(argparse.Namespace):
    """argparse.Namespace that takes a state and no code."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def known_globals() -> dict[tuple[str, str], Any]:
    """(module, name) -> harmless stand-in, for everything that torch, numpy and the standard library put there."""
    table: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor"): _rebuild, ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _from_type, ("torch._tensor", "_rebuild_from_type"): _from_type,
        ("torch", "Size"): _size, ("torch", "device"): _quiet, ("torch.serialization", "_get_layout"): _quiet,
        ("torch", "Tensor"): Opaque, ("torch.nn.parameter", "Parameter"): Opaque,
        ("collections", "OrderedDict"): OrderedDict, ("collections", "defaultdict"): defaultdict,
        ("argparse", "Namespace"): Namespace, ("_codecs", "encode"): _encode,
        ("pathlib", "PosixPath"): PurePosixPath, ("pathlib", "PurePosixPath"): PurePosixPath,
        ("pathlib", "WindowsPath"): PureWindowsPath, ("pathlib._local", "PosixPath"): PurePosixPath,
        ("builtins", "set"): set, ("__builtin__", "set"): set, ("builtins", "frozenset"): frozenset,
        ("builtins", "dict"): dict, ("builtins", "list"): list, ("builtins", "int"): int, ("builtins", "float"): float,
        ("builtins", "complex"): complex, ("builtins", "slice"): slice,
    }
    table |= {("torch", name): DtypeRef(name) for name in DTYPES}
    table |= {("torch", name): DtypeRef(dtype) for name, dtype in STORAGES.items()}
    table[("torch.storage", "UntypedStorage")] = DtypeRef("uint8")
    return table


def persistent(pid: Any) -> StorageRef:
    """A persistent id of torch: ("storage", class, key, device, elements). Raises `ArtefactError` for any other."""
    plausible = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], DtypeRef)
    if not plausible or not isinstance(pid[2], str) or not isinstance(pid[4], int):
        raise ArtefactError("refers to a storage in a way that torch never writes")
    return StorageRef(pid[2], pid[1].name, pid[4])


def load(data: bytes) -> tuple[Any, set[str]]:
    """The object of a data.pkl, and the names of the classes that stand-ins were given for. Raises `ArtefactError`."""
    allow = Inert(known_globals())
    # Safe on a stranger's file: it resolves nothing but plain types and the inert stand-ins of `allow`, within limits.
    return restricted_pickle.load(data, allow=allow, persistent=persistent, limits=LIMITS), allow.seen
