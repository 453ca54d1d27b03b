"""Names of one model family in terms of another's: tables in `mappings/*.toml`, and files of the user.

Every family is described in the terms of one hub, where nothing is fused: one tensor per projection and expert, rows
are outputs. Converting A to B is undoing A's fusions and doing B's, which only cuts, joins and reorders.

    [[tensor]]
    name = "decoder.layers.{l}.mlp.linear_fc1.weight"     # {l}: layer, {e}: expert
    hub = ["layer.{l}.gate", "layer.{l}.up"]              # what it is made of
    how = ["rows"]                                        # from the hub's tensors to this one, in this order
    beside = "layer.{l}.gate"                             # written only for layers that have this hub tensor
    when = "kv_lora_rank"                                 # only for models that have this fact; "!fact": that have not
    split = 0                                             # axis that tensor parallelism cuts, in the first hub tensor

`how`: "transpose" (last two axes), "rows" (several joined on axis 0), "stack" (all experts on a new axis 0),
"layers" (all layers on a new axis 0), "qkv" (q, k and v of each group of query heads together), "halves:DIM:HEADS"
(the last DIM rows of each of HEADS heads are two halves; the hub has them in pairs; both are facts or numbers),
"pairs:DIM:HEADS" (the other way round).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.recipe import Recipe, concat, every, narrow, select, split, stack, transpose
from diag.errors import ArtefactError, UsageError

_FIELD = re.compile(r"\\\{([le])\\\}")
_HOWS = ("transpose", "rows", "stack", "layers", "qkv")
_KEYS = {"name", "hub", "how", "when", "beside", "split"}
Facts = dict[str, int]
#: The numbers that `{l}` and `{e}` stand for; None where there is none.
Place = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One [[tensor]] of a table."""

    name: str
    hub: tuple[str, ...]
    how: tuple[str, ...] = ()
    when: str = ""
    beside: str = ""
    split: int | None = None
    pattern: re.Pattern[str] = field(default=re.compile(""), compare=False)

    def applies(self, facts: Facts) -> bool:
        """Whether the row is about a model with these facts."""
        if not self.when:
            return True
        fact = self.when.lstrip("!")
        return bool(facts.get(fact)) != self.when.startswith("!")


@dataclass(frozen=True, slots=True)
class Family:
    """A table. `model_key`, `state_key`: how this family's flat state dict spells a weight and an optimizer state."""

    name: str
    rows: tuple[Row, ...]
    title: str = ""
    model_key: str = "{name}"
    state_key: str = "optimizer.state.{name}.{state}"
    master: str = "master"

    def key(self, name: str, state: str) -> str:
        """The flat key of a state of the parameter `name`."""
        if state == "weight":
            return self.model_key.replace("{name}", name)
        spelt = self.master if state == "master" else state
        return self.state_key.replace("{name}", name).replace("{state}", spelt)

    def find(self, name: str, facts: Facts) -> tuple[Row, Place] | None:
        """The row that a parameter's name fits, and its layer and expert."""
        for row in self.rows:
            match = row.pattern.fullmatch(name)
            if match is not None and row.applies(facts):
                found = match.groupdict()
                return row, tuple(int(found[k]) if found.get(k) else None for k in "le")  # type: ignore[return-value]
        return None


def families(extra: tuple[Path, ...] = ()) -> dict[str, Family]:
    """Every table; the user's own extend those of the same name. Raises `UsageError` with file and row."""
    found = {}
    for entry in sorted(resources.files("diag.checkpoints.convert").joinpath("mappings").iterdir(),
                        key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            family = _parse(entry.name, entry.read_text("utf-8"))
            found[family.name] = family
    for path in extra:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--mapping {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        family = _parse(str(path), text)
        known = found.get(family.name)
        if known is not None:  # the user's rows come first; what he does not say stays
            said = {key: getattr(family, key) for key in ("title", "model_key", "state_key", "master")
                    if getattr(family, key) != Family.__dataclass_fields__[key].default}
            family = replace(known, rows=(*family.rows, *known.rows), **said)
        found[family.name] = family
    return found


def _parse(where: str, text: str) -> Family:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: is no TOML: {error}") from None
    name = table.get("family")
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}: needs family = \"name\"")
    rows = []
    for number, item in enumerate(table.get("tensor", []), 1):
        rows.append(_row(f"{where}: tensor {number}", item))
    return Family(name, tuple(rows), str(table.get("title", "")), str(table.get("model_key", "{name}")),
                  str(table.get("state_key", "optimizer.state.{name}.{state}")), str(table.get("master", "master")))


