"""Variables of the environment against a data file of known names: misspelt, contradictory, left over, wrong advice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from diag.probes.host_words import Place
from diag.schema import SEVERITY_ORDER, Finding, Severity

#: How near a known name must be for an unknown one to be called a misspelling (difflib's ratio).
NEAR = 0.86
#: Values of the allocator's options that torch takes; it compares them letter by letter.
_ALLOCATOR_VALUES = {"expandable_segments": "True|False", "max_split_size_mb": r"\d+",
                     "garbage_collection_threshold": r"0?\.\d+", "pinned_use_cuda_host_register": "True|False"}
_CHECKED = re.compile(r"^(?:NCCL|TORCH|GLOO|PYTORCH)_")


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a value of a variable."""

    name: str
    when: str
    kind: str
    severity: Severity
    says: str
    fix: str
    nodes: str = "any"
    needs: str = ""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The data file."""

    nccl: list[str]
    torch: list[str]
    families: list[str]
    allocator: list[str]
    values: dict[str, str]
    lists: dict[str, list[str]]
    rules: list[Rule]
    renamed: dict[str, str]


@cache
def known() -> Known:
    """The data file, checked."""
    import tomllib

    data: dict[str, Any] = tomllib.loads((resources.files("diag.probes") / "env_variables.toml").read_text("utf-8"))
    return msgspec.convert(data, Known)


def check(place: Place) -> Iterator[Finding]:
    """Everything about the variables of one host."""
    table, variables = known(), place.facts.variables
    names = set(table.nccl) | set(table.torch)
    for name, value in variables.items():
        if name in table.renamed:
            yield _say(place, name, value, "info", f"is an old name; now {table.renamed[name]}", "old name",
                       f"Use {table.renamed[name]}.")
        elif _CHECKED.match(name) and name not in names and not name.startswith(tuple(table.families)):
            if not any(rule.name == name for rule in table.rules):
                yield unknown(place, name, value, names)
        elif name in table.lists and (odd := _odd_words(value, table.lists[name])):
            yield _say(place, name, value, "warning", f"holds {odd[0]!r}, which is none of "
                       f"{', '.join(table.lists[name])}", "bad value", f"Correct or unset {name}.")
        elif name in table.values and not re.fullmatch(table.values[name], value.strip(), re.I):
            legal = table.values[name].replace("|", ", ").replace("\\d", "digits")
            yield _say(place, name, value, "warning", f"is not a value that is understood (legal: {legal})",
                       "bad value", f"Correct or unset {name}.")
        yield from ruled(place, name, value)
    yield from files(place)
    yield from contradictions(place)
    yield from allocator(place)
    yield from devices(place)


def _odd_words(value: str, legal: list[str]) -> list[str]:
    """The words of a list (`Ring,Tree`, `^LL128`, `allreduce:tree;broadcast:ring`) that NCCL does not know."""
    plain = {word.lower() for word in legal}
    parts = [part.rpartition(":")[2].strip().removeprefix("^") for part in value.split(";")]
    words = [word.strip() for part in parts for word in part.split(",")]
    return [word for word in words if word and word.lower() not in plain]


def files(place: Place) -> Iterator[Finding]:
    """NCCL's own configuration files: lines without effect, and what they add to the environment or lose to it."""
    facts = place.facts
    for odd in facts.conf_odd:
        path, _, line = odd.partition(": ")
        absent = line.startswith("no such file")
        words = "names a file that does not exist; NCCL says nothing and reads ~/.nccl.conf neither" if absent else \
            "sets nothing that NCCL reads: it takes NAME=VALUE literally, without spaces, quotes or export"
        shown = f"NCCL_CONF_FILE={path}" if absent else f"{path}: {line!r}"
        yield place.finding("env_variable", "warning", f"{shown} {words}", at=path, text=line, confidence=0.85,
                            fix=[f"Correct or remove {path}."], kind="nccl.conf")
    for name, value in facts.overridden.items():
        yield place.finding("env_variable", "info", f"{name}={facts.variables.get(name, '')[:80]} of the environment "
                            f"counts, not {value}", at=name, text=value, variable=name, kind="overridden")
    if facts.variable_files:
        names = ", ".join(f"{name}={facts.variables[name][:40]}" for name in list(facts.variable_files)[:4])
        more = f" and {len(facts.variable_files) - 4} more" if len(facts.variable_files) > 4 else ""
        paths = " and ".join(dict.fromkeys(facts.variable_files.values()))
        yield place.finding("env_variable", "info", f"NCCL also reads {paths}: {names}{more}", at=paths, text=names,
                            kind="nccl.conf")


