"""Megatron's `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` (+ `distrib_optim.pt`), one folder per model-parallel rank.

Weights of the ranks are put together: which axis tensor parallelism splits is not recorded and comes from the names
(`SPLIT`), gated linear_fc1 holds a part of each half, layers and local experts are renumbered over pipeline and expert
ranks. A name that no rule covers and that is equal on all ranks is a copy, else it keeps its rank in the name.
Optimizer states are kept as they lie, by index. No commit mark but the tracker beside. Format 3.0 is read; from its
description and look-alikes, not from a Megatron run here.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from diag.checkpoints.canonical import Checkpoint, Chunk, Tensor
from diag.checkpoints.formats.megatron_dist import _args
from diag.checkpoints.formats.pickled import add_tensor, add_tree, attributes, chunk_of, number, open_file, width
from diag.checkpoints.naming import annotate
from diag.checkpoints.steps import step_of_name
from diag.checkpoints.torch_pickle import TensorRef
from diag.checkpoints.torch_zip import Archive, walk
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "megatron_legacy"
_FOLDER = re.compile(r"^mp_rank_(?P<tp>\d{2,})(?:_(?P<a>\d{3,}))?(?:_(?P<b>\d{3,}))?$")
MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
#: (pattern of a name, axis that tensor parallelism splits); Megatron-LM's ColumnParallelLinear and RowParallelLinear.
SPLIT: tuple[tuple[re.Pattern[str], int], ...] = tuple((re.compile(pattern), axis) for pattern, axis in (
    (r"word_embeddings(?:_for_head)?\.weight$|output_layer\.weight$|lm_head\.weight$", 0),
    (r"(?:linear_qkv|query_key_value|query|key_value)\.(?:weight|bias)$", 0),
    (r"(?:linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.(?:weight|bias)$", 0),
    (r"(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*$", 0),
    (r"(?:linear_proj|linear_fc2|dense_4h_to_h|self_attention\.dense|attention\.dense)\.weight\d*$", 1),
))
_GATED = re.compile(r"(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*$")
_LAYER = re.compile(r"(?P<head>(?:^|\.)layers\.)(?P<n>\d+)(?P<tail>\.)")
_LOCAL = re.compile(r"(?P<head>\.local_experts\.|\.experts\.linear_fc\d\.(?:weight|bias))(?P<n>\d+)(?P<tail>\.|$)")


def sniff(place: Place) -> bool:
    return any(_FOLDER.match(name) and (place.folder / name).is_dir() for name in place.names)


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when no rank's file can be opened."""
    checkpoint = Checkpoint(place.inside, NAME, committed=None)
    checkpoint.not_applicable["commit mark"] = "the mark is the tracker file beside the folder"
    checkpoint.meta.framework, checkpoint.meta.step = "megatron", step_of_name(place.folder.name)
    folders = {name: m for name in sorted(place.names) if (m := _FOLDER.match(name)) and (place.folder / name).is_dir()}
    archives = {name: archive for name in folders if (archive := open_file(checkpoint, f"{name}/{MODEL}")) is not None
                and isinstance(archive.value, dict)}
    if not archives:
        raise ArtefactError(checkpoint.problems[0].text if checkpoint.problems else f"no {MODEL} in it")
    degrees = _degrees(checkpoint, archives, folders)
    ranks = {name: _coordinates(match, degrees) for name, match in folders.items()}
    _expected(checkpoint, degrees, set(folders), any(checkpoint.folder.size(f"{n}/{OPTIMIZER}") for n in folders))
    offsets = _layer_offsets(archives, ranks, degrees)
    for name, archive in archives.items():
        tp, pp, ep = ranks[name]
        value = archive.value
        _own_rank(checkpoint, name, value, degrees, ranks[name])
        for key in [k for k in value if re.fullmatch(r"model\d*", str(k))]:
            for full, leaf in walk(value[key], "" if key == "model" else str(key)):
                if isinstance(leaf, TensorRef):
                    _place(checkpoint, archive, leaf, full, (tp, pp, ep), degrees, offsets)
        if "rng_state" in value:
            checkpoint.meta.rng.add(sorted(folders).index(name))
        rest = {k: v for k, v in value.items() if not re.fullmatch(r"model\d*", str(k)) and k != "args"}
        add_tree(checkpoint, archive, rest, name)
        if checkpoint.folder.size(f"{name}/{OPTIMIZER}") is not None:
            sharded = open_file(checkpoint, f"{name}/{OPTIMIZER}")
            if sharded is not None:
                add_tree(checkpoint, sharded, sharded.value, f"{name}.optimizer")
    for tensor in checkpoint.tensors.values():
        if tensor.name.startswith("mp_rank_") and tensor.fqn != tensor.name:  # "0", "1", ...: of this rank only
            tensor.fqn = f"{tensor.name.partition('.')[0]}.{tensor.fqn}"
        if "rng_state" in tensor.name or tensor.name.startswith("mp_rank_") and tensor.role == "parameter" \
                and not tensor.split_unknown:
            tensor.role = "state"
    return checkpoint


