"""Hugging Face safetensors: an 8-byte little-endian header length, a JSON header, then the bytes, tiled exactly.

One file, or several with `model.safetensors.index.json` {metadata: {total_size}, weight_map: {tensor: file}}; names of
shards are anything. torch's writer of the same (DCP_SHARDING_INFO in `__metadata__`) may spread one tensor over files
`shard-SSSSS-model-IIIII-of-NNNNN.safetensors`. FP8 weights and their block scales are kept as the tensors they are.

Quirks of public files that are read all the same: `total_size` missing, or absurd; an index that is two JSON documents
glued together; `consolidated.safetensors` beside sharded files (the index, else the sharded group, is what counts).
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from diag.checkpoints.canonical import Checkpoint, Chunk, Container, Tensor
from diag.checkpoints.dtypes import DTYPES, SAFETENSORS
from diag.checkpoints.naming import annotate
from diag.checkpoints.steps import step_of_name
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "safetensors"
SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
#: The limit of the safetensors library itself.
MAX_HEADER = 100_000_000
#: More than any model: such a total was made by joining texts.
ABSURD_BYTES = 1 << 60
_OF = re.compile(r"^(?:shard-\d+-)?(?P<stem>.*?)-?(?P<n>\d{4,6})-of-(?P<all>\d{4,6})\.")
_FOLDERS = ("", "sharded/")
#: What the Hugging Face Trainer and accelerate save beside the weights, each a file of torch.save.
_STATE = "trainer_state.json"
_BESIDE = re.compile(r"(?:optimizer|scheduler|scaler)(?:_\d+)?\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|training_args\.bin")


def sniff(place: Place) -> bool:
    if place.file:
        return place.file.endswith((SUFFIX, INDEX)) or looks_like_header(place.head(place.file, 64))
    return any(name.endswith((SUFFIX, INDEX)) for name in place.names)


def looks_like_header(head: bytes) -> bool:
    """Whether a file begins with a plausible length and a JSON object."""
    return len(head) > 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MAX_HEADER


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when no header can be read and no index names one."""
    checkpoint = Checkpoint(place.inside, NAME, committed=None)
    checkpoint.meta.framework = "transformers"
    checkpoint.meta.step = step_of_name(place.folder.name)
    indexed = _index(checkpoint, place)
    present = {name for name in place.names if name.endswith(SUFFIX)}
    if place.file and not place.file.endswith(INDEX):
        present = {place.file}
    chosen = indexed.keys() if indexed else _group(checkpoint, present)
    checkpoint.files |= present if indexed or place.file else set(chosen)
    pieces: dict[str, list[tuple[Tensor, Chunk]]] = {}
    for file in sorted(chosen):
        checkpoint.expected.add(file)
        if checkpoint.folder.size(file) is None:
            continue
        if _read_file(checkpoint, file, indexed.get(file), pieces) is False and len(chosen) == 1:
            raise ArtefactError(checkpoint.problems[-1].text)
    for tensors in pieces.values():
        _assemble(checkpoint, tensors)
    _missing_numbers(checkpoint, set(chosen))
    if not place.file:
        _read_beside(checkpoint, place)
    for file, tensors_of in indexed.items():
        if checkpoint.folder.size(file) is None:
            for name in tensors_of:  # the index names them: their places stay unknown, their names count for experts
                if name not in checkpoint.tensors:
                    checkpoint.tensors[name] = annotate(Tensor(name, "", ()))
    return checkpoint


# -- the index ----------------------------------------------------------------------------------------------------


