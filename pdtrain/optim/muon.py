"""Muon for hidden matrices: momentum, made orthogonal by Newton-Schulz iterations; AdamW for the rest.

    momentum_buffer <- lerp(momentum_buffer, gradient, 1 - momentum)
    update          <- orthogonalised(lerp(gradient, momentum_buffer, momentum))       Nesterov's; scale does not matter
    weight          <- weight x (1 - lr x weight decay) - lr x 0.2 sqrt(max(m, n)) x update              for an m x n

Jordan et al. 2024 (kellerjordan.github.io/posts/muon): iteration and coefficients. Liu et al. 2025 (Moonlight, arXiv
2502.16982, 2.2): weight decay, and the factor that gives an update AdamW's usual RMS, so that lr and weight decay
carry over. torch.optim.Muon does the same to whole 2-D tensors, in BF16 alone, which CPUs multiply tens of times
slower than FP32; here experts come as stacks and matrices as shards.

Everything but the iteration works on each element alone, on whatever shard a rank holds. The iteration needs the whole
matrix. Expert stacks change hands inside their group, so that each rank iterates some experts; other matrices are
gathered, and each rank of the group iterates them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pdtrain.model.moe import local

MOMENTUM = "momentum_buffer"  # as torch.optim.Muon calls it
#: Of the quintic, steep at zero; and how often it is applied.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7
#: RMS of AdamW's updates as usually seen (Moonlight, 2.2).
ADAMW_RMS = 0.2


def direction(gradient: Tensor, buffer: Tensor, momentum: float) -> Tensor:
    """What is to be made orthogonal; moves `buffer`. Element by element: shards give the shards of the whole."""
    buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp(buffer, momentum)


def orthogonalised(matrix: Tensor) -> Tensor:
    """[m, n], or each of a stack [e, m, n], with singular values near 1 (about 0.7 to 1.2), FP32.

    One matrix at a time: the bits of one do not depend on which others a rank has. BF16 on GPUs, FP32 on CPUs.
    """
    if matrix.ndim == 3:
        made = torch.empty_like(matrix, memory_format=torch.contiguous_format)
        for number in range(len(matrix)):
            made[number] = orthogonalised(matrix[number])
        return made
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x.clone(memory_format=torch.contiguous_format)
    x /= x.norm().clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).float().contiguous()


def apply(weight: Tensor, update: Tensor, shape: Iterable[int], lr: float, weight_decay: float) -> None:
    """Move `weight`, a shard of a weight of `shape`, by its part of the orthogonalised `update`."""
    *_, rows, columns = shape
    weight.mul_(1 - lr * weight_decay)
    weight.add_(update, alpha=-lr * ADAMW_RMS * math.sqrt(max(rows, columns)))


class MuonAdamW(torch.optim.Optimizer):
    """Groups with `muon` true by Muon, the others by `adamw`, which shares groups and state with this optimizer.

    `found_inf`, where set, is 1 when the step is to leave everything as it is, as with torch's fused optimizers.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, adamw: Callable[[list[dict[str, Any]]], torch.optim.AdamW]
    ) -> None:
        super().__init__(groups, {"lr": lr})
        rest = [group for group in self.param_groups if not group["muon"]]
        self.adamw = adamw(rest) if rest else None
        if self.adamw is not None:
            self.adamw.state = self.state
        self._groups = {p: group for group in self.param_groups if group["muon"] for p in group["params"]}
        self.directions: dict[Tensor, Tensor] = {}
        self._whole: dict[Tensor, Gather | Exchange | None] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; collective over the groups that shard the matrices."""
        self.step_elements()
        for parameter, group in self._groups.items():
            if parameter.grad is not None:
                self._step_matrix(parameter, group)

    def step_elements(self) -> None:
        """What needs no whole matrix: AdamW's part."""
        if self.adamw is not None:
            self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()

    def takes(self, parameter: Tensor) -> bool:
        """Whether `parameter` is Muon's."""
        return parameter in self._groups

    @torch.no_grad()
    def step_apart(self) -> None:
        """For shards whose matrices are put together elsewhere: everything up to their `directions`; then `move`."""
        self.step_elements()
        for parameter, group in self._groups.items():
            assert parameter.grad is not None
            buffer = self.state[parameter][MOMENTUM]
            self.directions[parameter] = direction(parameter.grad, buffer, group["momentum"])

    @torch.no_grad()
    def move(self, parameter: Tensor, update: Tensor, shape: Iterable[int]) -> None:
        """Apply `update`, the part of the orthogonalised directions that belongs to this shard of `shape`."""
        group = self._groups[parameter]
        apply(parameter, update, shape, group["lr"], group["weight_decay"])
        self.state[parameter]["step"] += 1
        del self.directions[parameter]

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        held = self.state[parameter]
        if not held:
            held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            held[MOMENTUM] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        assert parameter.grad is not None
        weight, gradient, buffer = local(parameter), local(parameter.grad), local(held[MOMENTUM])
        wrong = None if self.found_inf is None else self.found_inf.to(weight.device) > 0
        if wrong is not None:  # decided on the device: nobody waits for it
            gradient = torch.where(wrong, buffer, gradient)
        if parameter not in self._whole:
            self._whole[parameter] = whole_matrices(parameter)
        whole, update = self._whole[parameter], direction(gradient, buffer, group["momentum"])
        update = orthogonalised(update) if whole is None else whole.part(orthogonalised(whole(update)))
        before = weight.clone() if wrong is not None else weight
        apply(weight, update, parameter.shape, group["lr"], group["weight_decay"])
        if wrong is not None:
            weight.copy_(torch.where(wrong, before, weight))
        held["step"] += 1 if wrong is None else 1 - wrong.to(held["step"].dtype)


