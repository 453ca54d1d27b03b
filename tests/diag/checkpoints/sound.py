"""Sound checkpoints of every format, small, written by the real libraries where they are here, else by description.

`FORMATS` maps a name to a function `(folder) -> path to give to verify`. Real: torch DCP, safetensors,
torch.save. By description: DeepSpeed, universal, legacy Megatron (their real twins are in test_peers.py), OLMo's tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

EXPERTS, LAYERS, HIDDEN, FFN = 4, 3, 64, 96


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """A MoE with an expert per tensor, three layers, large enough for a page inside a matrix."""
    torch.manual_seed(seed)
    found = {"embed.weight": torch.randn(40, HIDDEN)}
    for layer in range(LAYERS):
        found[f"layers.{layer}.attn.wq.weight"] = torch.randn(HIDDEN, 48)
        found[f"layers.{layer}.norm.weight"] = torch.ones(HIDDEN)
        for expert in range(EXPERTS):
            found[f"layers.{layer}.moe.experts.{expert}.w1.weight"] = torch.randn(FFN, HIDDEN)
    return {name: value.to(dtype) for name, value in found.items()}


def optimizer(params: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in params.items():
        found[f"state.{name}.exp_avg"] = torch.randn(value.shape)
        found[f"state.{name}.exp_avg_sq"] = torch.rand(value.shape)
        found[f"state.{name}.step"] = torch.tensor(100.0)
    return found


def titan(root: Path) -> Path:
    """torch DCP in torchtitan's form: two files, optimizer, loader and RNG states of two ranks."""
    params = weights()
    folder = root / "step-100"
    state: dict[str, Any] = {
        **params, "optimizer": optimizer(params), "train_state": {"step": 100},
        "dataloader": {f"dp_rank_{r}": torch.arange(r + 3) for r in range(2)},
    }
    writer = dcp.FileSystemWriter(folder, thread_count=2)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return folder


def stacked(root: Path) -> Path:
    """torch DCP with the experts of a layer in one tensor, BF16, no optimizer."""
    torch.manual_seed(1)
    state = {f"layers.{n}.moe.experts.w1": torch.randn(EXPERTS, FFN, HIDDEN).bfloat16() for n in range(LAYERS)}
    state |= {f"layers.{n}.attn.weight": torch.randn(HIDDEN, HIDDEN).bfloat16() for n in range(LAYERS)}
    folder = root / "step_7"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
    return folder


def single(root: Path) -> Path:
    """One safetensors file."""
    save_file({f"model.{k}": v for k, v in weights(torch.bfloat16).items()}, root / "model.safetensors",
              metadata={"format": "pt"})
    return root


def sharded(root: Path) -> Path:
    """Three safetensors files with an index and digests in integrity.json."""
    params = list(weights(torch.bfloat16).items())
    weight_map, total = {}, 0
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = dict(params[shard::3])
        save_file(part, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(v.nbytes for v in part.values())
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    seal(root)
    return root


def seal(root: Path) -> None:
    """Megatron's integrity.json over every file of the folder."""
    files = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(root.iterdir()) if f.is_file()}
    (root / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))


