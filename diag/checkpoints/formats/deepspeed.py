"""DeepSpeed ZeRO-0 to 3: `mp_rank_MM_model_states.pt`, `[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt`, `latest`.

ZeRO-1 and 2: a parameter group is one flat vector in the order of `param_shapes`, cut into equal pieces over the
data-parallel ranks; `param_slice_mappings` says which piece holds what (absent before 0.8: then the order alone).
ZeRO-3: every parameter is cut into `world` equal pieces (the last padded), rank r's flat vector holds piece r of each.
ZeRO-0: optimizer states by index in the model file. MoE: `layer_L_expert_E_mp_rank_MM_model_states.pt` per global
expert; the optimizer's pieces count local experts, and the partition count of their group tells the expert parallelism.

The 16-bit weights are role "parameter", the FP32 vectors "master". Commit mark: `latest`, beside the tag's folder.
Versions seen: 0.9 to 0.19.8.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from diag.checkpoints.canonical import Checkpoint, Chunk, Role, Tensor
from diag.checkpoints.formats.pickled import (
    add_tensor,
    add_tree,
    attributes,
    chunk_of,
    elements,
    flat_chunk,
    number,
    open_file,
    width,
)
from diag.checkpoints.naming import annotate, expert_family, expert_of
from diag.checkpoints.steps import step_of_name
from diag.checkpoints.torch_pickle import TensorRef
from diag.checkpoints.torch_zip import Archive
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "deepspeed"
_MODEL = re.compile(r"^(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt$")
_OPTIM = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt$")
_EXPERT = re.compile(r"^(?:layer_(?P<layer>-?\d+)_)?expert_(?P<id>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt$")
_EXPP = re.compile(r"^(?:bf16_|fp16_)?expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt$")
_MOMENTS: tuple[Role, ...] = ("exp_avg", "exp_avg_sq")


def sniff(place: Place) -> bool:
    return any(_MODEL.match(name) or _OPTIM.match(name) or _EXPERT.match(name) for name in place.names)


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when no file of it can be opened."""
    checkpoint = Checkpoint(place.inside, NAME, committed=None)
    checkpoint.meta.framework = "deepspeed"
    checkpoint.not_applicable["commit mark"] = "the mark is the file 'latest' beside the folder"
    model = {(int(m["mp"]), int(m["dp"] or 0)): n for n in place.names if (m := _MODEL.match(n))}
    optim = {(int(m["mp"]), int(m["dp"])): n for n in place.names if (m := _OPTIM.match(n))}
    states = {key: (archive, archive.value) for key, name in sorted(model.items())
              if (archive := _opened(checkpoint, name)) is not None}
    _world(checkpoint, model, optim, [value for _, value in states.values()])
    shapes: dict[int, list[dict[str, tuple[int, ...]]]] = {}
    for (mp, dp), (archive, value) in states.items():
        shapes.setdefault(mp, _param_shapes(value))
        _module(checkpoint, archive, value, mp, dp, many=len({m for m, _ in model}) > 1)
    partitions: dict[int, dict[int, tuple[Archive, dict[str, Any]]]] = {}
    for (mp, dp), name in sorted(optim.items()):
        opened = _opened(checkpoint, name)
        if opened is not None:
            partitions.setdefault(mp, {})[dp] = (opened, opened.value.get("optimizer_state_dict") or {})
    for mp, by_rank in partitions.items():
        _agree(checkpoint, by_rank)
        stage = max((number(state.get("zero_stage")) or 0 for _, state in by_rank.values()), default=0)
        tag = f"mp_rank_{mp:02d}." if len(partitions) > 1 else ""
        if stage >= 3:
            _stage3(checkpoint, tag, shapes.get(mp, []), by_rank)
        else:
            _stage12(checkpoint, tag, shapes.get(mp, []), by_rank)
    _experts(checkpoint, place)
    if not checkpoint.containers:
        raise ArtefactError(checkpoint.problems[0].text if checkpoint.problems else "no file of it can be opened")
    if checkpoint.meta.step is None:
        checkpoint.meta.step = step_of_name(place.folder.name)
    return checkpoint


def _opened(checkpoint: Checkpoint, name: str) -> Archive | None:
    archive = open_file(checkpoint, name)
    if archive is not None and not isinstance(archive.value, dict):
        checkpoint.problem("metadata", f"{name} holds no dictionary", file=name)
        return None
    return archive