def _degrees(checkpoint: Checkpoint, archives: dict[str, Archive], folders: dict[str, re.Match[str]]) -> dict[str, int]:
    """tp, pp, ep as recorded, else as the folder names count them; iterations must agree."""
    steps: dict[str, int] = {}
    args: dict[str, Any] = {}
    for name, archive in archives.items():
        args = args or attributes(archive.value.get("args"))
        step = number(archive.value.get("iteration"))
        if step is not None:
            steps[name] = step
    _args(checkpoint, args)
    checkpoint.meta.version = str(next(iter(archives.values())).value.get("checkpoint_version", ""))
    if args and "iteration" in next(iter(archives.values())).value and checkpoint.meta.consumed is None:
        checkpoint.problem("loader state", "the arguments have no consumed_train_samples: the position in the data is "
                           "lost", file=f"{next(iter(archives))}/{MODEL}", tensor="consumed_train_samples",
                           cause="ckpt_incomplete")
    usual = max(set(steps.values()), key=list(steps.values()).count, default=None)
    for name, step in steps.items():
        if step != usual or (checkpoint.meta.step is not None and step != checkpoint.meta.step):
            other = usual if step != usual else checkpoint.meta.step
            checkpoint.problem("steps equal", f"{name}/{MODEL} is of iteration {step:,}, the checkpoint of "
                                              f"{other:,}: steps "
                               "are mixed", file=f"{name}/{MODEL}", tensor="iteration", cause="ckpt_bad_values")
    checkpoint.meta.step = usual if usual is not None else checkpoint.meta.step
    layout = checkpoint.meta.layout
    found = {"tp": 1 + max(int(m["tp"]) for m in folders.values())}
    numbers_a = 1 + max(int(m["a"] or 0) for m in folders.values())
    numbers_b = 1 + max(int(m["b"] or 0) for m in folders.values())
    both = any(m["b"] is not None for m in folders.values())
    pipeline = layout.get("pp", 1) > 1 or (both and "ep" not in layout)
    found["pp"] = numbers_a if both or pipeline else layout.get("pp", 1)
    found["ep"] = numbers_b if both else layout.get("ep", 1) if pipeline else numbers_a
    return {axis: max(1, layout.get(axis, found[axis])) for axis in ("tp", "pp", "ep")}


def _coordinates(match: re.Match[str], degrees: dict[str, int]) -> tuple[int, int, int]:
    """(tp, pp, ep) of a folder: one number after tp is pp when there is a pipeline, else ep."""
    a, b = int(match["a"] or 0), int(match["b"] or 0)
    if match["b"] is not None:
        return int(match["tp"]), a, b
    return (int(match["tp"]), a, 0) if degrees["pp"] > 1 or degrees["ep"] == 1 else (int(match["tp"]), 0, a)


def _expected(checkpoint: Checkpoint, degrees: dict[str, int], there: set[str], optimizer: bool) -> None:
    for tp in range(degrees["tp"]):
        for pp in range(degrees["pp"]):
            for ep in range(degrees["ep"]):
                name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if degrees["pp"] > 1 else "") + (
                    f"_{ep:03d}" if degrees["ep"] > 1 else "")
                if name not in there and degrees["pp"] == 1 and f"mp_rank_{tp:02d}_000" in there:
                    name = f"mp_rank_{tp:02d}_000"
                checkpoint.expected.add(f"{name}/{MODEL}")
                if optimizer:
                    checkpoint.expected.add(f"{name}/{OPTIMIZER}")
    for name in there:
        if f"{name}/{MODEL}" not in checkpoint.expected:
            continue
    wanted = {file.partition("/")[0] for file in checkpoint.expected}
    sizes = degrees["tp"] * degrees["pp"] * degrees["ep"]
    for name in sorted(there):
        match = _FOLDER.match(name)
        if match is None:
            continue
        tp, pp, ep = _coordinates(match, degrees)
        if tp >= degrees["tp"] or pp >= degrees["pp"] or ep >= degrees["ep"] or len(wanted) > sizes:
            checkpoint.expected -= {f"{name}/{MODEL}", f"{name}/{OPTIMIZER}"}
            checkpoint.problem("no stale shards", f"{name} is of a rank that the recorded degrees (tp "
                                                  f"{degrees['tp']}, pp "
                               f"{degrees['pp']}, ep {degrees['ep']}) do not have: it is of another, larger save",
                               file=f"{name}/{MODEL}", cause="ckpt_stale_shards", severity="warning")


