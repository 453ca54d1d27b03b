"""Muon does to a matrix what torch's own does, to each expert by itself, and leaves everything alone when told so."""

from __future__ import annotations

import pytest
import torch

from pdtrain.optim import moments_of, optimizer_over, set_learning_rate
from pdtrain.optim.muon import orthogonalised
from tests.small_run import changed, small_run


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape) * 0.1) for shape in shapes]


def muon(rows: dict[str, list[torch.nn.Parameter]]):
    run = changed(small_run(), "optimizer", name="muon", weight_decay=0.1)
    made = optimizer_over(run, rows)
    set_learning_rate(made, 1e-2)
    return made


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]):
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape) * 1e-4))
    assert values.min() > 0.6 and values.max() < 1.3


def test_steps_follow_torchs_own_muon():
    """Within the BF16 in which torch iterates; RMS of an update as Moonlight wants it."""
    (ours,), (theirs,) = parameters((32, 48)), parameters((32, 48))
    peer = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    optimizer = muon({"attention": [ours]})
    before = ours.detach().clone()
    for step in range(4):
        torch.manual_seed(step)
        gradient = torch.randn(32, 48)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        peer.step()
        assert torch.allclose(
            optimizer.state[ours]["momentum_buffer"], peer.state[theirs]["momentum_buffer"], atol=1e-6
        )
    moved, wanted = ours.detach() - before, theirs.detach() - before
    assert (moved - wanted).norm() < 0.02 * wanted.norm()


def test_experts_are_matrices_of_their_own_and_other_weights_are_adamws():
    stack, one = parameters((3, 16, 24), (16, 24))
    with torch.no_grad():
        one.copy_(stack[1])
    router, norm = parameters((4, 8), (8,))
    optimizer = muon({"experts": [stack], "attention": [one], "router": [router], "norm": [norm]})
    gradients = torch.randn(3, 16, 24)
    stack.grad, one.grad = gradients.clone(), gradients[1].clone()
    router.grad, norm.grad = torch.randn(4, 8), torch.randn(8)
    optimizer.step()
    assert (one == stack[1]).all()
    moments = moments_of(optimizer)
    assert moments[stack] == moments[one] == ("momentum_buffer",)
    assert moments[router] == moments[norm] == ("exp_avg", "exp_avg_sq")
    assert {"exp_avg", "exp_avg_sq", "step"} == optimizer.state[norm].keys()


def test_a_step_that_is_left_out_changes_nothing():
    held, norm = parameters((8, 12), (8,))
    optimizer = muon({"attention": [held], "norm": [norm]})
    for left_out in (False, True):
        gradient = torch.randn(8, 12)
        if left_out:
            gradient[0, 0] = float("nan")
        held.grad, norm.grad = gradient, torch.randn(8)
        before = [held.detach().clone(), norm.detach().clone()]
        states = [value.clone() for p in (held, norm) for value in optimizer.state[p].values()]
        optimizer.found_inf = torch.tensor(float(left_out))
        optimizer.step()
        same = [bool((a == b).all()) for a, b in zip(before, (held, norm), strict=True)]
        assert same == [left_out] * 2
    after = [value for p in (held, norm) for value in optimizer.state[p].values()]
    assert all((a == b).all() for a, b in zip(states, after, strict=True))