def _row(where: str, item: Any) -> Row:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise UsageError(f"{where}: needs a name")
    unknown = item.keys() - _KEYS
    if unknown:
        raise UsageError(f"{where}: unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(_KEYS))}")
    hub = item.get("hub")
    hub = (hub,) if isinstance(hub, str) else tuple(hub) if isinstance(hub, list) else ()
    how = item.get("how", [])
    how = (how,) if isinstance(how, str) else tuple(how)
    if not hub or not all(isinstance(h, str) for h in hub):
        raise UsageError(f"{where} ({item['name']}): needs hub = \"…\" or a list of them")
    for step in how:
        if step not in _HOWS and not (isinstance(step, str) and re.fullmatch(r"(?:halves|pairs):\w+:\w+", step)):
            raise UsageError(f"{where} ({item['name']}): how {step!r} is not known; known are {', '.join(_HOWS)}, "
                             "halves:DIM:HEADS, pairs:DIM:HEADS")
    if len(hub) > 1 and not set(how) & {"rows", "qkv"}:
        raise UsageError(f"{where} ({item['name']}): is made of {len(hub)} tensors; how must say \"rows\" or \"qkv\"")
    pattern = _FIELD.sub(lambda m: rf"(?P<{m[1]}>\d+)", re.escape(item["name"]))
    return Row(item["name"], hub, how, str(item.get("when", "")), str(item.get("beside", "")),
               item.get("split"), re.compile(pattern))


def detect(contents: Contents, known: dict[str, Family]) -> list[str]:
    """The families that know every parameter's name; the first stands for all when they mean the same by it.

    Several are returned when they differ: then the names alone do not tell.
    """
    names = list(contents.entries)
    meanings: dict[str, list[tuple[Row, Place]]] = {}
    for family in known.values():
        fits = [family.find(name, contents.facts) for name in names]
        if all(fits):
            meanings[family.name] = fits  # type: ignore[assignment]
    found: list[str] = []
    for name, own in meanings.items():
        if not any(all(a.hub == b.hub and a.how == b.how for (a, _), (b, _) in zip(own, meanings[other]))
                   for other in found):
            found.append(name)
    return found


def convert(contents: Contents, source: Family, target: Family, *, skip: bool = False) -> dict[str, Entry]:
    """The entries of `contents` under the names of `target`; what has no place there is an error unless `skip`.

    Raises `ArtefactError` when a tensor cannot be cut or joined without arithmetic, `UsageError` for names that a
    table does not know.
    """
    hub = _to_hub(contents, source, skip)
    out: dict[str, Entry] = {}
    facts = contents.facts
    for row in target.rows:
        if not row.applies(facts) or row.hub[0] not in hub.spots:
            continue
        groups: dict[Place, list[Place]] = {}
        for layer, expert in sorted(hub.spots[row.hub[0]], key=_order):
            if row.beside and (row.beside, layer, None) not in hub.entries:
                continue
            place = (None if "layers" in row.how else layer, None if "stack" in row.how else expert)
            groups.setdefault(place, []).append((layer, expert))
        for place, spots in groups.items():
            pieces = [[hub.entries.get((name, *spot)) for name in row.hub] for spot in spots]
            if any(entry is None for group in pieces for entry in group):
                continue
            name = _name(row.name, place)
            out[name] = _joined(contents, name, row, spots, pieces, facts)  # type: ignore[arg-type]
            hub.used.update((hub_name, *spot) for spot in spots for hub_name in row.hub)
    left = sorted((hub.origin[key] for key in hub.entries.keys() - hub.used), key=str)
    if left and not skip:
        raise UsageError(f"the family {target.name} has no name for {left[0]}"
                         f"{f' and {len(left) - 1:,} more' if len(left) > 1 else ''}; extend it with --mapping FILE, "
                         "choose another with --names, or leave them out with --skip-unmapped")
    contents.dropped += [f"{name}: the family {target.name} has no name for it" for name in sorted(set(left))]
    return out


