"""A8. Weights changed between forward and backward: an error as strict as plain PyTorch's, that names the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
from twins import data


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("stowed", [False, True])
def test_a_step_between_two_losses_of_one_forward(stowed: bool) -> None:
    net = gs.stow(model(), policy="recompute-all") if stowed else model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    output = net(data(4, 16))
    output.square().mean().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"parameter \d\.weight was changed" if stowed else "inplace operation"):
        output.abs().mean().backward()


@pytest.mark.parametrize("stowed", [False, True])
def test_a_generator_batch_for_both_players(stowed: bool) -> None:
    maker, judge = model(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if stowed:
        gs.stow(maker, policy="recompute-all")
        gs.stow(judge, policy="recompute-all")
    optimizer = torch.optim.SGD(judge.parameters(), 0.1)
    made = maker(data(4, 16))
    for_maker = judge(made).mean()
    judge(made.detach()).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="was changed" if stowed else "inplace operation"):
        for_maker.backward()


@pytest.mark.parametrize("stowed", [False, True])
def test_a_clamp_between_forward_and_backward(stowed: bool) -> None:
    net = gs.stow(model(), policy="recompute-all") if stowed else model()
    loss = net(data(4, 16)).square().mean()
    with torch.no_grad():
        net[2].weight.clamp_(-0.1, 0.1)
    with pytest.raises(RuntimeError, match=r"parameter 2\.weight was changed" if stowed else "inplace operation"):
        loss.backward()