def _world(checkpoint: Checkpoint, model: dict[tuple[int, int], str], optim: dict[tuple[int, int], str],
           states: list[dict[str, Any]]) -> None:
    """File names that the recorded degrees call for."""
    meta = checkpoint.meta
    for value in states:
        meta.step = number(value.get("global_steps")) if meta.step is None else meta.step
        meta.version = meta.version or str(value.get("ds_version") or "")
        for key, axis in (("dp_world_size", "dp"), ("mp_world_size", "mp")):
            size = number(value.get(key))
            if size is None:
                continue
            if meta.layout.setdefault(axis, size) != size:
                checkpoint.problem("ranks agree", f"the model files record different {key}: {meta.layout[axis]} "
                                                  f"and {size}")
        meta.consumed = number(value.get("global_samples")) if meta.consumed is None else meta.consumed
    dp, mp = meta.layout.get("dp", 0), meta.layout.get("mp", 0)
    meta.world = dp * mp or None
    mps = range(max(mp, 1 + max((m for m, _ in (*model, *optim)), default=0)))
    sharded = any(name.startswith("zero_pp_rank") for name in model.values())
    ranks = range(dp or 1 + max((d for _, d in (*model, *optim)), default=0))
    for m in mps:
        for d in ranks if sharded else [0]:
            name = f"mp_rank_{m:02d}_model_states.pt"
            name = f"zero_pp_rank_{d}_{name}" if sharded else name
            if (m, d) not in model:
                checkpoint.expected.add(name)
        prefix = next((n[: n.index("zero_pp")] for n in optim.values()), "bf16_")
        for d in ranks if optim or sharded else []:
            if (m, d) not in optim:
                checkpoint.expected.add(f"{prefix}zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt")
    if dp:
        for (m, d), name in (*model.items(), *optim.items()):
            if d >= dp or (mp and m >= mp):
                checkpoint.problem("no stale shards", f"{name} is of rank {d} of {m}, the checkpoint records {dp} "
                                                      f"x {mp} "
                                   "ranks: it is of an older, larger run", file=name, cause="ckpt_stale_shards",
                                   severity="warning")
                model.pop((m, d), None) if name in model.values() else optim.pop((m, d), None)