def fp8(root: Path) -> Path:
    """FP8 weights with block scales, as DeepSeek-V3 is published."""
    torch.manual_seed(2)
    held = {}
    for layer in range(LAYERS):
        held[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(512, HIDDEN).to(torch.float8_e4m3fn)
        held[f"model.layers.{layer}.mlp.up_proj.weight_scale_inv"] = torch.rand(1, 1) + 0.1
    save_file(held, root / "model.safetensors")
    return root


def plain(root: Path) -> Path:
    """One torch.save file with model, AdamW state and RNG."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, 48), torch.nn.Linear(48, 8))
    adam = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, HIDDEN)).square().sum().backward()
    adam.step()
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "rng": torch.get_rng_state(), "step": 1},
               root / "last.pt")
    return root


def bins(root: Path) -> Path:
    """Hugging Face's sharded .bin files."""
    params = list(weights(torch.bfloat16).items())
    weight_map = {}
    for shard in range(2):
        file = f"pytorch_model-{shard + 1:05d}-of-00002.bin"
        part = dict(params[shard::2])
        torch.save(part, root / file)
        weight_map |= dict.fromkeys(part, file)
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


@contextmanager
def foreign(name: str) -> Iterator[type]:
    """A class that only the trainer has, in modules made up for the time of one pickle."""
    module_name, _, class_name = name.rpartition(".")
    parts = module_name.split(".")
    made_up = {".".join(parts[: n + 1]): types.ModuleType(".".join(parts[: n + 1])) for n in range(len(parts))}
    made = type(class_name, (), {"__module__": module_name})
    setattr(made_up[module_name], class_name, made)
    held = {key: sys.modules.get(key) for key in made_up}
    sys.modules.update(made_up)
    try:
        yield made
    finally:
        for key, module in held.items():
            if module is None:
                del sys.modules[key]
            else:
                sys.modules[key] = module


def zero2(root: Path) -> Path:
    """DeepSpeed ZeRO-2 over two ranks, one parameter group, a tracker beside."""
    folder = root / "global_step100"
    folder.mkdir()
    params = {k: v for k, v in weights(torch.bfloat16).items() if "experts" not in k}
    shapes = OrderedDict((k, v.shape) for k, v in params.items())
    torch.save({
        "module": OrderedDict(params), "buffer_names": [], "optimizer": None, "param_shapes": [shapes],
        "global_steps": 100, "global_samples": 800, "dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.19.8",
        "ds_config": {}, "frozen_param_shapes": None, "frozen_param_fragments": None,
    }, folder / "mp_rank_00_model_states.pt")
    flat = torch.cat([v.float().flatten() for v in params.values()])
    padded = torch.cat([flat, torch.zeros(flat.numel() % 2)])
    torch.manual_seed(4)
    moments = [torch.randn(padded.numel()), torch.rand(padded.numel())]
    with foreign("deepspeed.utils.tensor_fragment.fragment_address") as address:
        _zero2_ranks(folder, params, padded, flat.numel(), moments, address)
    (root / "latest").write_text("global_step100")
    return root


def _zero2_ranks(folder: Path, params: dict[str, Tensor], padded: Tensor, size: int, moments: list[Tensor],
                 address: type) -> None:
    half = padded.numel() // 2
    for rank in range(2):
        begin, end = rank * half, min((rank + 1) * half, size)
        mapping, at = OrderedDict(), 0
        for name, value in params.items():
            first, last = max(at, begin), min(at + value.numel(), end)
            if first < last:
                mapping[name] = address()
                mapping[name].__dict__.update(numel=last - first, start=first - begin)
            at += value.numel()
        torch.save({"optimizer_state_dict": {
            "zero_stage": 2, "partition_count": [2], "group_paddings": [0], "param_slice_mappings": [mapping],
            "single_partition_of_fp32_groups": [padded[begin:end].clone()],
            "base_optimizer_state": {"state": {0: {
                "step": torch.tensor(100.0), "exp_avg": moments[0][rank * half : (rank + 1) * half].clone(),
                "exp_avg_sq": moments[1][rank * half : (rank + 1) * half].clone()}}, "param_groups": [{"lr": 0.1}]},
        }}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def zero3(root: Path) -> Path:
    """DeepSpeed ZeRO-3 over two ranks; odd sizes, so the last pieces are padded."""
    folder = root / "global_step100"
    folder.mkdir()
    torch.manual_seed(5)
    params = {"a.weight": torch.randn(33, 5), "b.weight": torch.randn(7, 3), "b.bias": torch.randn(3)}
    shapes = [OrderedDict((k, v.shape) for k, v in params.items())]
    for rank in range(2):
        pieces, moments = [], []
        for value in params.values():
            part = -(-value.numel() // 2)
            flat = torch.cat([value.flatten(), torch.zeros(2 * part - value.numel())])
            pieces.append(flat[rank * part : (rank + 1) * part])
            moments.append(torch.rand(part) + 0.1)
        torch.save({"module": OrderedDict((k, torch.empty(0)) for k in params), "buffer_names": [], "optimizer": None,
                    "param_shapes": shapes, "global_steps": 100, "dp_world_size": 2, "mp_world_size": 1},
                   folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": {
            "zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.cat(pieces)],
            "optimizer_state_dict": {"state": {0: {"step": torch.tensor(100.0), "exp_avg": torch.cat(moments),
                                                   "exp_avg_sq": torch.cat(moments)}}, "param_groups": []}}},
                   folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step100")
    return root


def universal(root: Path) -> Path:
    """DeepSpeed universal."""
    folder = root / "global_step100_universal"
    params = weights()
    torch.manual_seed(6)
    for name, value in params.items():
        below = folder / "zero" / name
        below.mkdir(parents=True)
        torch.save({"param": value, "cat_dim": 0}, below / "fp32.pt")
        torch.save({"param": torch.randn(value.shape), "cat_dim": 0}, below / "exp_avg.pt")
        torch.save({"param": torch.rand(value.shape), "cat_dim": 0}, below / "exp_avg_sq.pt")
        torch.save(torch.tensor(100.0), below / "step.pt")
    torch.save({"global_steps": 100, "param_shapes": [OrderedDict((k, v.shape) for k, v in params.items())],
                "buffer_names": [], "module": OrderedDict((k, v.bfloat16()) for k, v in params.items())},
               folder / "mp_rank_00_model_states.pt")
    (root / "latest_universal").write_text("global_step100_universal")
    return root


def legacy(root: Path) -> Path:
    """Megatron's mp_rank folders: TP 2, EP 2, two layers, a gated MoE."""
    torch.manual_seed(7)
    folder = root / "iter_0000100"
    whole = {f"decoder.layers.{n}.self_attention.linear_qkv.weight": torch.randn(96, HIDDEN) for n in range(2)}
    norm = {f"decoder.layers.{n}.input_layernorm.weight": torch.ones(HIDDEN) for n in range(2)}
    router = {f"decoder.layers.{n}.mlp.router.weight": torch.randn(EXPERTS, HIDDEN) for n in range(2)}
    experts = {(n, e): torch.randn(2 * FFN, HIDDEN) for n in range(2) for e in range(EXPERTS)}
    for tp in range(2):
        for ep in range(2):
            model: dict[str, Tensor] = {k: v[tp * 48 : tp * 48 + 48].clone() for k, v in whole.items()}
            model |= {k: v.clone() for k, v in (*norm.items(), *router.items())}
            for (layer, expert), value in experts.items():
                if expert // 2 == ep:
                    gate, up = value.chunk(2)
                    part = torch.cat([gate[tp * 48 : tp * 48 + 48], up[tp * 48 : tp * 48 + 48]])
                    model[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert % 2}.linear_fc1.weight"] = part
            here = folder / f"mp_rank_{tp:02d}_{ep:03d}"
            here.mkdir(parents=True)
            args = argparse.Namespace(
                tensor_model_parallel_size=2, pipeline_model_parallel_size=1, expert_model_parallel_size=2,
                num_experts=EXPERTS, swiglu=True, rank=ep * 2 + tp, world_size=4, consumed_train_samples=1600)
            states = {i: {"exp_avg": torch.randn(4, 8), "exp_avg_sq": torch.rand(4, 8)} for i in range(2)}
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 100, "model": model,
                        "optimizer": {"optimizer": {"state": states, "param_groups": [{"lr": 0.1}]}},
                        "rng_state": [{"torch_rng_state": torch.get_rng_state()}]}, here / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root


def olmo(root: Path) -> Path:
    """OLMo-core's tree around a DCP."""
    folder = root / "step100"
    params = weights()
    dcp.save({"model": params, "optim": optimizer(params)}, no_dist=True,
             storage_writer=dcp.FileSystemWriter(folder / "model_and_optim", thread_count=2))
    (folder / "train").mkdir()
    for rank in range(2):
        torch.save({"global_step": 100, "world_size": 2, "data_loader": {"tokens_processed": 10},
                    "rng": {"torch": torch.get_rng_state()}}, folder / "train" / f"rank{rank}.pt")
    (folder / ".metadata.json").write_text(json.dumps({"version": "0.1"}))
    return folder


def pdtrain(root: Path) -> Path:
    """This trainer's: two steps, the experts only in the first."""
    from pdtrain.checkpoint import manifest as files

    params = weights()
    everything = {**{f"model.{k}": v for k, v in params.items()},
                  **{k.replace("state.", "optimizer.", 1): v for k, v in optimizer(params).items()}}
    where = {"attention": "", "experts": ""}
    for step in (50, 100):
        state = {k: v.clone() for k, v in everything.items() if step == 50 or "experts" not in k}
        for key in state:
            if key.endswith(".step"):
                state[key] = torch.tensor(float(step))
        name = files.folder_name(step)
        where = {"attention": name, "experts": where["experts"] or name}
        temporary = root / f"{name}.tmp"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary, thread_count=2), no_dist=True)
        files.commit(temporary, root / name, files.Manifest(
            step=step, consumed=step * 8, rows=where, world=1, layout={"tp": 1}, model={}, data_fingerprint="x", seed=0,
            time=0.0))
    return root


FORMATS: dict[str, Callable[[Path], Path]] = {
    function.__name__: function for function in (
        titan, stacked, single, sharded, fp8, plain, bins, zero2, zero3, universal, legacy, olmo, pdtrain)
}


def make(name: str, root: Path) -> Path:
    """The checkpoint `name` below `root`, fresh."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    return FORMATS[name](root)
