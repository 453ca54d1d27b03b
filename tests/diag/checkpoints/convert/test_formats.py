"""Round trips through every target: the same tensors and states come back, bit for bit, and torch reads the files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diag.checkpoints.convert.reshard import Done, Options, Wish, reshard
from diag.errors import ArtefactError, UsageError
from tests.diag.checkpoints.convert.samples import EXPERTS, HIDDEN, mixtral, read_all, write_hf


def convert(source: Path, target: Path, to: str, *, names: str | None = None, skip: bool = False,
            weights_only: bool = False, facts: dict[str, int] | None = None, mappings: tuple[Path, ...] = (),
            from_names: str | None = None, **layout: int) -> Done:
    return reshard(Wish(source=source, destination=target, options=Options(to=to, **layout), names=names,
                        skip_unmapped=skip, weights_only=weights_only, facts=facts or {}, mappings=mappings,
                        from_names=from_names))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", mixtral())


def states(found: dict[str, tuple[str, tuple[int, ...], bytes]]) -> dict[str, tuple[str, bytes]]:
    """Without shapes of step counts: a scalar is one element."""
    return {name: (dtype, data) for name, (dtype, _, data) in found.items()}


@pytest.mark.parametrize("to, layout", [
    ("dcp", {"ranks": 1}), ("dcp", {"ranks": 5}), ("universal", {}), ("zero1", {"dp": 1}), ("zero2", {"dp": 3}),
    ("megatron", {"tp": 2, "ep": 2, "pp": 2}), ("megatron", {}),
])
def test_there_and_back_again(to: str, layout: dict[str, int], source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "there", to, **layout)
    convert(tmp_path / "there", tmp_path / "back", "hf", names="mixtral")
    wanted, got = states(read_all(source)), states(read_all(tmp_path / "back"))
    if to == "megatron":  # it wants a master beside FP32 weights; they are the same bytes
        masters = {n for n in got if n.endswith(".master")}
        assert all(got[n][1] == got[n.removeprefix("optimizer.state.").removesuffix(".master")][1] for n in masters)
        got = {n: v for n, v in got.items() if n not in masters}
    elif to.startswith("zero"):
        got = {n: v for n, v in got.items() if not n.endswith(".master")}
    assert got == wanted


def test_legacy_megatron_carries_the_weights_and_says_what_it_leaves(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "there", "megatron-legacy", tp=2, pp=2, ep=2)
    folders = {p.parent.name for p in (tmp_path / "there").rglob("*.pt")}
    assert folders == {f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in (0, 1) for p in (0, 1) for e in (0, 1)}
    assert any("optimizer's states" in text for text in done.plan.dropped)
    convert(tmp_path / "there", tmp_path / "back", "hf", names="mixtral")
    wanted = {n: v for n, v in read_all(source).items() if not n.startswith("optimizer.")}
    assert read_all(tmp_path / "back") == wanted


def test_sharded_files_and_their_index(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", "hf", shard=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = mixtral()
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "out" / file)[name], weights[name])
    sizes = {f: sum(w.nbytes for n, w in weights.items() if index["weight_map"][n] == f)
             for f in set(index["weight_map"].values())}
    assert max(sizes.values()) <= 4000 and len(sizes) > 3
    assert read_all(tmp_path / "out") == read_all(source)


def test_what_fusions_do_is_what_megatron_describes(source: Path, tmp_path: Path) -> None:
    """Not only there and back: the fused tensors themselves."""
    convert(source, tmp_path / "meg", "megatron", tp=2, weights_only=True)
    dtype, shape, data = read_all(tmp_path / "meg")["decoder.layers.self_attention.linear_qkv.weight"]
    weights = mixtral()
    assert shape == (2, 32, HIDDEN)
    fused = np.frombuffer(data, np.float32).reshape(shape)[1]
    q, k, v = (weights[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    groups = [np.concatenate([q[g * 8 : g * 8 + 8], k[g * 4 : g * 4 + 4], v[g * 4 : g * 4 + 4]]) for g in range(2)]
    assert np.array_equal(fused, np.concatenate(groups))
    _, shape, data = read_all(tmp_path / "meg")["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert shape == (2, EXPERTS, 16, HIDDEN)
    expert = np.frombuffer(data, np.float32).reshape(shape)[0, 3]
    gate, up = (weights[f"model.layers.0.block_sparse_moe.experts.3.{w}.weight"] for w in ("w1", "w3"))
    assert np.array_equal(expert, np.concatenate([gate, up]))


def test_two_families_that_name_alike_are_not_guessed(tmp_path: Path) -> None:
    names = {"tok_embeddings.weight": (8, 4), "norm.weight": (4,), "layers.0.attention.wq.weight": (8, 4),
             "layers.0.attention.wk.weight": (4, 4)}
    (tmp_path / "titan").mkdir()
    weights = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in names.items()}
    save_file(weights, tmp_path / "titan" / "model.safetensors")
    with pytest.raises(UsageError, match="those of torchtitan and of torchtitan-llama"):
        convert(tmp_path / "titan", tmp_path / "out", "dcp", names="mixtral")
    facts = {"heads": 2, "kv_heads": 1, "head_dim": 4}
    convert(tmp_path / "titan", tmp_path / "out", "hf", names="mixtral", from_names="torchtitan-llama", facts=facts)
    got = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    whole = weights["layers.0.attention.wq.weight"]
    # as transformers' converter of Llama weights: view(heads, dim / 2, 2, in).transpose(1, 2)
    assert np.array_equal(got, whole.reshape(2, 2, 2, 4).swapaxes(1, 2).reshape(8, 4))


def test_a_users_table_extends_a_family(source: Path, tmp_path: Path) -> None:
    weights = mixtral() | {"model.layers.0.extra.scale": np.ones(3, np.float32)}
    other = write_hf(tmp_path / "other", weights, optimizer=False)
    with pytest.raises(UsageError, match=r"no family knows all of its names, such as model\.layers\.0\.extra\.scale"):
        convert(other, tmp_path / "out", "dcp", names="pdtrain")
    tables = []
    for family, name in (("mixtral", "model.layers.{l}.extra.scale"), ("pdtrain", "blocks.{l}.extra")):
        tables.append(tmp_path / f"{family}.toml")
        tables[-1].write_text(f'family = "{family}"\n[[tensor]]\nname = "{name}"\nhub = "layer.{{l}}.extra"\n')
    convert(other, tmp_path / "out", "dcp", names="pdtrain", mappings=tuple(tables))
    assert read_all(tmp_path / "out")["model.blocks.0.extra"][2] == np.ones(3, np.float32).tobytes()
    done = convert(other, tmp_path / "less", "dcp", names="pdtrain", mappings=(tables[0],), skip=True)
    assert "model.layers.0.extra.scale: the family pdtrain has no name for it" in done.contents.dropped


@pytest.mark.parametrize("text, complaint", [
    ("family = 3", "needs family"), ("family = [", "is no TOML"),
    ('family = "x"\n[[tensor]]\nhub = "a"', "needs a name"),
    ('family = "x"\n[[tensor]]\nname = "a"\nhubs = "b"', "unknown key 'hubs'"),
    ('family = "x"\n[[tensor]]\nname = "a"\nhub = "b"\nhow = ["add"]', "how 'add' is not known"),
    ('family = "x"\n[[tensor]]\nname = "a"\nhub = ["b", "c"]', "how must say"),
])
def test_a_bad_table_is_one_line(text: str, complaint: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        convert(source, tmp_path / "out", "dcp", mappings=(tmp_path / "bad.toml",))


def test_no_arithmetic_where_only_arithmetic_would_do(source: Path, tmp_path: Path) -> None:
    half = write_hf(tmp_path / "half", mixtral(dtype=np.float16), optimizer=False)
    with pytest.raises(ArtefactError, match="is float16 and the source has no FP32 master"):
        convert(half, tmp_path / "out", "universal")
    convert(half, tmp_path / "out", "dcp", names="torchtitan")  # a dtype is no obstacle to copying
    assert {dtype for dtype, _, _ in read_all(tmp_path / "out").values()} == {"float16"}
    with pytest.raises(UsageError, match="--tp 3: does not divide"):
        convert(source, tmp_path / "tp3", "megatron-legacy", tp=3)
    with pytest.raises(UsageError, match="--ep: 4 of .* cannot be cut into 3"):
        convert(source, tmp_path / "ep3", "megatron", ep=3)
    with pytest.raises(UsageError, match="--pp 3: does not divide 2 layers"):
        convert(source, tmp_path / "pp3", "megatron", pp=3)
    (source / "config.json").unlink()
    with pytest.raises(UsageError, match="give --fact heads=N"):
        convert(source, tmp_path / "blind", "megatron")


def test_experts_of_different_age_are_not_stacked(source: Path, tmp_path: Path) -> None:
    path = source / "optimizer" / "optimizer.safetensors"
    held = load_file(path)
    held["optimizer.state.model.layers.0.block_sparse_moe.experts.2.w1.weight.step"] += 1
    save_file(held, path)
    with pytest.raises(ArtefactError, match="different numbers of optimizer steps"):
        convert(source, tmp_path / "out", "dcp", names="pdtrain")


def test_torch_reads_every_type_from_dcp_and_pt(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'train' is not installed")
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file as save_torch

    types = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
             torch.uint8, torch.bool, torch.float64)
    wanted = {f"x.{t}".replace("torch.", ""): torch.arange(24).reshape(4, 6).to(t) for t in types}
    wanted |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_torch(wanted, tmp_path / "all.safetensors")
    convert(tmp_path / "all.safetensors", tmp_path / "dcp", "dcp", ranks=2)
    got = {name: torch.empty_like(value) for name, value in wanted.items()}
    dcp.load(got, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name].view(torch.uint8) if value.dim() else got[name],
                                                              value.view(torch.uint8) if value.dim() else value), name
    convert(tmp_path / "dcp", tmp_path / "hf", "hf")
    from safetensors.torch import load_file as load_torch

    back = load_torch(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == wanted.keys() and all(back[n].dtype == wanted[n].dtype for n in wanted)


def test_torch_loads_the_archives_memory_mapped(source: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'train' is not installed")
    convert(source, tmp_path / "out", "universal")
    (folder,) = (p for p in (tmp_path / "out").iterdir() if p.is_dir())
    name = "model.layers.1.self_attn.k_proj.weight"
    for state, factor in (("fp32", 1.0), ("exp_avg", None)):
        held = torch.load(folder / "zero" / name / f"{state}.pt", weights_only=True, mmap=True)
        assert held["cat_dim"] == 0 and held["param"].is_contiguous()
        if factor:
            assert np.array_equal(held["param"].numpy(), mixtral()[name])
    assert torch.load(folder / "zero" / name / "step.pt", weights_only=True).item() == 7