def _index(checkpoint: Checkpoint, place: Place) -> dict[str, set[str]]:
    """file -> the tensors that the index says are in it; empty without an index."""
    names = sorted(name for name in place.names if name.endswith(INDEX))
    if place.file and not place.file.endswith(INDEX):
        return {}
    if not names:
        return {}
    name = "model" + INDEX if "model" + INDEX in names else names[0]
    checkpoint.files.add(name)
    weight_map, metadata = parse_index(checkpoint, name)
    total = metadata.get("total_size")
    if isinstance(total, (int, float)) and not 0 <= total < ABSURD_BYTES:
        checkpoint.problem("index", f"{name} claims a total_size of {total:.3g} bytes, which is no model's", file=name,
                           severity="warning")
    by_file: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            checkpoint.problem("index", f"{name} names no file for {tensor}", file=name, tensor=tensor)
            continue
        try:
            by_file.setdefault(checkpoint.folder.inside(file), set()).add(tensor)
        except ArtefactError as error:
            checkpoint.problem("paths stay inside", f"{name} {error}", file=name, tensor=tensor)
    return by_file


def parse_index(checkpoint: Checkpoint, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weight_map, metadata) of an index file; what is wrong with its JSON is a problem. Raises `ArtefactError`."""
    try:
        text = checkpoint.folder.bytes(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtefactError(f"{name}: is damaged at byte {error.start:,}: no UTF-8 text") from None
    doubled: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            doubled.extend(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return made

    decoder = json.JSONDecoder(object_pairs_hook=pairs)
    try:
        value, end = decoder.raw_decode(text.lstrip())
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{name}: is damaged: {error}") from None
    rest = text.lstrip()[end:].strip()
    if rest:
        at = len(text) - len(text.lstrip()) + end
        checkpoint.problem(
            "index", f"{name} is not one JSON document: {len(rest):,} more characters follow the first at character "
            f"{at:,}{'; they begin another document' if rest.startswith('{') else ''}; loaders refuse it. The first "
            "document was used here", file=name, byte_range=(at, len(text)))
    for key in doubled:
        checkpoint.problem("names are unique", f"{name} names {key} twice", file=name, tensor=key)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict):
        raise ArtefactError(f"{name}: has no weight_map; it is no index of a sharded checkpoint")
    metadata = value.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _group(checkpoint: Checkpoint, present: set[str]) -> set[str]:
    """Without an index: the files that belong together; others in the folder are another copy of the model."""
    groups: dict[str, set[str]] = {}
    for name in present:
        match = _OF.match(name)
        groups.setdefault(match["stem"] if match else name.removesuffix(SUFFIX), set()).add(name)
    if len(groups) <= 1 or not any(stem in ("model", "consolidated") for stem in groups):
        return present
    return groups.get("model") or groups["consolidated"]


def _missing_numbers(checkpoint: Checkpoint, chosen: set[str]) -> None:
    """`-00002-of-00004` without its sisters: a shard that no index names."""
    stems: dict[tuple[str, int], set[int]] = {}
    example: dict[tuple[str, int], str] = {}
    for name in chosen:
        match = _OF.match(name)
        if match:
            key = (match["stem"], int(match["all"]))
            stems.setdefault(key, set()).add(int(match["n"]))
            example[key] = name
    for (_, count), numbers in stems.items():
        first = 0 if 0 in numbers else 1
        if count > 1_000_000:
            continue
        for number in sorted(set(range(first, count + first)) - numbers):
            match = _OF.match(example[_, count])
            assert match is not None
            name = example[_, count]
            name = name[: match.start("n")] + f"{number:0{len(match['n'])}d}" + name[match.end("n") :]
            if checkpoint.folder.size(name) is None:
                checkpoint.expected.add(name)


def _read_beside(checkpoint: Checkpoint, place: Place) -> None:
    """Optimizer, scheduler and RNG files: archives, CRC32 and what their pickles ask for. Their states are numbered
    and nothing here says which parameter is which, so they are not matched to the weights."""
    from diag.checkpoints.torch_zip import OLD_FORMAT, open_archive

    if place.has(_STATE):
        checkpoint.files.add(_STATE)
        try:
            step = json.loads(checkpoint.folder.bytes(_STATE))["global_step"]
            if checkpoint.meta.step is None and type(step) is int:
                checkpoint.meta.step = step
        except (ArtefactError, ValueError, KeyError, TypeError, RecursionError):
            checkpoint.problem("metadata", f"{_STATE} is damaged: the Trainer cannot resume by it", file=_STATE)
    for name in sorted(n for n in place.names if _BESIDE.fullmatch(n)):
        size = checkpoint.folder.size(name)
        if size is None or place.head(name, 16).startswith(OLD_FORMAT[:16]):
            checkpoint.unread.append(name)
            continue
        container = Container(name, 0, size, "zip")
        checkpoint.files.add(name)
        checkpoint.expected.add(name)
        try:
            open_archive(checkpoint.folder, container)
        except ArtefactError as error:
            hostile = "hostile" in str(error)
            checkpoint.problem("nothing to execute" if hostile else "archives", str(error), file=name,
                               byte_range=(0, size), cause="ckpt_hostile" if hostile else "ckpt_corrupt")
            continue
        checkpoint.containers.append(container)
        if name.startswith("optimizer"):
            checkpoint.not_applicable["optimizer complete"] = checkpoint.not_applicable["moments"] = \
                f"{name} numbers its states; which parameter is which is not recorded (archive and CRC32 are checked)"


# -- one file -----------------------------------------------------------------------------------------------------


def _read_file(checkpoint: Checkpoint, file: str, indexed: set[str] | None,
               pieces: dict[str, list[tuple[Tensor, Chunk]]]) -> bool:
    """Tensors of one file into `pieces`; False when its header cannot be used."""
    size = checkpoint.folder.size(file) or 0
    container = Container(file, 0, size, "safetensors")
    try:
        header, begin, doubled = parse_header(checkpoint.folder.map(file))
    except ArtefactError as error:
        cause = "ckpt_missing_shard" if "LFS" in str(error) else "ckpt_corrupt"
        what = str(error).removeprefix(f"{file}: ")
        checkpoint.problem("headers", f"{file}: {what}", file=file, byte_range=(0, min(size, 8)), cause=cause)
        return False
    for name in doubled:
        checkpoint.problem("names are unique", f"{file} names {name} twice in its header", file=file, tensor=name)
    checkpoint.containers.append(container)
    metadata = header.pop("__metadata__", None)
    offsets_of = _saved_offsets(checkpoint, file, metadata)
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        parsed = _entry(checkpoint, file, name, entry)
        if parsed is None:
            continue
        dtype, shape, first, last = parsed
        spans.append((first, last, name))
        expected = DTYPES[dtype].nbytes(math.prod(shape))
        where = (begin + first, begin + last)
        if expected != last - first:
            checkpoint.problem("sizes", f"{name} in {file} is {dtype}{list(shape)}, {expected:,} bytes, and has "
                               f"{last - first:,}", file=file, tensor=name, byte_range=where)
        if begin + last > size:
            checkpoint.problem("byte ranges", f"{name} in {file} should end at byte {begin + last:,}; the file ends "
                               f"at {size:,}: it is cut", file=file, tensor=name, byte_range=where)
        start = offsets_of.get(name, (0,) * len(shape))
        if len(start) != len(shape):
            checkpoint.problem("chunks tile", f"{name} in {file} has {len(shape)} axes and {len(start)} saved offsets",
                               file=file, tensor=name, byte_range=where)
            start = (0,) * len(shape)
        chunk = Chunk(start, shape, container, begin + first, last - first)
        pieces.setdefault(name, []).append((annotate(Tensor(name, dtype, shape)), chunk))
    _tile(checkpoint, file, begin, size, spans)
    if indexed is not None:
        for name in sorted(indexed - header.keys()):
            checkpoint.problem("index", f"the index says that {name} is in {file}; it is not", file=file, tensor=name,
                               cause="ckpt_missing_keys")
        for name in sorted(header.keys() - indexed):
            checkpoint.problem("index", f"{file} holds {name}, which the index does not name there: loaders by index "
                               "skip it", file=file, tensor=name)
    return True


def parse_header(data: memoryview) -> tuple[dict[str, Any], int, list[str]]:
    """(header, where the bytes begin, names that occur twice). Raises `ArtefactError`."""
    head = bytes(data[:8])
    if bytes(data[:23]) == b"version https://git-lfs":
        raise ArtefactError("is a Git LFS pointer, not the file; run git lfs pull")
    if len(head) < 8:
        raise ArtefactError(f"is cut: {len(data):,} bytes are no safetensors file")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER or 8 + length > len(data):
        raise ArtefactError(f"its header should be {length:,} bytes long and the file has {len(data):,}: it is cut, or "
                            "its first eight bytes are damaged")
    doubled: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            doubled.extend(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return made

    try:
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"its header is damaged: {error}") from None
    if not isinstance(header, dict):
        raise ArtefactError("its header is damaged: it is no JSON object")
    return header, 8 + length, doubled


def _entry(checkpoint: Checkpoint, file: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int] | None:
    """(dtype, shape, first byte, last byte + 1) of a header entry, None when it makes no sense."""
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = SAFETENSORS.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
        if dtype is None:
            checkpoint.problem("element types", f"{name} in {file} is of the unknown type {entry['dtype']!r}",
                               file=file, tensor=name)
            return None
        numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and all(
            type(n) is int and 0 <= n < 1 << 63 for n in (*shape, *offsets))
        if numbers and offsets[0] <= offsets[1]:
            return dtype, tuple(shape), offsets[0], offsets[1]
    checkpoint.problem("headers", f"the entry of {name} in the header of {file} is damaged", file=file, tensor=name)
    return None


def _tile(checkpoint: Checkpoint, file: str, begin: int, size: int, spans: list[tuple[int, int, str]]) -> None:
    """The spans must follow each other without gap or overlap to the end of the file."""
    at = 0
    for first, last, name in sorted(spans):
        if first != at:
            what = f"overlaps the tensor before it by {at - first:,} bytes" if first < at else \
                f"leaves {first - at:,} bytes before it to nobody"
            checkpoint.problem("byte ranges", f"{name} in {file} {what}", file=file, tensor=name,
                               byte_range=(begin + first, begin + last))
        at = max(at, last)
    if begin + at < size:
        checkpoint.problem("byte ranges", f"{file} has {size - begin - at:,} bytes after its last tensor", file=file,
                           byte_range=(begin + at, size))


def _saved_offsets(checkpoint: Checkpoint, file: str, metadata: Any) -> dict[str, tuple[int, ...]]:
    """Where in the global tensors the pieces of this file belong (torch's distributed writer)."""
    text = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        return {name: tuple(int(n) for n in item["saved_offsets"]) for name, item in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        checkpoint.problem("headers", f"{file}: its DCP_SHARDING_INFO is damaged", file=file)
        return {}


def _assemble(checkpoint: Checkpoint, pieces: list[tuple[Tensor, Chunk]]) -> None:
    """One tensor of its pieces: of several files when they carry offsets, else a second one is a duplicate."""
    tensor, first = pieces[0]
    tensor.chunks.append(first)
    for other, chunk in pieces[1:]:
        if chunk.offsets == first.offsets:
            checkpoint.add(tensor)
            other.chunks.append(chunk)
            checkpoint.add(other)
            return
        if other.dtype != tensor.dtype:
            checkpoint.problem("element types", f"{tensor.name} is {tensor.dtype} in {first.file} and {other.dtype} in "
                               f"{chunk.file}", file=chunk.file, tensor=tensor.name, byte_range=chunk.byte_range)
        tensor.chunks.append(chunk)
    if len(pieces) > 1:
        tensor.shape = tuple(max(c.offsets[d] + c.sizes[d] for c in tensor.chunks) for d in range(len(tensor.shape)))
        annotate(tensor)
    checkpoint.add(tensor)
