"""Blocks of convolution, norm and activation, and how a fused one is compared with torch's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from gradstow.layers._fused import FusedSequential
from numerics.layers.judge import error, gradients

CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
ACTS: dict[str, Any] = {
    "none": lambda: [],
    "relu": lambda: [nn.ReLU(inplace=True)],
    "leaky": lambda: [nn.LeakyReLU(0.1)],
    "relu6": lambda: [nn.ReLU6()],
    "silu": lambda: [nn.SiLU(inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "gelu": lambda: [nn.GELU()],
}
NORMS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"eps": 1e-3, "momentum": 0.3},
]
SPREAD = torch.linspace(0.5, 1.5, 6)


def block(n: int = 2, act: str = "relu", norm: Any = None, conv: Any = None, channels: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    norm_layer = NORM[n](6, **(norm or {}))
    if norm_layer.affine:
        nn.init.uniform_(norm_layer.weight, 0.5, 1.5)
        nn.init.uniform_(norm_layer.bias, -1, 1)
    options = {"kernel_size": 3, "padding": 1} | (conv or {})
    first = [] if conv == "without" else [CONV[n](channels, 6, **options)]
    return nn.Sequential(*first, norm_layer, *ACTS[act]())


def bare(act: str = "relu", **norm: Any) -> nn.Sequential:
    """A norm and an activation."""
    return nn.Sequential(*list(block(act=act, norm=norm))[1:])


def fused(plain: nn.Sequential, keep: str = "input", **attributes: Any) -> Any:
    """The same modules' copies with the lean class."""
    lean: Any = copy.deepcopy(plain)
    lean.__class__ = FusedSequential
    lean.keep = keep
    for name, value in attributes.items():
        setattr(lean, name, value)
    return lean


def images(n: int = 2, batch: tuple[int, ...] = (3,), channels: int = 4, size: int = 5, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, channels, *(size + i for i in range(n)), generator=generator).requires_grad_()


def step(model: Any, x: torch.Tensor, run: Any = None) -> dict[str, torch.Tensor | None]:
    """Output, every gradient and every buffer after one training step."""
    model.zero_grad()
    output, (for_x,) = gradients(run or model, [x])
    named = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {"output": output, "input": for_x, **named, **{n: b.clone() for n, b in model.named_buffers()}}


def assert_equal(lean: Any, plain: Any, x: torch.Tensor, run: Any = None) -> None:
    found, right = step(lean, x, run), step(plain, x)
    assert found.keys() == right.keys()
    for name, two in right.items():
        one = found[name]
        assert (one is None) == (two is None), name
        if one is not None and two is not None:
            assert one.dtype == two.dtype, name
            assert torch.equal(one, two), (name, float((one - two).abs().max()))


def assert_within(lean: Any, plain: Any, x: torch.Tensor, ratio: float) -> None:
    """Error against float64 at most ``ratio`` times torch's own, with the rounding of one number as the least."""
    exact = step(copy.deepcopy(plain).double(), x.detach().double().requires_grad_(x.requires_grad))
    found, right = step(lean, x), step(plain, x)
    for name, three in exact.items():
        one, two = found[name], right[name]
        assert (one is None) == (two is None), name
        if one is None or two is None or three is None or not one.numel() or not one.is_floating_point():
            continue
        least = torch.finfo(one.dtype).eps / 2
        if name == "gradient of 0.bias":  # zeros, but for rounding
            torch.testing.assert_close(one, two, atol=1e-4, rtol=0)
        else:
            assert error(one, three) <= ratio * max(error(two, three), least), (
                name,
                error(one, three),
                error(two, three),
            )
