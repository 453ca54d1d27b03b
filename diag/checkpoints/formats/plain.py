"""Plain torch.save files: a `.pt`, `.pth`, `.bin` or `.ckpt`, or Hugging Face's `pytorch_model-*.bin` with an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.formats.pickled import add_tree, number, open_file
from diag.checkpoints.formats.safetensors import _missing_numbers, parse_index
from diag.checkpoints.steps import step_of_name
from diag.checkpoints.torch_zip import LFS_POINTER, OLD_FORMAT
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "plain"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX = ".bin.index.json"


def sniff(place: Place) -> bool:
    if place.file:
        head = place.head(place.file, 64)
        return head.startswith((b"PK\x03\x04", OLD_FORMAT[:8], LFS_POINTER)) or place.file.endswith((*SUFFIXES, INDEX))
    return any(name.endswith((*SUFFIXES, INDEX)) for name in place.names)


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when no file can be opened."""
    checkpoint = Checkpoint(place.inside, NAME, committed=None)
    checkpoint.meta.step = step_of_name(place.folder.name)
    index = next((n for n in sorted(place.names) if n.endswith(INDEX)), None)
    wanted: dict[str, set[str]] = {}
    if index is not None:
        checkpoint.files.add(index)
        weight_map, metadata = parse_index(checkpoint, index)
        total = metadata.get("total_size")
        if isinstance(total, (int, float)) and not 0 <= total < 1 << 60:
            checkpoint.problem("index", f"{index} claims a total_size of {total:.3g} bytes, which is no model's",
                               file=index, severity="warning")
        for tensor, file in weight_map.items():
            try:
                wanted.setdefault(checkpoint.folder.inside(str(file)), set()).add(tensor)
            except ArtefactError as error:
                checkpoint.problem("paths stay inside", f"{index} {error}", file=index, tensor=tensor)
    if wanted:
        checkpoint.files |= {n for n in place.names if n.endswith(".bin") and n != "training_args.bin"}
    names = sorted(wanted) or sorted(n for n in place.names if n.endswith(SUFFIXES) or n == place.file)
    opened = 0
    for name in names:
        archive = open_file(checkpoint, name)
        if archive is None:
            continue
        opened += 1
        before = set(checkpoint.tensors)
        alone = len(names) == 1 or bool(wanted)
        add_tree(checkpoint, archive, archive.value, "" if alone else name.rpartition(".")[0])
        held = set(checkpoint.tensors) - before
        for tensor in sorted(wanted.get(name, set()) - held - before):
            checkpoint.problem("index", f"the index says that {tensor} is in {name}; it is not", file=name,
                               tensor=tensor, cause="ckpt_missing_keys")
    _missing_numbers(checkpoint, set(names))
    if not opened and not wanted:
        raise ArtefactError(checkpoint.problems[0].text if checkpoint.problems else "no file of it can be opened")
    for twice in checkpoint.tensors.values():
        if twice.copies and wanted:
            checkpoint.problem("names are unique", f"{twice.name} is in {twice.chunks[0].file} and in "
                               f"{twice.copies[0].file}", file=twice.copies[0].file, tensor=twice.name)
    for key in ("step", "global_step", "iteration", "epoch"):
        item = checkpoint.items.get(key)
        if item is not None and checkpoint.meta.step is None and key != "epoch":
            checkpoint.meta.step = number(item.value)
    for name in (*checkpoint.items, *checkpoint.tensors):
        if "rng" in name.lower():
            checkpoint.meta.rng.add(0)
    return checkpoint