#: A hub tensor: its pattern, layer, expert.
Key = tuple[str, int | None, int | None]


@dataclass(slots=True)
class _Hub:
    entries: dict[Key, Entry] = field(default_factory=dict)
    origin: dict[Key, str] = field(default_factory=dict)
    spots: dict[str, list[Place]] = field(default_factory=dict)
    used: set[Key] = field(default_factory=set)


def _order(place: Place) -> tuple[int, ...]:
    return tuple(-1 if n is None else n for n in place)


def _to_hub(contents: Contents, family: Family, skip: bool) -> _Hub:
    hub = _Hub()
    for entry in contents.entries.values():
        found = family.find(entry.name, contents.facts)
        if found is None:
            if skip:
                contents.dropped.append(f"{entry.name}: is no name of the family {family.name}")
                continue
            raise UsageError(f"{entry.name}: is no name of the family {family.name}; extend it with --mapping FILE, or "
                             "leave it out with --skip-unmapped")
        for key, states in _undo(*found, entry, contents.facts):
            if key in hub.entries:
                raise ArtefactError(f"{entry.name} and {hub.origin[key]} are the same tensor")
            hub.entries[key] = Entry(_name(key[0], key[1:]), states, entry.step, entry.buffer)
            hub.origin[key] = entry.name
            hub.spots.setdefault(key[0], []).append(key[1:])
    return hub


def _name(pattern: str, place: Place) -> str:
    layer, expert = place
    out = pattern.replace("{l}", str(layer)) if layer is not None else pattern
    return out.replace("{e}", str(expert)) if expert is not None else out


def _undo(row: Row, place: Place, entry: Entry, facts: Facts) -> list[tuple[Key, dict[str, Recipe]]]:
    """Hub tensors, each with its states, of one tensor of the source."""
    found: list[tuple[Key, dict[str, Recipe]]] = [((row.hub[0], *place), dict(entry.states))]
    for step in reversed(row.how):
        made: list[tuple[Key, dict[str, Recipe]]] = []
        for (pattern, layer, expert), held in found:
            if step in ("stack", "layers"):
                for index in range(next(iter(held.values())).shape[0]):
                    key = (pattern, layer, index) if step == "stack" else (pattern, index, expert)
                    made.append((key, {k: select(r, index) for k, r in held.items()}))
            elif step in ("rows", "qkv"):
                cut = {k: split(r, len(row.hub)) if step == "rows" else _split_qkv(entry.name, r, facts)
                       for k, r in held.items()}
                for n, hub_name in enumerate(row.hub):
                    made.append(((hub_name, layer, expert), {k: pieces[n] for k, pieces in cut.items()}))
            else:
                made.append(((pattern, layer, expert),
                             {k: _single(step, r, facts, back=True) for k, r in held.items()}))
        found = made
    return found


def _joined(contents: Contents, name: str, row: Row, spots: list[Place], groups: list[list[Entry]],
            facts: Facts) -> Entry:
    """The target's tensor out of hub entries, state by state."""
    entries = [entry for group in groups for entry in group]
    common = [k for k in entries[0].states if all(k in e.states for e in entries)]
    for entry in entries:
        for key in sorted(entry.states.keys() - set(common)):
            raise ArtefactError(f"{name}: {entry.name} has the state {key}, others that are joined with it have not")
    states = {key: _do(name, row, spots, [[e.states[key] for e in group] for group in groups], facts) for key in common}
    return Entry(name, states, _same_step(contents, name, [e.step for e in entries]), all(e.buffer for e in entries))