def unknown(place: Place, name: str, value: str, names: set[str]) -> Finding:
    """A name that nothing reads: a misspelling when a known one is near."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    if near:
        return _say(place, name, value, "warning", f"is read by nothing; did you mean {near[0]}?", "unknown",
                    f"Rename it to {near[0]}, or unset it.", near=near[0])
    return _say(place, name, value, "info", "is not a name that NCCL, torch or Gloo is known to read", "unknown",
                "Check the spelling; a plugin may read it.", confidence=0.5)


def ruled(place: Place, name: str, value: str) -> Iterator[Finding]:
    """What the rules say of one variable; the most severe only."""
    facts = place.facts
    active = any(port.state == "Active" for port in facts.ib)
    holds = {"": True, "gpus": bool(facts.gpus), "ib": active, "nvlink": any(gpu.nvlinks_active for gpu in facts.gpus)}
    nodes = {"any"} | ({"many"} if place.many else {"one"})
    said = [rule for rule in known().rules if rule.name == name and rule.nodes in nodes and holds.get(rule.needs, False)
            and re.fullmatch(rule.when, value.strip(), re.I)]
    if said:
        rule = max(said, key=lambda rule: SEVERITY_ORDER[rule.severity])
        yield _say(place, name, value, rule.severity, rule.says, rule.kind, rule.fix)


def contradictions(place: Place) -> Iterator[Finding]:
    """Variables that undo each other."""
    variables = place.facts.variables

    def on(name: str) -> bool:
        return variables.get(name, "").strip() == "1"

    pairs = (
        (on("NCCL_IB_DISABLE") and "NCCL_IB_HCA" in variables, "NCCL_IB_DISABLE", "NCCL_IB_HCA",
         "switches InfiniBand off while NCCL_IB_HCA chooses its adapters"),
        (on("NCCL_IB_DISABLE") and variables.get("NCCL_NET", "") == "IB", "NCCL_IB_DISABLE", "NCCL_NET",
         "switches InfiniBand off while NCCL_NET=IB asks for it"),
        (on("NCCL_P2P_DISABLE") and "NCCL_P2P_LEVEL" in variables, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL",
         "switches direct transfers off while NCCL_P2P_LEVEL tunes them"),
        (on("NCCL_P2P_DISABLE") and on("NCCL_SHM_DISABLE"), "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
         "and NCCL_SHM_DISABLE together leave only the network between GPUs of one host"),
        (variables.get("TORCH_NCCL_BLOCKING_WAIT", "") == "1" and
         variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0") not in ("0", ""), "TORCH_NCCL_BLOCKING_WAIT",
         "TORCH_NCCL_ASYNC_ERROR_HANDLING", "and TORCH_NCCL_ASYNC_ERROR_HANDLING exclude each other: only one is used"),
        ("NCCL_DEBUG_SUBSYS" in variables and variables.get("NCCL_DEBUG", "").upper() in ("", "WARN", "VERSION"),
         "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG", "has no effect without NCCL_DEBUG=INFO or TRACE"),
    )
    for holds, first, second, words in pairs:
        if holds:
            severity: Severity = "info" if first == "NCCL_DEBUG_SUBSYS" else "warning"
            both = f"{variables.get(first, '')} {second}={variables.get(second, '')}"
            yield _say(place, first, both, severity, words, "contradiction", f"Unset {first} or {second}.")
    if len({variables[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in variables}) > 1:
        yield _say(place, "PYTORCH_CUDA_ALLOC_CONF", variables["PYTORCH_CUDA_ALLOC_CONF"], "warning",
                   "and PYTORCH_ALLOC_CONF say different things", "contradiction", "Keep PYTORCH_ALLOC_CONF.")


def allocator(place: Place) -> Iterator[Finding]:
    """Options of the caching allocator."""
    options = known().allocator
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = place.facts.variables.get(name, "")
        for part in re.sub(r"\[[^\]]*\]", "", value).split(","):
            option, _, given = (word.strip() for word in part.partition(":"))
            if option in _ALLOCATOR_VALUES and not re.fullmatch(_ALLOCATOR_VALUES[option], given):
                yield _say(place, name, value, "warning", f"says {option}:{given}, which torch refuses when it first "
                           "allocates", "bad value", f"Correct {name}.")
            if option and option not in options:
                near = difflib.get_close_matches(option, options, n=1, cutoff=0.8)
                yield _say(place, name, value, "warning" if near else "info", f"has an unknown option {option!r}"
                           + (f"; did you mean {near[0]}?" if near else ""), "unknown", f"Correct {name}.")


def devices(place: Place) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES against the GPUs there are."""
    value = place.facts.variables.get("CUDA_VISIBLE_DEVICES")
    gpus = place.facts.gpus
    if value is None or not gpus:
        return
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts or parts[0] in ("-1", "NoDevFiles"):
        yield _say(place, "CUDA_VISIBLE_DEVICES", value, "warning", f"hides all {len(gpus)} GPUs", "leftover",
                   "Unset CUDA_VISIBLE_DEVICES.")
        return
    absent = [part for part in parts if part.isdigit() and int(part) >= len(gpus)]
    if absent:
        yield _say(place, "CUDA_VISIBLE_DEVICES", value, "warning", f"names GPU {absent[0]} and this host has "
                   f"{len(gpus)}: that one and all after it are ignored", "bad value", "Correct CUDA_VISIBLE_DEVICES.")
    if len(set(parts)) < len(parts):
        yield _say(place, "CUDA_VISIBLE_DEVICES", value, "warning", "names a GPU twice", "bad value",
                   "Correct CUDA_VISIBLE_DEVICES.")


def _say(place: Place, name: str, value: str, severity: Severity, words: str, kind: str, fix: str, *,
         confidence: float = 0.9, **numbers: Any) -> Finding:
    path = place.facts.variable_files.get(name, "")
    source = f" (in {path})" if path else ""
    return place.finding("env_variable", severity, f"{name}={value[:80]}{source} {words}", at=path or name,
                         text=f"{name}={value}", fix=[fix], confidence=confidence, variable=name, kind=kind, **numbers)
