"""What a checkpoint holds, as the converter sees it: parameters with their states, and the rest.

States of one parameter share its shape and are cut and joined as it is; `step` is a scalar. A tensor that belongs to no
parameter (an FP8 scale, a router's bias) is an entry of its own. Random-number and loader states are `others`: they
belong to ranks of the old layout and go over only where the layout of names does not change.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diag.checkpoints import open_checkpoint
from diag.checkpoints.canonical import Checkpoint, Item, Tensor
from diag.checkpoints.convert.recipe import Recipe, whole
from diag.checkpoints.convert.source import Source, spare
from diag.checkpoints.naming import is_rng
from diag.checkpoints.steps import step_of_name
from diag.errors import ArtefactError, UsageError

#: Written beside what this converter makes: where it came from, and what the target has no place for.
RECORD = "pdtrain_reshard.json"
RECORD_FORMAT = "pdtrain.reshard/1"
#: The folder below a Hugging Face model where this converter puts the optimizer's states.
STATES_FOLDER = "optimizer"
#: Checks about what a checkpoint may lack without any harm to its weights and optimizer states.
NOT_WEIGHTS = ("loader state", "rng")
_KEY = re.compile(r"\.(?P<key>max_exp_avg_sq|momentum_buffer|acc_delta|square_avg|mu|nu)$")
_BOOKKEEPING = re.compile(r"(?:^|\.)(?:optim|common|shared|group\.|state_dict)")
#: Facts about the model under the names that trainers give them -> ours.
FACTS = {
    "heads": ("heads", "num_attention_heads", "n_heads"),
    "kv_heads": ("kv_heads", "num_key_value_heads", "num_query_groups", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "layers": ("layers", "num_layers", "num_hidden_layers", "n_layers"),
    "hidden": ("hidden", "hidden_size", "dim"),
    "q_lora_rank": ("q_lora_rank",), "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim", "qk_head_dim"),
    "qk_rope_head_dim": ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    "v_head_dim": ("v_head_dim",),
}


@dataclass(slots=True)
class Entry:
    """One parameter or buffer. states: "weight" (as the model holds it), "master" (FP32 beside 16-bit weights),
    "exp_avg", "exp_avg_sq" and other optimizer states of its shape; `step` is a scalar. `keys`: state -> source key."""

    name: str
    states: dict[str, Recipe] = field(default_factory=dict)
    step: Recipe | None = None
    buffer: bool = False
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def main(self) -> Recipe:
        """The weight that training goes on from: the FP32 master where there is one."""
        return self.states.get("master") or self.states["weight"]

    @property
    def weight(self) -> Recipe:
        return self.states.get("weight") or self.states["master"]


@dataclass(slots=True)
class Contents:
    """Everything of a source. `family` names its parameters' convention once `mapping.detect` has seen them."""

    source: Source
    entries: dict[str, Entry] = field(default_factory=dict)
    other_tensors: list[Tensor] = field(default_factory=list)
    items: list[tuple[int, Item]] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    consumed: int | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    format: str = ""
    family: str = ""
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def has_optimizer(self) -> bool:
        return any("exp_avg" in entry.states for entry in self.entries.values())


