"""Ops that torch's tracer has Python formulas for run as eager's kernels, whose sums round otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twins
from gradstow.capture._backend import eagers_kernels

pytestmark = pytest.mark.usefixtures("guessed_costs")

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bilinear": lambda x: F.interpolate(x, size=(29, 31), mode="bilinear", align_corners=False),
    "bilinear, corners": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, size=(29, 31), mode="bicubic"),
    "smaller, smoothed": lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", antialias=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=3, mode="nearest"),
    "nearest exact": lambda x: F.interpolate(x, size=(29, 31), mode="nearest-exact"),
    "linear": lambda x: F.interpolate(x.flatten(2), size=100, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[:, None], size=(9, 17, 19), mode="trilinear"),
    "group norm of channels last": lambda x: F.group_norm(x.to(memory_format=torch.channels_last), 3).reshape(
        2, 54, 11
    ),
    "group norm, gradient of channels last": lambda x: (
        F.group_norm(x.reshape(2, 54, 11)[..., None].tanh(), 3).to(memory_format=torch.channels_last).sin()
    ),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "multi margin": lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([1, 3])),
    "multilabel margin": lambda x: F.multilabel_margin_loss(
        x.flatten(1)[:, :5], torch.tensor([[1, 3, -1, 0, 0], [2, -1, 0, 0, 0]])
    ),
}


# of these eager chooses the formula of the gradient by the data
BY_DATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product of rows": lambda x: x.prod(-1),
    "product of rows with zeros": lambda x: (x * (x > 0)).prod(1),
    "product": lambda x: torch.prod(x.flatten()[:40]),
}


class Around(nn.Module):
    """The op between two layers, read twice."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.op = nn.Conv2d(3, 6, 3), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.op(h.tanh() * 3) + self.op(h).mean()


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_torch_has_a_formula_for_is_equal(op: str) -> None:
    x = twins.data(2, 3, 11, 13)
    twins.assert_equal_twins(
        lambda: Around(OPS[op]), twins.steps(lambda model, _step: (model(x) * torch.pi).sin().square().mean())
    )


@pytest.mark.parametrize("op", BY_DATA)
def test_an_op_whose_gradient_depends_on_the_data_is_equal(op: str) -> None:
    x = twins.data(2, 3, 11, 13)
    twins.assert_equal_twins(
        lambda: Around(BY_DATA[op]), twins.steps(lambda model, _step: (model(x) * torch.pi).sin().square().mean())
    )


def test_the_formulas_come_back() -> None:
    op, key = torch.ops.aten.upsample_bilinear2d.vec, torch._C.DispatchKey.Autograd
    before = op.py_kernels[key]
    with eagers_kernels():
        assert key not in op.py_kernels
    assert op.py_kernels[key] is before
