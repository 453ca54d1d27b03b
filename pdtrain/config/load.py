"""From a TOML file or a preset, and `--set` overrides, to a validated `Run`. All mistakes are shown at once."""

from __future__ import annotations

import importlib.resources
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from diag.errors import UsageError
from pdtrain.config import keys
from pdtrain.config.mistakes import NOTHING, UNKNOWN, Mistake, UnknownValue, show, shown_path
from pdtrain.config.resolved import data_degree, fill
from pdtrain.config.rules import check, refusals
from pdtrain.config.schema import Run

#: A value that means "absent" for an optional key, because TOML has no null: `--set optimizer.clip=none`.
ABSENT = "none"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated run, where it came from, and what deserves a warning (one line each)."""

    run: Run
    name: str  #: preset name or file stem: names the default run directory
    warnings: tuple[str, ...]


def presets() -> dict[str, str]:
    """Name -> what it is for (the first comment line), of every preset shipped with the package."""
    found = {}
    for entry in importlib.resources.files("pdtrain.config.presets").iterdir():
        if entry.name.endswith(".toml"):
            first = entry.read_text(encoding="utf-8").splitlines()[0]
            found[entry.name.removesuffix(".toml")] = first.removeprefix("#").strip()
    return dict(sorted(found.items()))


def load_run(
    source: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    world: int | None = None,
) -> Run:
    """The validated run; see `read_run`, which also returns the warnings."""
    return read_run(source, preset=preset, overrides=overrides, world=world).run


def read_run(
    source: str | Path | None = None,
    *,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    world: int | None = None,
    train: bool = False,
) -> Loaded:
    """Read, override, fill and check a configuration.

    Args:
        source: a TOML file; without it and without `preset`, the schema's defaults.
        preset: name of a shipped preset, instead of `source`.
        overrides: `section.key=value` texts, later ones win.
        world: ranks of the job that will run it; `parallel.ranks` becomes `world - pools.update_ranks`. Without
            `train`, a `train_batch` that does not fit that world is raised to one that does, with a warning.
        train: also refuse what can be planned but not trained today.

    Raises:
        UsageError: every mistake, one per line.
    """
    if source is not None and preset is not None:
        raise UsageError("give a configuration file or --preset, not both")
    label, name, text = _read(source, preset)
    return parse_run(text, label, name, overrides=overrides, world=world, train=train)


def parse_run(
    text: str,
    label: str,
    name: str = "run",
    *,
    overrides: Sequence[str] = (),
    world: int | None = None,
    train: bool = False,
) -> Loaded:
    """`read_run` for TOML text that `label` stands for in messages."""
    reader = _Reader(label)
    run = reader.build(_parse(text, label), overrides)
    found: list[Mistake] = []
    with suppress(UnknownValue):
        run = fill(run if world is None else _fit_world(run, world))
    if world is not None:
        reader.sources["parallel.ranks"] = f"a job of {world} rank{'' if world == 1 else 's'}"
        if not train:
            with suppress(UnknownValue):
                run, found = _fit_batch(run)
    found += [*check(run), *(refusals(run) if train else ())]
    mistakes = reader.mistakes + [mistake for mistake in found if not mistake.warning]
    warnings = tuple(mistake.line(reader.sources, label) for mistake in found if mistake.warning)
    if mistakes:
        raise UsageError(together([mistake.line(reader.sources, label) for mistake in mistakes], warnings))
    return Loaded(run, name, warnings)


def together(mistakes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """One mistake is one line; several are counted, then listed, the warnings after them."""
    if len(mistakes) == 1 and not warnings:
        return mistakes[0]
    count = f"{len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}"
    lines = [*mistakes, *(f"warning: {warning}" for warning in warnings)]
    return f"{count} in the configuration:\n" + "\n".join(f"  {line}" for line in lines)


def _read(source: str | Path | None, preset: str | None) -> tuple[str, str, str]:
    """Label for messages, name of the run, TOML text."""
    if preset is not None:
        known = presets()
        if preset not in known:
            raise UsageError(f"no preset {show(preset)}; {_offer(preset, known)}")
        folder = importlib.resources.files("pdtrain.config.presets")
        return f"preset {preset}", preset, (folder / f"{preset}.toml").read_text(encoding="utf-8")
    if source is None:
        return "", "run", ""
    path = Path(source)
    try:
        return str(path), path.stem, path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        hint = f"; for the preset of that name: --preset {path}" if str(path) in presets() else ""
        raise UsageError(f"no such configuration file: {shown_path(path)}{hint}") from None
    except IsADirectoryError:
        raise UsageError(f"{shown_path(path)} is a directory, not a TOML file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; a configuration is TOML text") from None
    except OSError as error:
        raise UsageError(f"cannot read {shown_path(path)}: {error.strerror or error}") from None


def _offer(name: str, legal: Mapping[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(name, legal, n=1)
    return f"did you mean {near[0]}?" if near else f"presets are {', '.join(legal)}"


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{label}: not valid TOML: {show(str(error))[1:-1]}") from None
    except RecursionError:
        raise UsageError(f"{label}: not valid TOML: nested too deeply") from None


def _fit_world(run: Run, world: int) -> Run:
    """`run` on a job of `world` ranks: the update pool keeps its size, the rest computes. May leave no rank at all."""
    try:
        ranks = world - run.pools.update_ranks
    except UnknownValue:
        ranks = UNKNOWN
    return replace(run, parallel=replace(run.parallel, ranks=ranks))


def _fit_batch(run: Run) -> tuple[Run, list[Mistake]]:
    """For a plan on another world only: a batch that does not fit it is replaced by the next one that does.

    In training the batch decides the curve, so there the identity must hold as written.
    """
    train = run.train
    per_pass = train.micro_batch * data_degree(run)
    accumulation = train.accumulation or -(-(train.train_batch or 1) // per_pass)
    if train.train_batch == per_pass * accumulation:
        return run, []
    fitting = replace(train, accumulation=accumulation, train_batch=per_pass * accumulation)
    what = f"does not fit DP {data_degree(run)}: shown with {fitting.train_batch}"
    return replace(run, train=fitting), [Mistake("train.train_batch", train.train_batch, what, warning=True)]


class _Reader:
    """Turns raw tables into structs: checks each value, remembers who set each key, and collects what is wrong."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.sources: dict[str, str] = {}
        self.mistakes: list[Mistake] = []

    def build(self, raw: dict[str, Any], overrides: Sequence[str]) -> Run:
        self.values: dict[str, Any] = {}
        self._take(raw, keys.tree(), self.label)
        for override in overrides:
            self._override(override)
        run = self._struct(keys.tree())
        assert isinstance(run, Run)
        return run

    def _take(self, raw: dict[str, Any], table: keys.Table, where: str, override: tuple[str, str] = ("", "")) -> None:
        """Check every value of `raw` against `table`. `override` is the dotted key and the text of a `--set`."""
        for name, value in raw.items():
            dotted = f"{table.name}.{name}" if table.name else name
            if name in table.tables and isinstance(value, dict):
                self._take(value, table.tables[name], where, override)
            elif name in table.tables:
                self._wrong(dotted, value, "is a section", where, f"its keys are {_names(table.tables[name])}")
            elif name in table.keys:
                literal = override[1] if override[0] == dotted else None
                self._value(table.keys[name], value, where, literal)
            else:
                dotted = override[0] if override[0].startswith(f"{dotted}.") else dotted
                near = keys.nearest(dotted)
                has = f"[{table.name}] has" if table.name else "the sections are"
                advice = f"did you mean {near}?" if near else f"{has} {_names(table)}"
                self._wrong(dotted, NOTHING, "is not a known key", where, advice)
                if near in keys.all_keys() and near not in self.values:
                    self.values[near] = UNKNOWN  # most likely meant: its default says nothing

    def _value(self, key: keys.Key, value: Any, where: str, literal: str | None) -> None:
        if literal is not None and key.text and not isinstance(value, str):
            value = literal  # `--set data.path=2024`: a key that takes text takes the words as they are
        if key.optional and value == ABSENT:
            value = None
        try:
            converted = msgspec.convert(value, key.type)
            if isinstance(converted, float) and math.isinf(converted):
                raise msgspec.ValidationError("infinite")
        except msgspec.ValidationError:
            self._wrong(key.name, value, f"is {_fault(value, key)}", where, f"expected {key.expected}")
            self.values[key.name] = UNKNOWN
            return
        self.values[key.name] = converted
        self.sources[key.name] = where

    def _override(self, text: str) -> None:
        dotted, equals, literal = text.partition("=")
        dotted, literal = dotted.strip(), literal.strip()
        if not equals or not re.fullmatch(r"[^.\s]+(\.[^.\s]+)*", dotted):
            self._wrong("", NOTHING, f"takes section.key=value, got {show(text)}", "--set")
            return
        raw: Any = _toml_value(literal)
        for part in reversed(dotted.split(".")):
            raw = {part: raw}
        self._take(raw, keys.tree(), "--set", (dotted, literal))

    def _wrong(self, key: str, value: Any, what: str, where: str, legal: str = "") -> None:
        self.mistakes.append(Mistake(key, value, what, legal, where))

    def _struct(self, table: keys.Table) -> msgspec.Struct:
        changed = {name: self.values[key.name] for name, key in table.keys.items() if key.name in self.values}
        inner = {name: self._struct(sub) for name, sub in table.tables.items()}
        return replace(table.defaults, **changed, **inner)


def _toml_value(literal: str) -> Any:
    """`literal` as a TOML value; a bare word or anything else that TOML does not know is text."""
    try:
        parsed = tomllib.loads(f"value = {literal}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return literal
    return parsed["value"] if set(parsed) == {"value"} else literal


def _names(table: keys.Table) -> str:
    return ", ".join([*table.keys, *table.tables])


def _fault(value: Any, key: keys.Key) -> str:
    """What is wrong with `value`, as the end of a sentence."""
    match value:
        case bool():
            return "a truth value"
        case int():
            return "out of range" if "number" in key.expected else "a number"
        case float():
            if "number" not in key.expected:
                return "a number"
            return "not a whole number" if "whole" in key.expected and not math.isnan(value) else "out of range"
        case str():
            return "none of the choices" if key.expected.startswith('"') else "text"
        case list():
            return "a list"
        case dict():
            return "a table"
    return "a date or time"
