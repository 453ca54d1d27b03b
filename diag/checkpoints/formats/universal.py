"""DeepSpeed universal: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, `*_model_states.pt`, `latest_universal`.

Each file holds {param, cat_dim?, vocab_tensor?, ...} or the bare tensor. Parameters are whole: no layout is left.
Versions seen: 0.14 to 0.19.8 (universal_checkpoint_info 0.2 to 0.4).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from diag.checkpoints.canonical import Checkpoint, Tensor
from diag.checkpoints.formats.pickled import add_tensor, add_tree, chunk_of, elements, number, open_file
from diag.checkpoints.naming import annotate
from diag.checkpoints.steps import step_of_name
from diag.checkpoints.torch_pickle import TensorRef
from diag.checkpoints.torch_zip import Archive
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "universal"
_STATES = ("fp32", "exp_avg", "exp_avg_sq", "step")


def sniff(place: Place) -> bool:
    below = place.folder / "zero"
    if "zero" not in place.names or not below.is_dir():
        return False
    return any((item / f"{state}.pt").is_file() for item in list(below.iterdir())[:50] for state in _STATES)


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when no file can be opened."""
    folder = place.inside
    checkpoint = Checkpoint(folder, NAME, committed=None)
    checkpoint.not_applicable["commit mark"] = "the mark is the file 'latest_universal' beside the folder"
    checkpoint.meta.framework = "deepspeed"
    checkpoint.meta.step = step_of_name(place.folder.name.removesuffix("_universal").removesuffix("-universal"))
    names = folder.names("zero")
    kinds: dict[str, set[str]] = {}
    for name in names:
        parameter, _, file = name.removeprefix("zero/").rpartition("/")
        state = file.removesuffix(".pt")
        if not parameter or not file.endswith(".pt"):
            if file.endswith(".pt"):
                _common(checkpoint, name)
            continue
        kinds.setdefault(parameter, set()).add(state)
        archive = open_file(checkpoint, name)
        if archive is None:
            continue
        value = archive.value.get("param") if isinstance(archive.value, dict) else archive.value
        key = f"optimizer.state.{parameter}.{state}"
        if isinstance(value, TensorRef):
            add_tensor(checkpoint, archive, value, key)
        elif state != "step":
            checkpoint.problem("metadata", f"{name} holds no tensor", file=name, tensor=key)
        elif isinstance(archive.value, dict):
            add_tree(checkpoint, archive, archive.value, key)
    buffers: set[str] = set()
    for name in sorted(place.names):
        if re.search(r"_model_states\.pt$", name):
            archive = open_file(checkpoint, name)
            if archive is not None and isinstance(archive.value, dict):
                step = number(archive.value.get("global_steps"))
                checkpoint.meta.step = step if step is not None else checkpoint.meta.step
                checkpoint.meta.consumed = number(archive.value.get("global_samples"))
                buffers |= set(archive.value.get("buffer_names") or ())
                _shapes(checkpoint, archive.value.get("param_shapes"), kinds)
                _rounded(checkpoint, archive)
    usual = {s for s in _STATES if sum(s in held for held in kinds.values()) * 2 > len(kinds)}
    for parameter in buffers & kinds.keys():
        for tensor in checkpoint.states_of(parameter).values():
            tensor.role = "buffer"
    for parameter, held in kinds.items():
        if parameter not in buffers:  # a converter that was told to guess puts buffers there too, without moments
            checkpoint.expected |= {f"zero/{parameter}/{state}.pt" for state in usual - held}
    if not checkpoint.containers:
        raise ArtefactError(checkpoint.problems[0].text if checkpoint.problems else "no file of it can be opened")
    return checkpoint


def _common(checkpoint: Checkpoint, name: str) -> None:
    """`zero/optimizer_state.pt`: what is not per parameter."""
    archive = open_file(checkpoint, name)
    if archive is not None:
        add_tree(checkpoint, archive, archive.value, "shared")


def _rounded(checkpoint: Checkpoint, archive: Archive) -> None:
    """The 16-bit weights that the converter copies with the model file: what they were rounded from is here."""
    module = archive.value.get("module")
    for name, ref in module.items() if isinstance(module, dict) else ():
        if isinstance(ref, TensorRef) and elements(ref.shape):
            chunk = chunk_of(checkpoint, archive, ref, name=str(name))
            if chunk is not None:
                tensor = annotate(Tensor(str(name), ref.dtype, ref.shape, [chunk]))
                checkpoint.rounded.setdefault(tensor.fqn, tensor)


def _shapes(checkpoint: Checkpoint, groups: object, kinds: dict[str, set[str]]) -> None:
    """Every parameter of the model file has a folder; of its shape, unless tensor parallelism split the model files."""
    alone = not any(re.search(r"mp_rank_0*[1-9]", n) for n in checkpoint.folder.names() if "/" not in n)
    for group in groups if isinstance(groups, list) else [groups]:
        for name, shape in group.items() if isinstance(group, dict) else ():
            if name not in kinds:
                checkpoint.expected.add(f"zero/{name}/fp32.pt")
                continue
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                held = checkpoint.tensors.get(f"optimizer.state.{name}.{state}")
                if held is None or not isinstance(shape, tuple) or held.shape == shape or not held.chunks:
                    continue
                if held.elements == math.prod(shape) and len(held.shape) == 1 and held.chunks[0].strides is None:
                    held.shape = held.chunks[0].sizes = shape  # converted from ZeRO-3: kept flat
                    held.chunks[0].offsets = (0,) * len(shape)
                elif alone:
                    checkpoint.problem("sizes", f"{held.name} is {list(held.shape)}, the model file says {list(shape)}",
                                       file=held.chunks[0].file, tensor=held.name, cause="ckpt_shape_mismatch",
                                       byte_range=held.chunks[0].byte_range)
