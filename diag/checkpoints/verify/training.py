"""The training state: copies on several ranks, optimizer states, step counts, RNG and loader states.

Each check exists because public runs were resumed without a word from a checkpoint that fails it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from typing import Any

import xxhash

from diag.checkpoints.canonical import Checkpoint, Chunk, Problem, Tensor
from diag.checkpoints.dtypes import to_float32
from diag.checkpoints.verify.arrays import HEAD_BYTES, all_zero, readable, update, where_of
from diag.checkpoints.verify.experts import _ids
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural

_LAYER = re.compile(r"\.(\d+)\.")
#: Muon's only state (torch.optim.Muon's name); where it has a parameter, Adam's moments are not missed.
MOMENTUM = "momentum_buffer"
_MOMENTS = ("exp_avg", "exp_avg_sq", MOMENTUM)


def _role(tensor: Tensor) -> str:
    return MOMENTUM if tensor.role == "state" and tensor.name.endswith(f".{MOMENTUM}") else tensor.role


def copies(checkpoint: Checkpoint, options: Options, problems: list[Problem]) -> str:
    """What several ranks keep a copy of is the same on all of them."""
    count = 0
    limit = None if options.deep else HEAD_BYTES
    for tensor in checkpoint.tensors.values():
        if not tensor.copies:
            continue
        first = {chunk.key: chunk for chunk in tensor.chunks}
        digests: dict[Any, bytes | None] = {}
        for chunk in tensor.copies:
            original = first.get(chunk.key)
            if original is None:
                problems.append(Problem("copies equal", f"{tensor.name} in {chunk.file} covers another part than "
                                                        "in the "
                                        "other files", **where_of(tensor, chunk)))
                continue
            if chunk.key not in digests:
                digests[chunk.key] = _chunk_digest(checkpoint, tensor, original, limit)
            mine = _chunk_digest(checkpoint, tensor, chunk, limit)
            count += 1
            if mine is not None and digests[chunk.key] is not None and mine != digests[chunk.key]:
                problems.append(Problem("copies equal", f"{tensor.name} is replicated, and {chunk.file} holds other "
                                        f"values than {original.file}", **where_of(tensor, chunk),
                                        cause="ckpt_bad_values"))
    if not count and not problems:
        raise NotApplicable("no tensor is kept twice")
    return plural(count, "copy", "copies") + ("" if options.deep else f", first {HEAD_BYTES >> 10} KiB of each")


def _chunk_digest(checkpoint: Checkpoint, tensor: Tensor, chunk: Chunk, limit: int | None) -> bytes | None:
    array = readable(checkpoint, tensor, chunk)
    if array is None:
        return None
    made = xxhash.xxh3_128()
    update(made, array, limit)
    return bytes(made.digest())


def optimizer(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Every parameter that is trained has its optimizer state, and the same kinds of it."""
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in checkpoint.tensors.values():
        if (role := _role(tensor)) in (*_MOMENTS, "step", "master"):
            states[tensor.fqn][role] = tensor
    if not any(s.keys() & set(_MOMENTS) for s in states.values()):
        raise NotApplicable("weights only: no optimizer states")
    parameters = {t.fqn: t for t in checkpoint.tensors.values() if t.role == "parameter"}
    states = {fqn: held for fqn,
              held in states.items() if held.keys() - {"step"}}  # a count for a whole group has no more
    adam = [held for held in states.values() if MOMENTUM not in held]
    usual = {role for role in ("exp_avg", "exp_avg_sq", "step", "master")
             if sum(role in s for s in adam) * 2 > len(adam)}
    lost = {p.tensor for p in checkpoint.problems if p.tensor}
    for fqn, held in states.items():
        for role in sorted(usual - held.keys() - ({"exp_avg", "exp_avg_sq"} if MOMENTUM in held else set())):
            near = next(iter(held.values()))
            if near.name not in lost:
                problems.append(Problem("optimizer complete", f"{fqn} has no {role} in the optimizer state, as "
                                                              "the other "
                                        "parameters have", **where_of(near), cause="ckpt_missing_keys"))
        own = parameters.get(fqn)
        for role in (*_MOMENTS, "master"):
            moment = held.get(role)
            if own is not None and moment is not None and moment.shape != own.shape and moment.elements != own.elements:
                problems.append(Problem("optimizer complete", f"{moment.name} is {list(moment.shape)}, its parameter "
                                        f"{list(own.shape)}", **where_of(moment), cause="ckpt_shape_mismatch"))
            elif own is not None and moment is not None and moment.shape != own.shape:
                problems.append(Problem("optimizer complete", f"{moment.name} is {list(moment.shape)} and its "
                                                              "parameter "
                                        f"{list(own.shape)}: as many elements in another shape", **where_of(moment),
                                        cause="ckpt_shape_mismatch"))
    met = {fqn for fqn in parameters if fqn in states}
    for fqn in sorted(_forgotten(parameters.keys() - states.keys(), met)):
        problems.append(Problem("optimizer complete", f"{fqn} has no optimizer state, as its likes have",
                                **where_of(parameters[fqn]), cause="ckpt_missing_keys"))
    for fqn in sorted(states.keys() - parameters.keys()) if met else []:
        near = next(iter(states[fqn].values()))
        if near.name not in lost:
            problems.append(Problem("optimizer complete", f"{near.name} belongs to no parameter of the checkpoint",
                                    **where_of(near), cause="ckpt_missing_keys"))
    kinds = usual | ({MOMENTUM} if len(adam) < len(states) else set())
    return f"{plural(len(states), 'parameter')}, {', '.join(sorted(kinds))}"