def _param_shapes(value: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    groups = value.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups if isinstance(groups, list) else []
    return [{str(k): v for k, v in group.items() if isinstance(v, tuple)} for group in groups if isinstance(group,
                                                                                                            dict)]


def _module(checkpoint: Checkpoint, archive: Archive, value: dict[str, Any], mp: int, dp: int, *, many: bool) -> None:
    """Weights and buffers of one model file; those of tensor-parallel ranks keep the rank in their name."""
    tag = f"mp_rank_{mp:02d}." if many else ""
    buffers = set(value.get("buffer_names") or ())
    module = value.get("module")
    for name, ref in (module.items() if isinstance(module, dict) else ()):
        if not isinstance(ref, TensorRef):
            continue
        if name not in buffers and (dp or not elements(ref.shape)):
            continue  # ZeRO-3 leaves an empty tensor where the parameter was
        tensor = add_tensor(checkpoint, archive, ref, tag + name, mp)
        if tensor is not None:
            tensor.split_unknown = many
            tensor.role = "buffer" if name in buffers else "parameter"
    fragments, frozen = value.get("frozen_param_fragments"), value.get("frozen_param_shapes")
    if isinstance(fragments, dict) and isinstance(frozen, dict):
        checkpoint.meta.args.setdefault("frozen", sorted(frozen))
        for name, ref in fragments.items():
            shape = frozen.get(name)
            if isinstance(ref, TensorRef) and isinstance(shape, tuple):
                whole = chunk_of(checkpoint, archive, ref, name=name, rank=dp)
                if whole is not None:
                    _piece(checkpoint, tag + name, ref.dtype, shape, "parameter", whole, dp,
                           checkpoint.meta.layout.get("dp", 1), 0)
    optimizer = value.get("optimizer")
    if isinstance(optimizer, dict):
        _stage0(checkpoint, archive, optimizer, [n for n in module or {} if n not in buffers], tag)
    rest = {k: v for k, v in value.items() if k not in ("module", "optimizer", "param_shapes", "frozen_param_shapes",
                                                        "frozen_param_fragments", "ds_config", "buffer_names")}
    if not dp and not mp:
        add_tree(checkpoint, archive, rest, "")
        for name in list(checkpoint.items):
            if "rng" in name.lower():
                checkpoint.meta.rng.add(0)
        checkpoint.meta.args["ds_config"] = attributes(value.get("ds_config"))
        if isinstance(value.get("universal_checkpoint_info"), dict):
            checkpoint.meta.args["universal_checkpoint_info"] = value["universal_checkpoint_info"]


def _stage0(checkpoint: Checkpoint, archive: Archive, optimizer: dict[str, Any], names: list[str], tag: str) -> None:
    """Optimizer states by index: named after the parameters where order and shapes agree, else after the index."""
    inner = optimizer.get("optimizer_state_dict")
    state = (inner if isinstance(inner, dict) else optimizer).get("state")
    state = state if isinstance(state, dict) else {}
    masters = [t for group in optimizer.get("fp32_groups") or () if isinstance(group, (list, tuple)) for t in group]

    def shape_of(name: str) -> tuple[int, ...]:
        held = checkpoint.tensors.get(tag + name)
        return held.shape if held else ()

    fits = len(names) == len(state) and all(
        isinstance(entry, dict) and isinstance(entry.get("exp_avg"),
                                               TensorRef) and entry["exp_avg"].shape == shape_of(n)
        for n, (_, entry) in zip(names, sorted(state.items(), key=lambda kv: str(kv[0]).zfill(9))))
    for position, (index, entry) in enumerate(sorted(state.items(), key=lambda kv: str(kv[0]).zfill(9))):
        name = tag + (names[position] if fits else str(index))
        for key, ref in entry.items() if isinstance(entry, dict) else ():
            if isinstance(ref, TensorRef):
                add_tensor(checkpoint, archive, ref, f"optimizer.state.{name}.{key}", 0)
    for position, ref in enumerate(masters):
        if isinstance(ref, TensorRef):
            name = tag + (names[position] if fits and len(masters) == len(names) else str(position))
            add_tensor(checkpoint, archive, ref, f"optimizer.state.{name}.fp32", 0)


def _agree(checkpoint: Checkpoint, by_rank: dict[int, tuple[Archive, dict[str, Any]]]) -> None:
    """Stage and partition count must be the same in all files, and as many as there are files."""
    first: dict[str, tuple[str, Any]] = {}
    _same_states(checkpoint, by_rank)
    for _, (archive, state) in sorted(by_rank.items()):
        count = state.get("partition_count")
        sizes = {"zero_stage": number(state.get("zero_stage")),
                 "partition_count": max(count) if isinstance(count, list) and count else number(count)}
        for key, value in sizes.items():
            if value is None:
                continue
            file, seen = first.setdefault(key, (archive.container.file, value))
            if seen != value:
                checkpoint.problem("ranks agree", f"{archive.container.file} records {key} {value}, {file} "
                                                  f"{seen}: they "
                                   "are of different runs", file=archive.container.file, cause="ckpt_world_size")


def _same_states(checkpoint: Checkpoint, by_rank: dict[int, tuple[Archive, dict[str, Any]]]) -> None:
    """All ranks keep the same states of a parameter group (exp_avg, exp_avg_sq, step)."""
    every: dict[int, set[str]] = {}
    for _, state in by_rank.values():
        for index, held in enumerate(_base_states(state)):
            every.setdefault(index, set()).update(map(str, held))
    for archive, state in by_rank.values():
        for index, held in enumerate(_base_states(state)):
            for key in sorted(every[index] - set(map(str, held))):
                checkpoint.problem("optimizer complete", f"{archive.container.file} has no {key} for parameter group "
                                   f"{index}, as the other ranks have", file=archive.container.file,
                                   tensor=f"group.{index}.{key}", cause="ckpt_missing_keys")


def _flats(value: Any) -> list[TensorRef]:
    return [v for v in value if isinstance(v, TensorRef)] if isinstance(value, (list, tuple)) else []


def _base_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of the wrapped optimizer, one per parameter group."""
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or {}
    if isinstance(base, dict) and isinstance(base.get("state"), dict):
        return [v for _, v in sorted(base["state"].items(), key=lambda kv: str(kv[0]).zfill(9)) if isinstance(v, dict)]
    return [v for v in base if isinstance(v, dict)] if isinstance(base, list) else []


def _stage12(checkpoint: Checkpoint, tag: str, shapes: list[dict[str, tuple[int, ...]]],
             by_rank: dict[int, tuple[Archive, dict[str, Any]]]) -> None:
    done: dict[str, int] = {}
    known = {name: shape for group in shapes for name, shape in group.items()}
    last: dict[int, int] = {}
    for dp, (archive, state) in sorted(by_rank.items()):
        groups = _flats(state.get("single_partition_of_fp32_groups"))
        mappings = state.get("param_slice_mappings")
        for index, flat in enumerate(groups):
            whole = {"master": chunk_of(checkpoint, archive, flat, name=f"{tag}group {index}", rank=dp)}
            own = _base_states(state)[index] if index < len(_base_states(state)) else {}
            for key, ref in own.items():
                if isinstance(ref, TensorRef) and ref.shape == ():
                    add_tensor(checkpoint, archive, ref, f"optimizer.{tag}group.{index}.{key}", dp)
                elif isinstance(ref, TensorRef):
                    whole[key] = chunk_of(checkpoint, archive, ref, name=f"{tag}group {index}.{key}", rank=dp)
            pieces = _mapped(mappings, index)
            if pieces is None:
                pieces = _by_order(shapes[index] if index < len(shapes) else {}, flat.shape[0], done, last, index)
            order = list(shapes[index]) if index < len(shapes) else []
            locals_ = {i for name, _, _ in pieces if (i := expert_of(name)) is not None}
            first = _first_expert(checkpoint, state, index, dp, len(locals_))
            for local, start, count in pieces:
                shape = known.get(local)
                name = globally(local, first)
                if shape is None:
                    checkpoint.problem("metadata", f"{archive.container.file} holds a piece of {name}, which the model "
                                       "file does not list", file=archive.container.file, tensor=name)
                    continue
                at = done.get(name, 0)
                if name in order and not locals_:
                    if order.index(name) < last.get(index, 0):
                        checkpoint.problem("ranks agree", f"{archive.container.file} holds a piece of {name}, "
                                                          "which comes "
                                           "before what the ranks below it hold: the shards are swapped",
                                           file=archive.container.file, tensor=name)
                    last[index] = max(last.get(index, 0), order.index(name))
                for key, chunk in whole.items():
                    if chunk is not None and (key in _MOMENTS or key == "master"):
                        _put(checkpoint, f"optimizer.state.{tag}{name}.{'fp32' if key == 'master' else key}", shape,
                             chunk, (at, at + count), start, flat.dtype)
                done[name] = at + count


def _first_expert(checkpoint: Checkpoint, state: dict[str, Any], group: int, dp: int, local: int) -> int:
    """Global id of the first local expert in this rank's piece of an expert group; 0 for other groups.

    Expert-parallel groups are consecutive ranks, and a group's partition count is its expert-data-parallel size.
    """
    counts, world = state.get("partition_count"), checkpoint.meta.layout.get("dp", 1)
    if not local or not isinstance(counts, list) or group >= len(counts) or not number(counts[group]):
        return 0
    return (dp % max(1, world // counts[group])) * local


def globally(name: str, first: int) -> str:
    """The name with its local expert id counted from `first` on."""
    local = expert_of(name)
    if not first or local is None:
        return name
    head, _, tail = expert_family(name).partition("*")
    return f"{head}{local + first}{tail}"


def _mapped(mappings: Any, index: int) -> list[tuple[str, int, int]] | None:
    """(name, first element in the partition, elements) of one group, from `param_slice_mappings`."""
    if not isinstance(mappings, list) or index >= len(mappings) or not isinstance(mappings[index], dict):
        return None
    found = []
    for name, address in mappings[index].items():
        start, count = number(attributes(address).get("start")), number(attributes(address).get("numel"))
        if start is None or count is None:
            return None
        found.append((str(name), start, count))
    return found


def _by_order(shapes: dict[str, tuple[int, ...]], size: int, done: dict[str, int], last: dict[int, int],
              index: int) -> list[tuple[str, int, int]]:
    """The same by the order of the parameters, for files that carry no mapping."""
    found, at = [], 0
    for name, shape in shapes.items():
        left = elements(shape) - done.get(name, 0)
        if left <= 0:
            continue
        count = min(left, size - at)
        if count <= 0:
            break
        found.append((name, at, count))
        at += count
    return found


def _stage3(checkpoint: Checkpoint, tag: str, shapes: list[dict[str, tuple[int, ...]]],
            by_rank: dict[int, tuple[Archive, dict[str, Any]]]) -> None:
    """Piece r of every parameter lies one after the other in rank r's flat vectors."""
    world = max(max(by_rank) + 1, checkpoint.meta.layout.get("dp", 0))
    order = [(name, shape) for group in shapes for name, shape in group.items()]
    for dp, (archive, state) in sorted(by_rank.items()):
        flats = _flats(state.get("fp32_flat_groups"))
        states = _base_states(state)
        runs: dict[str, list[tuple[Chunk | None, TensorRef]]] = {"master": []}
        for index, ref in enumerate(flats):
            runs["master"].append((chunk_of(checkpoint, archive, ref, name=f"{tag}subgroup {index}", rank=dp), ref))
            for key, held in (states[index] if index < len(states) else {}).items():
                if isinstance(held, TensorRef) and held.shape == ():
                    add_tensor(checkpoint, archive, held, f"optimizer.{tag}group.{index}.{key}", dp)
                elif isinstance(held, TensorRef) and key in _MOMENTS:
                    runs.setdefault(key, []).append(
                        (chunk_of(checkpoint, archive, held, name=f"{tag}subgroup {index}.{key}", rank=dp), held))
        for key, run in runs.items():
            sub, at = 0, 0
            for name, shape in order:
                part = -(-elements(shape) // world)
                while sub < len(run) and at >= elements(run[sub][1].shape):
                    sub, at = sub + 1, 0
                if sub >= len(run):
                    break
                chunk, ref = run[sub]
                if chunk is not None:
                    label = f"optimizer.state.{tag}{name}.{'fp32' if key == 'master' else key}"
                    _piece(checkpoint, label, ref.dtype, shape, None, chunk, dp, world, at)
                at += part


def _piece(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...], role: Role | None, whole: Chunk,
           rank: int, world: int, start: int) -> None:
    """Piece `rank` of `world` of a flattened tensor, from element `start` of `whole` on; padding is left out."""
    size: int = elements(shape)
    part = -(-size // world)
    first, last = min(rank * part, size), min((rank + 1) * part, size)
    if last > first:
        _put(checkpoint, name, shape, whole, (first, last), start, dtype, role)


def _put(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], whole: Chunk, flat: tuple[int, int], start: int,
         dtype: str, role: Role | None = None) -> None:
    """One more flat piece of the tensor `name`."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        tensor = checkpoint.tensors[name] = annotate(Tensor(name, dtype, shape))
        tensor.role = role or tensor.role
    bytes_each = width(dtype)
    if whole.begin + (start + flat[1] - flat[0]) * bytes_each > whole.begin + whole.nbytes:
        checkpoint.problem("sizes", f"{name}: its piece in {whole.file} reaches beyond the partition", file=whole.file,
                           tensor=name, byte_range=whole.byte_range)
        return
    tensor.chunks.append(flat_chunk(whole, shape, flat, start, bytes_each))


def _experts(checkpoint: Checkpoint, place: Place) -> None:
    """One file per expert of a layer, and per expert rank where experts have optimizer files of their own."""
    layers: dict[tuple[int, int], dict[int, str]] = {}
    for name in sorted(place.names):
        match = _EXPERT.match(name)
        if match is not None:
            layers.setdefault((int(match["layer"] or 0), int(match["mp"])), {})[int(match["id"])] = name
            archive = _opened(checkpoint, name)
            for key, ref in archive.value.items() if archive is not None else ():
                if archive is not None and isinstance(ref, TensorRef):
                    tensor = add_tensor(checkpoint, archive, ref, str(key))
                    if tensor is not None and tensor.copies:
                        checkpoint.problem("names are unique", f"{key} is in {name} and in {tensor.chunks[0].file}",
                                           file=name, tensor=str(key))
        elif (match := _EXPP.match(name)) is not None:
            archive = _opened(checkpoint, name)
            if archive is not None:
                add_tree(checkpoint, archive, archive.value, f"optimizer.expp_rank_{match['rank']}", int(match["rank"]))
    count = max((max(ids) + 1 for ids in layers.values()), default=0)
    for ids in layers.values():
        for missing in sorted(set(range(count)) - ids.keys()):
            near = next(iter(ids.values()))
            checkpoint.expected.add(re.sub(r"expert_\d+_", f"expert_{missing}_", near, count=1))