class Gather:
    """From a rank's shard of a matrix to the whole, and back to its shard."""

    def __init__(self, parameter: DTensor) -> None:
        """Axis by axis, the last one that was split first: DTensor itself warns where two axes split one dimension."""
        mesh, placements = parameter.device_mesh, parameter.placements
        self.stages: list[tuple[DeviceMesh, Shard, torch.Size]] = []
        shape = parameter.shape
        for axis in reversed(range(mesh.ndim)):
            if placements[axis].is_replicate():
                continue
            one = _axis(mesh, axis)
            cut = Shard(placements[axis].dim)  # type: ignore[attr-defined]
            self.stages.insert(0, (one, cut, shape))
            shape = torch.Size(compute_local_shape_and_global_offset(shape, one, [cut])[0])
        held, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        self.window = tuple(slice(start, start + size) for start, size in zip(offset, held, strict=True))

    def __call__(self, shard: Tensor) -> Tensor:
        """[m, n]; collective over the ranks that share the matrix."""
        for mesh, cut, shape in self.stages:
            spread = DTensor.from_local(shard, mesh, [cut], run_check=False, shape=shape, stride=(shape[1], 1))
            shard = spread.redistribute(placements=[Replicate()]).to_local()
        return shard

    def part(self, whole: Tensor) -> Tensor:
        """This rank's shard."""
        return whole[self.window].contiguous()


class Exchange:
    """From a rank's rows of all experts [e, h / g, f] to all rows of some experts, and back. Must divide: h by g."""

    def __init__(self, parameter: DTensor, axis: int) -> None:
        mesh = _axis(parameter.device_mesh, axis)
        self.group = mesh.get_group()
        self.size, self.experts, columns = mesh.size(), local(parameter).shape[0], parameter.shape[2]
        self.rows = parameter.shape[1] // self.size
        share = [len(part) for part in torch.arange(self.experts).tensor_split(self.size)]
        self.mine = share[mesh.get_local_rank()]
        self.there = [count * self.rows * columns for count in share]
        self.here = [self.mine * self.rows * columns] * self.size

    def __call__(self, shard: Tensor) -> Tensor:
        """[experts iterated here, h, f]; collective over the group."""
        arrived = self._swap(shard, self.there, self.here).view(self.size, self.mine, self.rows, -1)
        return arrived.transpose(0, 1).reshape(self.mine, self.size * self.rows, arrived.shape[-1])

    def part(self, whole: Tensor) -> Tensor:
        """This rank's rows of all experts; collective over the group."""
        leaving = whole.view(self.mine, self.size, self.rows, -1).transpose(0, 1)
        return self._swap(leaving, self.here, self.there).view(self.experts, self.rows, leaving.shape[-1])

    def _swap(self, tensor: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        out = tensor.new_empty(sum(arriving))
        dist.all_to_all_single(out, tensor.contiguous().view(-1), arriving, leaving, group=self.group)
        return out


def whole_matrices(parameter: Tensor) -> Gather | Exchange | None:
    """How the matrices of `parameter` are put together; None: this rank holds them whole."""
    if not isinstance(parameter, DTensor):
        return None
    cut = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if parameter.ndim == 2:
        return Gather(parameter) if cut else None
    cut = [axis for axis in cut if parameter.placements[axis].is_shard(1)]  # what is split by expert is whole
    return Exchange(parameter, cut[0]) if cut else None


def _axis(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axis]]  # type: ignore[index]