def load(path: Path, *, format: str | None = None, weights_only: bool = False) -> Contents:
    """Read the structure of the checkpoint at `path`.

    Raises `UsageError` (nothing there), `ArtefactError` (no checkpoint; damaged, so that a copy would be damaged too).
    """
    checkpoints = [open_checkpoint(path, format=format)]
    folder = home_of(checkpoints[0])
    if checkpoints[0].format == "safetensors" and (folder / STATES_FOLDER).is_dir():
        checkpoints.append(open_checkpoint(folder / STATES_FOLDER, format="safetensors"))
    for checkpoint in checkpoints:
        _refuse_damaged(checkpoint, path)
    contents = Contents(Source([spare(checkpoint) for checkpoint in checkpoints]), format=checkpoints[0].format)
    for which, checkpoint in enumerate(checkpoints):
        _collect(contents, which, checkpoint, weights_only)
    meta = checkpoints[0].meta
    contents.step, contents.consumed = meta.step, meta.consumed
    if contents.step is None:
        contents.step = step_of_name(folder.name)
    _read_record(contents, folder)
    _gather_facts(contents, checkpoints[0], folder)
    if not any(e.states.keys() & {"weight", "master"} for e in contents.entries.values()):
        raise ArtefactError(f"{path}: holds no weights")
    _leave_positions(contents)
    for entry in contents.entries.values():
        if not entry.states.keys() & {"weight", "master"}:
            raise ArtefactError(f"{path}: there are optimizer states of {entry.name} and no weight of that name")
    return contents


def _leave_positions(contents: Contents) -> None:
    """States that are kept by a parameter's position, not by its name, as torch.optim numbers them: which parameter
    is meant, only the model's code knows. They stay behind."""
    lone = [name for name, entry in contents.entries.items()
            if not entry.states.keys() & {"weight", "master"} and name.rpartition(".")[2].isdigit()]
    for name in lone:
        del contents.entries[name]
    if lone:
        contents.dropped.append(f"the optimizer's states of {len(lone):,} parameters: kept by position, which the "
                                "model's code decides, not by name")


def home_of(checkpoint: Checkpoint) -> Path:
    """The folder of this checkpoint itself; this trainer's reader has the folder of all steps as its root."""
    return checkpoint.folder.root / Path(checkpoint.commit_mark).parent


def _refuse_damaged(checkpoint: Checkpoint, path: Path) -> None:
    errors = [p for p in checkpoint.problems if p.severity == "error" and p.check not in NOT_WEIGHTS]
    if errors:
        more = f", and {len(errors) - 1:,} more" if len(errors) > 1 else ""
        raise ArtefactError(f"{path}: is damaged: {errors[0].text}{more}; `pdtrain diag ckpt verify {path}` says all")
    missing = sorted(f for f in checkpoint.expected if checkpoint.folder.size(f) is None)
    if missing:
        raise ArtefactError(f"{path}: is not complete: {missing[0]} is missing"
                            f"{f', and {len(missing) - 1:,} more' if len(missing) > 1 else ''}")
    for tensor in checkpoint.tensors.values():
        if tensor.type.bits % 8:
            raise ArtefactError(f"{tensor.name}: is {tensor.dtype}, packed in parts of bytes; that is not converted")
        if tensor.split_unknown:
            raise ArtefactError(f"{tensor.name}: is a piece of a tensor-parallel rank, and the checkpoint does not say "
                                "how the pieces belong together")
        held = sum(chunk.elements for chunk in tensor.chunks)
        if held != math.prod(tensor.shape):
            raise ArtefactError(f"{path}: is damaged: the chunks of {tensor.name} hold {held:,} of "
                                f"{math.prod(tensor.shape):,} elements")


def _collect(contents: Contents, which: int, checkpoint: Checkpoint, weights_only: bool) -> None:
    rest = 0
    for tensor in checkpoint.tensors.values():
        role, name = tensor.role, tensor.fqn
        if role == "state":
            match = _KEY.search(tensor.name)
            if match is None or name == tensor.name:
                if is_rng(tensor.name) or not _is_weightlike(tensor):
                    contents.other_tensors.append(tensor)
                    continue
                role = "buffer"
        if weights_only and role in ("exp_avg", "exp_avg_sq", "step", "state"):
            rest += 1
            continue
        entry = contents.entries.setdefault(name, Entry(name))
        if role == "step":
            if math.prod(tensor.shape) == 1:
                entry.step = whole(tensor)
                entry.keys["step"] = tensor.name
                continue
            contents.other_tensors.append(tensor)
            continue
        key = {"parameter": "weight", "buffer": "weight"}.get(role, role)
        if role == "state":
            key = match["key"]  # type: ignore[index]
        if key in entry.states:
            raise ArtefactError(f"{entry.keys[key]} and {tensor.name} are both the {key} of {name}")
        entry.buffer = entry.buffer or role == "buffer"
        entry.states[key] = whole(tensor)
        entry.keys[key] = tensor.name
    _group_steps(contents)
    contents.items += [(which, item) for item in checkpoint.items.values()]
    if rest:
        contents.dropped.append(f"{rest:,} optimizer states (--weights-only)")


