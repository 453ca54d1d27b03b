"""The log-line knowledge, as data: signature files, their strict loader, and the compiled catalogue.

    catalogue = load_catalogue()                 # built-in signatures
    catalogue = load_catalogue(Path("mine"))     # and the user's own (--signatures DIR)

The catalogue of a given set of files is compiled once and kept in the user's cache folder, keyed by the content of the
files, the version of the compiler and the platform.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from diag.signatures.loader import BUILT_IN, files, format_says, load, to_rule, verify
from diag.signatures.matcher import HyperscanMatcher, Matcher, ReMatcher
from diag.signatures.schema import Rule, Signature

__all__ = ["Catalogue", "Rule", "Signature", "all_signatures", "format_says", "load_catalogue", "verify"]

#: Raise when `Rule` or the compile flags change, so that older caches are not used.
FORMAT = 4


class _Cached(msgspec.Struct):
    """The content of a cache file."""

    rules: list[Rule]
    database: bytes


@dataclass
class Catalogue:
    """All rules, and the engine that proposes where they match."""

    rules: list[Rule]
    database: bytes | None = None
    engine: str = "hyperscan"
    by_id: dict[str, Rule] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.by_id = {rule.id: rule for rule in self.rules}

    @cached_property
    def matcher(self) -> Matcher:
        """One per process: hyperscan's scratch space must not be shared, so forked workers make their own."""
        if self.engine == "hyperscan":
            return HyperscanMatcher(self.rules, self.database)
        return ReMatcher(self.rules)

    def __getstate__(self) -> dict[str, object]:
        return {"rules": self.rules, "database": self.database, "engine": self.engine, "by_id": self.by_id}


def all_signatures(directory: Path | None = None) -> list[Signature]:
    """The built-in signatures and those of `directory`, with their examples. Raises `UsageError` for a mistake."""
    return load(_paths(directory))


def load_catalogue(directory: Path | None = None, *, engine: str | None = None, cache: bool = True) -> Catalogue:
    """The compiled catalogue. `engine` forces "hyperscan" or "re". Raises `UsageError` for a bad signature file."""
    engine = engine or os.environ.get("PDTRAIN_SIGNATURE_ENGINE") or ("hyperscan" if _have_hyperscan() else "re")
    paths = _paths(directory)
    store = _store(paths, engine) if cache else None
    if store is not None:
        cached = _read(store)
        if cached is not None:
            return Catalogue(cached.rules, cached.database or None, engine)
    rules = [to_rule(signature) for signature in load(paths)]
    catalogue = Catalogue(rules, None, engine)
    if engine == "hyperscan":
        matcher = catalogue.matcher
        assert isinstance(matcher, HyperscanMatcher)
        catalogue.database = matcher.serialise()
    if store is not None:
        _write(store, _Cached(rules, catalogue.database or b""))
    return catalogue


def _paths(directory: Path | None) -> list[Path]:
    return files(BUILT_IN) + (files(directory) if directory is not None else [])


def _have_hyperscan() -> bool:
    try:
        import hyperscan  # noqa: F401
    except ImportError:
        return False
    return True


def _machine() -> str:
    """Processor and host: a database fits the processor that it was compiled on."""
    if hasattr(os, "uname"):
        return f"{os.uname().machine}|{os.uname().nodename}"
    import platform  # which costs more to import than all else here

    return f"{platform.machine()}|{platform.node()}"


def _store(paths: list[Path], engine: str) -> Path | None:
    """The cache file for exactly these signature files; None when the user has no cache folder."""
    key = hashlib.blake2b(digest_size=16)
    version = ""
    if engine == "hyperscan":
        import hyperscan

        version = str(getattr(hyperscan, "__version__", ""))
    key.update(f"{FORMAT}|{engine}|{version}|{_machine()}".encode())
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        key.update(path.name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home at all
        return None
    return root / "pdtrain" / f"signatures-{key.hexdigest()}.bin"


def _read(store: Path) -> _Cached | None:
    """The cached catalogue, or None when absent or damaged: then it is simply made again."""
    try:
        data = store.read_bytes()
    except OSError:
        return None
    digest, body = data[:16], data[16:]
    if hashlib.blake2b(body, digest_size=16).digest() != digest:
        return None
    try:
        return msgspec.msgpack.decode(body, type=_Cached)
    except msgspec.DecodeError:
        return None


def _write(store: Path, cached: _Cached) -> None:
    body = msgspec.msgpack.encode(cached)
    digest = hashlib.blake2b(body, digest_size=16).digest()
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=store.parent, prefix=".signatures-", delete=False) as scratch:
            scratch.write(digest + body)
        Path(scratch.name).replace(store)
        _forget_old(store)
    except OSError:
        return  # a read-only or full home costs time, not the diagnosis


def _forget_old(store: Path, keep: int = 4) -> None:
    others = sorted(store.parent.glob("signatures-*.bin"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[keep:]:
        path.unlink(missing_ok=True)