def _do(name: str, row: Row, spots: list[Place], groups: list[list[Recipe]], facts: Facts) -> Recipe:
    ready = [group[0] for group in groups]
    for step in row.how:
        if step == "rows":
            ready = [concat(group) for group in groups]
        elif step == "qkv":
            ready = [_join_qkv(name, group, facts) for group in groups]
        elif step == "stack":
            layers: dict[int | None, list[Recipe]] = {}
            for (layer, expert), recipe in zip(spots, ready):
                own = layers.setdefault(layer, [])
                if expert != len(own):
                    raise ArtefactError(f"{name}: expert {len(own)} of layer {layer} is missing")
                own.append(recipe)
            spots = [(layer, None) for layer in layers]
            ready = [stack(own) for own in layers.values()]
        elif step == "layers":
            if [layer for layer, _ in spots] != list(range(len(spots))):
                raise ArtefactError(f"{name}: only some layers have it; they cannot be stacked")
            ready = [stack(ready)]
        else:
            ready = [_single(step, recipe, facts, back=False) for recipe in ready]
    return ready[0]


def _single(step: str, recipe: Recipe, facts: Facts, *, back: bool) -> Recipe:
    if step == "transpose":
        return transpose(recipe)
    kind, rotary_name, heads_name = step.split(":")
    rotary, heads = (int(n) if n.isdigit() else facts.get(n, 0) for n in (rotary_name, heads_name))
    if not rotary or rotary % 2 or not heads or recipe.shape[0] % heads:
        raise UsageError(f"the rotary part of {recipe.shape[0]:,} rows is not known; give it with --fact "
                         f"{rotary_name}=N --fact {heads_name}=N")
    size = recipe.shape[0] // heads
    out = []
    for head in range(heads):
        own = narrow(recipe, 0, head * size, size)
        if size > rotary:
            out.append(narrow(own, 0, 0, size - rotary))
        turned = narrow(own, 0, size - rotary, rotary)
        if back == (kind == "halves"):  # halves -> pairs
            out += [narrow(turned, 0, n // 2 + (n % 2) * (rotary // 2), 1) for n in range(rotary)]
        else:
            out += [every(turned, 0, 2), every(turned, 1, 2)]
    return concat(out)


def _qkv_sizes(name: str, facts: Facts, rows: int) -> tuple[int, int, int]:
    """(groups, query heads per group, rows of a head)."""
    heads = facts.get("heads", 0)
    groups = facts.get("kv_heads", 0) or heads
    if not heads or not groups:
        raise UsageError(f"{name}: how many heads are fused in it is not recorded; give --fact heads=N --fact "
                         "kv_heads=N")
    total = heads + 2 * groups
    if heads % groups or rows % total:
        raise UsageError(f"{name}: {rows:,} rows do not hold {heads} query heads and {groups} key/value heads")
    return groups, heads // groups, rows // total


def _split_qkv(name: str, recipe: Recipe, facts: Facts) -> list[Recipe]:
    groups, per, head = _qkv_sizes(name, facts, recipe.shape[0])
    size = (per + 2) * head
    q = [narrow(recipe, 0, g * size, per * head) for g in range(groups)]
    k = [narrow(recipe, 0, g * size + per * head, head) for g in range(groups)]
    v = [narrow(recipe, 0, g * size + (per + 1) * head, head) for g in range(groups)]
    return [concat(q), concat(k), concat(v)]


def _join_qkv(name: str, recipes: list[Recipe], facts: Facts) -> Recipe:
    groups, per, head = _qkv_sizes(name, facts, sum(r.shape[0] for r in recipes))
    q, k, v = recipes
    if q.shape[0] != groups * per * head or k.shape[0] != groups * head or v.shape[0] != groups * head:
        raise UsageError(f"{name}: q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows; those are not "
                         f"{groups * per} and {groups} heads")
    out = []
    for g in range(groups):
        out += [narrow(q, 0, g * per * head, per * head), narrow(k, 0, g * head, head), narrow(v, 0, g * head, head)]
    return concat(out)


def _same_step(contents: Contents, name: str, steps: list[Recipe | None]) -> Recipe | None:
    """One step count for tensors that become one; they must agree."""
    given = list({id(s.parts[0].source): s for s in steps if s is not None}.values())
    if not given or any(s is None for s in steps):
        return None
    values = {contents.source.read(s).tobytes() for s in given}
    if len(values) > 1:
        raise ArtefactError(f"{name}: its parts have taken different numbers of optimizer steps; one tensor cannot "
                            "keep them apart")
    return given[0]