def _group_steps(contents: Contents) -> None:
    """A count of steps without a parameter is of a whole group (DeepSpeed): it becomes its parameters' own."""
    shared = [entry for entry in contents.entries.values() if not entry.states and entry.step is not None]
    for entry in shared:
        del contents.entries[entry.name]
    lacking = [e for e in contents.entries.values() if e.step is None and "exp_avg" in e.states]
    if not shared or not lacking:
        return
    if len({contents.source.read(e.step).tobytes() for e in shared if e.step is not None}) > 1:
        contents.dropped.append("the step counts of the parameter groups: they differ, and which parameter is in which "
                                "group is not recorded")
        return
    for entry in lacking:
        entry.step = shared[0].step


def _is_weightlike(tensor: Tensor) -> bool:
    """FP8 scales and the like belong to the model, although they are no parameters."""
    return tensor.name == tensor.fqn and not _BOOKKEEPING.search(tensor.name)


def _read_record(contents: Contents, folder: Path) -> None:
    """What an earlier conversion wrote beside its result: the facts that its format could not hold."""
    try:
        text = (folder / RECORD).read_bytes()[: 4 << 20]
    except OSError:
        return
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        contents.notes.append(f"{RECORD} is damaged and was not used")
        return
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        return
    if isinstance(record.get("facts"), dict):
        contents.facts |= {k: v for k, v in record["facts"].items() if k in FACTS and type(v) is int}
    if _is_manifest(record.get("manifest")):
        contents.manifest = record["manifest"]
    if contents.step is None and type(record.get("step")) is int:
        contents.step = record["step"]
    if contents.consumed is None and type(record.get("consumed")) is int:
        contents.consumed = record["consumed"]


def _gather_facts(contents: Contents, checkpoint: Checkpoint, folder: Path) -> None:
    """Numbers of heads and the like, from the manifest, config.json or the recorded arguments."""
    sources: list[dict[str, Any]] = [checkpoint.meta.args]
    for name in ("manifest.json", "config.json"):
        try:
            found = json.loads((folder / name).read_bytes()[: 4 << 20])
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(found, dict):
            continue
        if name == "manifest.json" and _is_manifest(found):
            contents.manifest = found
            contents.family = "pdtrain"
            if contents.consumed is None and type(found.get("consumed")) is int:
                contents.consumed = found["consumed"]
        sources.append(found)
    if contents.manifest:
        model = contents.manifest["model"]
        sources += [model, model.get("mla") if model.get("attention") == "mla" else {}]
    for fact, names in FACTS.items():
        for table in sources:
            value = next((table[n] for n in names if isinstance(table, dict) and type(table.get(n)) is int), None)
            if value is not None:
                contents.facts[fact] = value
    if contents.manifest and contents.manifest["model"].get("attention") != "mla":
        for fact in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            contents.facts.pop(fact, None)


def _is_manifest(value: Any) -> bool:
    """Whether `value` has the parts of this trainer's manifest that are used here."""
    return isinstance(value, dict) and isinstance(value.get("model"), dict) and isinstance(value.get("rows"), dict)


def parse_facts(given: tuple[str, ...]) -> dict[str, int]:
    """--fact heads=8 … Raises `UsageError`."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in FACTS or not value.isdigit() or int(value) < 0:
            raise UsageError(f"--fact {text!r}: give name=number with one of {', '.join(FACTS)}")
        found[name] = int(value)
    return found