def _forgotten(without: set[str], met: set[str]) -> set[str]:
    """Parameters without states although the same matrix of other layers has them and others of their layer have.

    A kind that is frozen everywhere, and whole frozen layers, are left alone; so are buffers, which look like them.
    """
    kinds = {_LAYER.sub(".*.", fqn) for fqn in met}
    in_layer = {match[1] for fqn in met if (match := _LAYER.search(fqn))}
    return {fqn for fqn in without
            if _LAYER.sub(".*.", fqn) in kinds and (match := _LAYER.search(fqn)) and match[1] in in_layer}


def moments(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """After the first step no second moment is all zero, unless the parameter never had a gradient (its like have one).

    A zero first moment beside a second moment that is not is a reset as well.
    """
    held = [t for t in checkpoint.tensors.values() if _role(t) in _MOMENTS and t.elements]
    if not held:
        raise NotApplicable("weights only: no optimizer states")
    step = checkpoint.meta.step
    if step == 0:
        raise NotApplicable("step 0: moments are still zero")
    zero: dict[str, set[str]] = defaultdict(set)
    seen: dict[str, set[str]] = defaultdict(set)
    by_key: dict[tuple[str, str], Tensor] = {}
    for tensor in held:
        verdict = all_zero(checkpoint, tensor)
        if verdict is None:
            continue
        seen[tensor.fqn].add(_role(tensor))
        by_key[tensor.fqn, _role(tensor)] = tensor
        if verdict:
            zero[tensor.fqn].add(_role(tensor))
    if seen and zero.keys() >= seen.keys() and step is None and not _stepped(checkpoint):
        raise NotApplicable("all moments are zero and no step is recorded: never stepped")
    for fqn, roles in sorted(zero.items()):
        for role in sorted(roles):
            lone = roles != seen[fqn]
            tensor = by_key[fqn, role]
            what = "while its other moment is not" if lone else "after the first step"
            unused = not lone and tensor.expert is not None  # an expert that no token chose yet
            problems.append(Problem("moments", f"{tensor.name} is all zero {what}: the optimizer state of {fqn} was "
                                    "lost", **where_of(tensor), cause="ckpt_bad_values",
                                    severity="warning" if unused else "error"))
    return plural(len(by_key), "moment")


def _stepped(checkpoint: Checkpoint) -> bool:
    return any(value > 0 for _, value in _steps(checkpoint))


def _steps(checkpoint: Checkpoint) -> list[tuple[Tensor, float]]:
    found = []
    for tensor in checkpoint.tensors.values():
        if tensor.role != "step" or tensor.elements != 1 or not tensor.chunks:
            continue
        array = readable(checkpoint, tensor, tensor.chunks[0])
        if array is not None and array.size:
            found.append((tensor, float(to_float32(array.reshape(-1)[:1], tensor.type)[0])))
        for chunk in tensor.copies:
            other = readable(checkpoint, tensor, chunk)
            if other is not None and other.size:
                found.append((tensor, float(to_float32(other.reshape(-1)[:1], tensor.type)[0])))
    return found


def steps(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """The optimizer's step count is the same for every parameter, and that of the checkpoint.

    This trainer saves rows of modules at their own cadence; the manifest states the mixture,
    and each row is held to its
    own step.
    """
    found = _steps(checkpoint)
    recorded = checkpoint.meta.args.get("optimizer_steps")
    if not found:
        raise NotApplicable("no step counts among the tensors")
    rows, row_of = checkpoint.meta.rows, checkpoint.meta.args.get("row_of", {})
    groups: dict[str, list[tuple[Tensor, float]]] = defaultdict(list)
    for tensor, value in found:
        groups[row_of.get(tensor.name, "")].append((tensor, value))
    usual = None
    for row, held in groups.items():
        usual = Counter(value for _, value in held).most_common(1)[0][0]
        limit = rows.get(row)
        for tensor, value in held:
            if not math.isfinite(value) or value < 0 or value != int(value):
                problems.append(Problem("steps equal", f"{tensor.name} is {value}, which is no count of steps",
                                        **where_of(tensor), cause="ckpt_bad_values"))
            elif value != usual:
                problems.append(Problem("steps equal", f"{tensor.name} is {value:,.0f}, and {usual:,.0f} for the "
                                                       "others: "
                                        "steps are mixed", **where_of(tensor), cause="ckpt_bad_values"))
            elif limit is not None and value > limit:  # fewer: updates were skipped for a non-finite gradient
                problems.append(Problem("steps equal", f"{tensor.name} is {value:,.0f}, and the manifest says step "
                                        f"{limit:,} for {row}", **where_of(tensor), cause="ckpt_bad_values"))
    if isinstance(recorded, int) and usual is not None and usual != recorded and not problems:
        problems.append(Problem("steps equal", f"the optimizer counts {usual:,.0f} steps, the checkpoint says "
                                f"{recorded:,}", **where_of(found[0][0]), cause="ckpt_bad_values"))
    mixed = {row: step for row, step in rows.items() if step != checkpoint.meta.step}
    stated = f"; stated by the manifest: {', '.join(f'{r} at step {s:,}' for r, s in sorted(mixed.items()))}" if mixed \
        else ""
    return f"{plural(len(found), 'step count')}{f' of {usual:,.0f}' if usual is not None else ''}{stated}"


def rng(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """RNG states, where any are kept per rank, are kept for all ranks."""
    return _ranks(checkpoint, checkpoint.meta.rng, "RNG state", "rng", problems)


def loader(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """The data loader's state, where any is kept per rank, is kept for all ranks; or the position is recorded."""
    if not checkpoint.meta.loader and checkpoint.meta.consumed is not None:
        return f"position {checkpoint.meta.consumed:,}"
    return _ranks(checkpoint, checkpoint.meta.loader, "data-loader state", "loader state", problems)


def _ranks(checkpoint: Checkpoint, ranks: set[int], what: str, check: str, problems: list[Problem]) -> str:
    if not ranks:
        if problems:
            return ""
        raise NotApplicable(f"no {what} in the checkpoint")
    world = max(ranks) + 1
    if checkpoint.meta.layout.get("dp") and check == "loader state":
        world = max(world, checkpoint.meta.layout["dp"])
    missing = sorted(set(range(world)) - ranks)
    if missing:
        file = next((f for f in sorted(checkpoint.expected) if f.endswith(f"rank{missing[0]}.pt")), None)
        problems.append(Problem(check, f"there is {what} of ranks {_ids(ranks)} and none of {_ids(missing)}",
                                file or checkpoint.commit_mark or None, f"rank {missing[0]}", cause="ckpt_incomplete"))
    return plural(len(ranks), "rank")
