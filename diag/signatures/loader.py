"""Signature files -> `Signature` -> `Rule`, strictly: a typo is an error that names the file, the entry and the key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec

from diag.errors import UsageError
from diag.signatures.literals import required_literals
from diag.signatures.schema import TRIAL_CAP, Rule, Signature

BUILT_IN = Path(__file__).parent
#: A signature file is text somebody wrote; anything larger is a mistake (or an attack by alias expansion).
MAX_BYTES = 4 << 20


def files(directory: Path) -> list[Path]:
    """The signature files of `directory`, sorted by name. Raises `UsageError` when there are none."""
    found = sorted(path for path in directory.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
    if not found:
        raise UsageError(f"{directory}: holds no signature files (*.yaml)")
    return found


def load(paths: Iterable[Path]) -> list[Signature]:
    """All signatures of `paths`, checked. Raises `UsageError` for the first mistake."""
    signatures: list[Signature] = []
    where: dict[str, Path] = {}
    for path in paths:
        for signature in _read(path):
            if signature.id in where:
                raise UsageError(f"{path}: signature '{signature.id}' exists already, in {where[signature.id]}")
            where[signature.id] = path
            signatures.append(signature)
    return signatures


def _read(path: Path) -> Iterator[Signature]:
    for place, entry in enumerate(_entries(path)):
        name = entry.get("id") if isinstance(entry, dict) else None
        label = f"{path}: signature '{name}'" if name else f"{path}: entry {place + 1}"
        try:
            signature = msgspec.convert(entry, Signature)
        except msgspec.ValidationError as error:
            raise UsageError(f"{label}: {error}") from None
        problem = check(signature)
        if problem:
            raise UsageError(f"{label}: {problem}")
        yield signature


def _entries(path: Path) -> list[object]:
    import yaml

    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; not a signature file")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        # A user's file: the safe loader, in C where it is built, makes plain data only.
        data = yaml.load(path.read_text("utf-8"), Loader=loader)  # noqa: S506 - a safe loader either way
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, list):
        raise UsageError(f"{path}: must be a list of signatures")
    return data


def check(signature: Signature) -> str | None:
    """What is wrong with `signature`, or None: expressions that do not compile, a cause that does not exist."""
    for key in ("pattern", "all", "none"):
        value = getattr(signature, key)
        for text in [value] if isinstance(value, str) else value:
            problem = _regex_problem(text)
            if problem:
                return f"{key}: {problem}"
    from diag.causes import CAUSES

    needs_cause = signature.role in ("initiating", "victim", "confirming")
    if signature.cause is None and needs_cause:
        return f"cause: is needed for role '{signature.role}'"
    if signature.cause is not None and signature.cause not in CAUSES:
        import difflib

        near = difflib.get_close_matches(signature.cause, CAUSES, n=1)
        return f"cause: '{signature.cause}' is not known" + (f"; did you mean '{near[0]}'?" if near else "")
    if needs_cause and not signature.says:
        return f"says: is needed for role '{signature.role}'"
    try:
        format_says(signature.says, {})
    except (ValueError, IndexError, KeyError) as error:
        return f"says: {error}"
    return None


def _regex_problem(text: str) -> str | None:
    try:
        compiled = re.compile(text.encode())
    except (re.error, OverflowError, RecursionError) as error:
        return f"not a regular expression: {error}"
    if compiled.match(b""):
        return "matches everything"
    return None


def format_says(says: str, groups: dict[str, str | None]) -> str:
    """`says` with its {names} filled in; a part in [[double brackets]] is left out when a name in it is missing.

    >>> format_says("port down on {device}[[, peer {peer}]]", {"device": "mlx5_1"})
    'port down on mlx5_1'
    """

    def fill(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: groups.get(m[1]) or "?", text)

    def optional(match: re.Match[str]) -> str:
        names = re.findall(r"\{(\w+)\}", match[1])
        return fill(match[1]) if all(groups.get(name) for name in names) else ""

    return fill(re.sub(r"\[\[(.*?)\]\]", optional, says))


def to_rule(signature: Signature) -> Rule:
    """The part of `signature` that scanning needs."""
    literals, caseless = required_literals(signature.pattern)
    if signature.anchors:
        literals = [text.lower() for text in signature.anchors] if caseless else signature.anchors
    sure = min(signature.sure, TRIAL_CAP) if signature.trial else signature.sure
    return Rule(id=signature.id, pattern=signature.pattern, role=signature.role, cause=signature.cause,
                severity=signature.severity, says=signature.says, all=signature.all, none=signature.none,
                blames=signature.blames, sure=sure, literals=literals, caseless=caseless, fix=signature.fix)


@cache
def expression(pattern: str) -> re.Pattern[bytes]:
    """`pattern` compiled for the bytes of one line; compiled when first needed, because most never are."""
    return re.compile(pattern.encode())


def verify(rule: Rule, line: bytes) -> re.Match[bytes] | None:
    """The match of `rule` in `line`, if it matches with all its conditions. The same for every scanner."""
    found = expression(rule.pattern).search(line)
    if found is None:
        return None
    if any(expression(text).search(line) is None for text in rule.all):
        return None
    if any(expression(text).search(line) is not None for text in rule.none):
        return None
    return found
