"""From a source path and a wish to a finished checkpoint: read, map names, plan, write, prove, report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from diag.checkpoints import open_checkpoint, verify
from diag.checkpoints.canonical import Checkpoint, Problem
from diag.checkpoints.convert import engine, mapping, targets
from diag.checkpoints.convert.contents import NOT_WEIGHTS, Contents, Entry, load
from diag.checkpoints.convert.engine import Limits, Progress, Result
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.plan import Plan
from diag.checkpoints.convert.source import spare
from diag.checkpoints.convert.targets import TARGETS, Options
from diag.checkpoints.formats import READERS
from diag.checkpoints.verify.outcome import perform
from diag.errors import ArtefactError, UsageError

#: target format -> families that its readers expect; the source's own names otherwise.
_DEFAULT_NAMES = {"megatron": ("megatron", "megatron-layers"), "megatron-legacy": ("megatron-legacy",)}
_HUGGING_FACE = ("mixtral", "qwen-moe", "deepseek")
_READER = {"dcp": "dcp", "hf": "safetensors", "zero1": "deepspeed", "zero2": "deepspeed", "megatron": "megatron_dist",
           "megatron-legacy": "megatron_legacy", "universal": "universal"}

#: Checks of `ckpt verify` that a conversion must pass, and those whose failure it inherits.
_STRUCTURE = ("metadata", "nothing to execute", "paths stay inside", "files complete", "no stale shards", "index",
              "headers", "names are unique", "element types", "every chunk has bytes", "byte ranges", "archives",
              "sizes", "chunks tile", "digests")
#: What a source must pass, every byte read: its damage would get fresh checksums in the copy, and look sound there.
_SOUND = ("index", "headers", "every chunk has bytes", "byte ranges", "archives", "sizes", "chunks tile", "ranks agree",
          "digests", "CRC32")
_CONTENT = ("experts complete", "optimizer complete", "steps equal")


@dataclass(slots=True, kw_only=True)
class Wish:
    """What the user asked for."""

    source: Path
    destination: Path
    options: Options
    names: str | None = None
    from_names: str | None = None
    from_format: str | None = None
    mappings: tuple[Path, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)
    weights_only: bool = False
    skip_unmapped: bool = False
    dry_run: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Done:
    """What was (or, in a dry run, would be) done."""

    plan: Plan
    contents: Contents
    names: str
    result: Result | None
    seconds: float
    tensors: int
    parameters: int


def reshard(wish: Wish, progress: Progress | None = None) -> Done:
    """Convert. Raises `UsageError` and `ArtefactError` before anything is committed."""
    import time

    start = time.monotonic()
    engine.refuse_existing(wish.destination)
    _refuse_inside(wish)
    if wish.from_format is not None and wish.from_format not in READERS:
        raise UsageError(f"--from {wish.from_format!r}: choose one of {', '.join(READERS)}")
    known = mapping.families(wish.mappings)
    for name in (wish.names, wish.from_names):
        if name is not None and name not in known:
            raise UsageError(f"the family {name!r} is not known; known are {', '.join(sorted(known))}")
    contents = load(wish.source, format=wish.from_format, weights_only=wish.weights_only)
    contents.facts |= wish.facts
    entries, family = _rename(contents, wish, known)
    wish.options.destination_name = wish.destination.name
    plan = targets.writer(wish.options.to).plan(contents, entries, family, wish.options)
    names = family.name if family else "the source's own"
    targets.record(plan, contents, wish.options, names)
    result = None
    if not wish.dry_run:
        for checkpoint in contents.source.checkpoints:
            _refuse_unsound(checkpoint, wish, progress)
            if (unequal := contents.source.unequal_copy(checkpoint)) is not None:
                raise ArtefactError(f"{wish.source}: is damaged: {unequal}")
        identity = [_identity(c.folder.root, sorted(c.files | c.expected)) for c in contents.source.checkpoints]
        result = engine.execute(plan, contents.source, wish.destination, identity, wish.limits, progress,
                                check=lambda folder, result: _prove(folder, plan, wish, result))
    recipes = [r for e in entries.values() for r in e.states.values()]
    return Done(plan, contents, names, result, time.monotonic() - start, len(recipes),
                sum(e.weight.elements for e in entries.values() if not e.buffer))


def _refuse_inside(wish: Wish) -> None:
    source, destination = wish.source.resolve(), wish.destination.resolve()
    if destination == source or source in destination.parents:
        raise UsageError(f"{wish.destination}: lies inside the source; choose another destination")
    if not destination.parent.is_dir():
        raise UsageError(f"{wish.destination}: there is no directory {destination.parent}")
    if not os.access(destination.parent, os.W_OK):
        raise UsageError(f"{destination.parent}: is not writable")


def _refuse_unsound(checkpoint: Checkpoint, wish: Wish, progress: Progress | None) -> None:
    """Raises `ArtefactError` unless the structure of the source is whole and every checksum in it is met."""
    from diag.checkpoints.verify import archives

    def crc(checkpoint: Checkpoint, options: verify.Options, problems: list[Problem]) -> str:
        return archives.crc(checkpoint, options, problems, progress and (lambda a, b: progress(a, b, "checking")))

    verify.collect(checkpoint)
    options = verify.Options(deep=True, threads=wish.limits.threads, finite=False)
    for check in verify.CHECKS:
        if check.name in _SOUND:
            outcome = perform(verify.Check(check.name, crc) if check.name == "CRC32" else check, checkpoint, options)
            errors = [p for p in outcome.problems if p.severity == "error"]
            if errors:
                more = f", and {len(errors) - 1:,} more" if len(errors) > 1 else ""
                raise ArtefactError(f"{wish.source}: is damaged ({check.name}): {errors[0].text}{more}; `pdtrain diag "
                                    f"ckpt verify --deep {wish.source}` says all")


def _identity(folder: Path, files: list[str]) -> list[object]:
    found: list[object] = [str(folder.resolve())]
    for name in files:
        try:
            state = (folder / name).stat()
        except OSError:
            continue
        found.append([name, state.st_size, state.st_mtime_ns])
    return found


def _rename(contents: Contents, wish: Wish, known: dict[str, Family]) -> tuple[dict[str, Entry], Family | None]:
    """The entries under the names of the target, and that family; None when the names stay as they are."""
    source = _source_family(contents, wish, known)
    contents.family = source.name if source else ""
    wanted = [wish.names] if wish.names else _wanted(contents, wish.options.to, source)
    if not wanted:
        return contents.entries, source
    if source is None:
        if wish.names is None:
            contents.notes.append("no family knows the source's names; they stay as they are")
            return contents.entries, None
        raise UsageError(f"{wish.source}: no family knows all of its names, such as {_stranger(contents, known)}; say "
                         "which with --from-names, or extend one with --mapping FILE")
    if source.name in wanted:
        return contents.entries, source
    recorded = contents.source.checkpoints[0].meta.args
    if source.name.startswith("megatron") and recorded.get("swiglu") is False and not recorded.get("gated_linear_unit"):
        raise UsageError(f"{wish.source}: its arguments say that linear_fc1 is not gated (swiglu is off), and the "
                         f"family {source.name} takes it for gate and up; describe it with --mapping FILE")
    problem: Exception | None = None
    for name in wanted:
        dropped = list(contents.dropped)
        try:
            return mapping.convert(contents, source, known[name], skip=wish.skip_unmapped), known[name]
        except (ArtefactError, UsageError) as error:
            problem = problem or error
            contents.dropped = dropped
    assert problem is not None
    raise problem


def _source_family(contents: Contents, wish: Wish, known: dict[str, Family]) -> Family | None:
    if wish.from_names:
        return known[wish.from_names]
    fits = mapping.detect(contents, known)
    if contents.family in fits:
        return known[contents.family]
    if len(fits) > 1:
        if wish.names or wish.options.to in _DEFAULT_NAMES:
            raise UsageError(f"{wish.source}: its names are those of {' and of '.join(fits)}, which do not mean the "
                             "same by them; say which it is with --from-names")
        return None
    return known[fits[0]] if fits else None


def _stranger(contents: Contents, known: dict[str, Family]) -> str:
    best = max(known.values(), key=lambda f: sum(f.find(n, contents.facts) is not None for n in contents.entries))
    return next((n for n in contents.entries if best.find(n, contents.facts) is None), "?")


def _wanted(contents: Contents, to: str, source: Family | None) -> list[str]:
    if to in _DEFAULT_NAMES:
        return list(_DEFAULT_NAMES[to])
    if to == "hf" and source is not None and source.name not in _HUGGING_FACE:
        return ["mixtral", "deepseek", "qwen-moe"]
    return []


def _prove(folder: Path, plan: Plan, wish: Wish, result: Result) -> None:
    """Read what was written with the reader of its format: the same names, shapes, types and places as planned.

    The bytes at those places have been compared before. Raises `ArtefactError`.
    """
    # the marks are not there yet: a reader needs them, so they are written under the temporary name first
    engine.write_marks(plan, folder)
    home = folder / plan.home if plan.home else folder
    places: dict[tuple[str, int], str] = {}
    for file in plan.files:
        name = file.name.removeprefix(f"{plan.home}/") if plan.home else file.name
        for payload in file.payloads:
            places[name, payload.at] = payload.label
    seen = set()
    parts = [(home, "")]
    if wish.options.to == "hf" and (home / "optimizer").is_dir():
        parts.append((home / "optimizer", "optimizer/"))
    for path, prefix in parts:
        checkpoint = spare(open_checkpoint(path, format=_READER.get(wish.options.to)))
        errors = [p for p in checkpoint.problems if p.severity == "error" and p.check not in NOT_WEIGHTS]
        if errors:
            raise ArtefactError(f"{folder}: what was written is not sound: {errors[0].text}; nothing was committed")
        _second_opinion(checkpoint, plan, folder)
        for tensor in checkpoint.tensors.values():
            for chunk in (*tensor.chunks, *tensor.copies):
                checkpoint.locate(tensor, chunk)
                seen.add((prefix + chunk.file, chunk.begin))
    lost = [label for key, label in places.items() if key not in seen and not _flat(label)]
    if lost and wish.options.to in ("dcp", "hf", "universal"):
        raise ArtefactError(f"{folder}: {lost[0]} was written and is not found again; nothing was committed")


def _second_opinion(checkpoint: Checkpoint, plan: Plan, folder: Path) -> None:
    """What `ckpt verify` says: a fault of the structure is ours and refused, one of the content came with the source.

    Its checks that read tensors are left out: the bytes have been compared, and its maps would count as our memory.
    Raises `ArtefactError`.
    """
    chosen = [check for check in verify.CHECKS if check.name in _STRUCTURE or check.name in _CONTENT]
    for outcome in (perform(check, checkpoint, verify.Options(finite=False)) for check in chosen):
        errors = [p for p in outcome.problems if p.severity == "error"]
        if errors and outcome.check in _STRUCTURE:
            raise ArtefactError(f"{folder}: what was written is not sound ({outcome.check}): {errors[0].text}; nothing "
                                "was committed")
        if errors and outcome.check in _CONTENT:
            plan.objections.append(errors[0])


def _flat(label: str) -> bool:
    """Objects, and what several tensors share, have no place of their own."""
    return label.startswith("archive/") or label == ""


def family_list(known: dict[str, Family]) -> str:
    """The families, one a line."""
    return "\n".join(f"  {f.name:<18} {f.title}" for f in known.values())


def parse_bytes(text: str) -> int:
    """512MB, 2GB, 1.5GiB, 1000000 -> bytes. Raises `UsageError`."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
             "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
    digits = text.strip().rstrip("abceghiklmnoprstuvwxyzABCEGHIKLMNOPRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().upper()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise UsageError(f"{text!r} is no size; give for example 512MB or 2GB") from None
    if not 0 < value < 1 << 60:
        raise UsageError(f"{text!r} is no size; give for example 512MB or 2GB")
    return int(value)


__all__ = ["TARGETS", "Done", "Wish", "family_list", "parse_bytes", "reshard"]