def _layer_offsets(archives: dict[str, Archive], ranks: dict[str, tuple[int, int, int]],
                   degrees: dict[str, int]) -> list[int]:
    """First global layer of each pipeline stage, from how many layers the stages before it hold."""
    counts = [0] * degrees["pp"]
    for name, archive in archives.items():
        pp = ranks[name][1]
        if pp < len(counts):
            found = [int(m["n"]) for full, leaf in walk(archive.value.get("model") or {})
                     if isinstance(leaf, TensorRef) and (m := _LAYER.search(full))]
            counts[pp] = max(counts[pp], 1 + max(found, default=-1))
    return [sum(counts[:stage]) for stage in range(degrees["pp"])]


def _own_rank(checkpoint: Checkpoint, name: str, value: dict[str, Any], degrees: dict[str, int],
              where: tuple[int, int, int]) -> None:
    """The rank that the saved arguments name must be one that writes this folder (tensor ranks vary fastest)."""
    args = attributes(value.get("args"))
    rank = number(args.get("rank"))
    if rank is None:
        return
    found = {"tensor": (rank % degrees["tp"], where[0])}
    if number(args.get("context_parallel_size")) in (None, 1) and number(args.get("expert_tensor_parallel_size")) in (
            None, degrees["tp"]):
        found["expert"] = ((rank // degrees["tp"]) % degrees["ep"], where[2])
    for axis, (own, there) in found.items():
        if own != there:
            checkpoint.problem("ranks agree", f"{name}/{MODEL} was saved by rank {rank}, {axis}-parallel rank {own}, "
                               f"and lies where {there} belongs: folders are swapped", file=f"{name}/{MODEL}",
                               tensor=name)


def _place(checkpoint: Checkpoint, archive: Archive, ref: TensorRef, name: str, where: tuple[int, int, int],
           degrees: dict[str, int], offsets: list[int]) -> None:
    """One tensor of one rank into the global one."""
    tp, pp, ep = where
    if tp >= degrees["tp"] or pp >= degrees["pp"] or ep >= degrees["ep"]:
        return
    if (match := _LAYER.search(name)) is not None and offsets[pp]:
        name = f"{name[: match.start('n')]}{int(match['n']) + offsets[pp]}{name[match.end('n'):]}"
    if (match := _LOCAL.search(name)) is not None and degrees["ep"] > 1:
        total = number(checkpoint.meta.args.get("num_experts"))
        local = total // degrees["ep"] if total else _locals(archive)
        name = f"{name[: match.start('n')]}{int(match['n']) + ep * local}{name[match.end('n'):]}"
    rule = next((axis for pattern, axis in SPLIT if pattern.search(name)), None)
    if rule is None or degrees["tp"] == 1 or rule >= len(ref.shape):
        tensor = add_tensor(checkpoint, archive, ref, name, tp)
        if tensor is not None:
            tensor.expert = tensor.expert if (m := _LOCAL.search(name)) is None else int(m["n"])
        return
    whole = chunk_of(checkpoint, archive, ref, name=name, rank=tp)
    if whole is None:
        return
    shape = tuple(n * degrees["tp"] if axis == rule else n for axis, n in enumerate(ref.shape))
    gated = bool(_GATED.search(name)) and bool(checkpoint.meta.args.get("swiglu")
                                               or checkpoint.meta.args.get("gated_linear_unit"))
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        tensor = checkpoint.tensors[name] = annotate(Tensor(name, ref.dtype, shape))
        if (match := _LOCAL.search(name)) is not None:
            tensor.expert = int(match["n"])
    elif tensor.shape != shape or tensor.dtype != ref.dtype:
        checkpoint.problem("ranks agree", f"{name} is {ref.dtype}{list(ref.shape)} in {whole.file}, and makes another "
                           f"whole than {tensor.dtype}{list(tensor.shape)}", file=whole.file, tensor=name,
                           byte_range=whole.byte_range)
        return
    for chunk in _halves(whole, ref, rule, tp, degrees["tp"]) if gated else [_moved(whole, rule, tp)]:
        (tensor.copies if any(c.key == chunk.key for c in tensor.chunks) else tensor.chunks).append(chunk)


def _moved(whole: Chunk, axis: int, tp: int) -> Chunk:
    whole.offsets = tuple(tp * n if d == axis else 0 for d, n in enumerate(whole.sizes))
    return whole


def _halves(whole: Chunk, ref: TensorRef, axis: int, tp: int, size: int) -> list[Chunk]:
    """Gate and up halves of a gated linear_fc1: the rank's tensor is [gate part; up part], the whole [gate; up]."""
    half, rest = ref.shape[0] // 2, ref.shape[1:]
    step: int = half * math.prod(rest) * width(ref.dtype)
    return [Chunk((part * half * size + tp * half, *(0,) * len(rest)), (half, *rest), whole.container,
                  whole.begin + part * step, step, None, None, tp) for part in (0, 1)]


def _locals(archive: Archive) -> int:
    """Local experts in one file."""
    found = [int(m["n"]) for full, _ in walk(archive.value.get("model") or {}) if (m := _LOCAL.search(full))]
    return 1 + max(found, default=-1)
