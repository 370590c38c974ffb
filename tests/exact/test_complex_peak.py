"""Complex numbers: the measured step peak is the planned one, with what kernels make of lazy conjugates inside them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradstow as gs
from gradstow._signature import decode, encode
from gradstow.cost import measure
from models import Case, measured_step


class Product(nn.Module):
    """A product with a complex weight, and what follows on it; returns the loss."""

    def __init__(self, follow: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.follow = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64)), follow

    def forward(self, x: Tensor) -> Tensor:
        result = self.follow(x @ self.weight, self.weight)
        return (result.real if result.is_complex() else result).square().mean()


def _batches(y: Tensor) -> Tensor:
    return y.view(4, 16, 32)


FOLLOW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda y, w: y @ w.mH,
    "mm twice": lambda y, w: (y.conj() @ w).conj() @ w.conj(),
    "bmm": lambda y, w: _batches(y) @ _batches(y).mH,
    "matmul": lambda y, w: _batches(y) @ w.mH @ _batches(y.conj() @ w.conj()).mT,
    "baddbmm": lambda y, w: torch.baddbmm(_batches(y)[:, :, :16], _batches(y), _batches(y.conj() @ w).mH),
    "addmm": lambda y, w: torch.addmm(w[0].conj(), y.conj(), w.conj()),
    "einsum": lambda y, w: torch.einsum("bi,ij->bj", y.conj(), w.conj()).tanh(),
    "convolution": lambda y, w: F.conv1d(y[None].mT, w[:, :, None].conj()),
    "elementwise": lambda y, w: y * y.conj() / (1 + y.mH.mT),
    "norm": lambda y, w: torch.linalg.vector_norm(y.conj(), dim=1),
    "abs": lambda y, w: (y @ w.mH).abs(),
    "angle": lambda y, w: y.conj().angle(),
    "fft": lambda y, w: torch.fft.ifft(torch.fft.fft(y.conj()).conj() * w[0]),
    "cat": lambda y, w: torch.cat([y.conj(), y.sgn()]),
    "negative": lambda y, w: torch.cumsum(y.conj().imag, 0) @ w.conj().imag,
}


@pytest.mark.parametrize("name", FOLLOW)
def test_the_peak_of_complex_models_is_predicted(name: str, device: str) -> None:
    case = Case(
        lambda: Product(FOLLOW[name]), lambda: (torch.randn(64, 32, dtype=torch.complex64),), lambda out, _batch: out
    )
    plain, batch = case.model(device), case.data(device)
    stowed = copy.deepcopy(plain)
    plan = gs.plan(stowed, batch[0], keep_output=False)
    gs.stow(stowed, plan=plan)
    peak = measured_step(case, stowed, batch, device)
    assert peak <= plan.predicted_step_peak_bytes <= 1.02 * peak
    for model in (plain, stowed):
        case.run(model, batch).backward()
    assert torch.equal(plain.weight.grad, stowed.weight.grad)


@pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag, lambda x: x.mH], ids=["conj", "neg", "mH"])
def test_the_signature_of_a_lazy_tensor_makes_it_again(lazy: Callable[[Tensor], Tensor]) -> None:
    x = lazy(torch.randn(4, 8, dtype=torch.complex64))

    def make(shape: list[int], stride: list[int], dtype: torch.dtype, device: str) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    _, (again,), _ = decode(encode("aten.abs.default", [x], {}), make)
    assert (again.is_conj(), again.is_neg()) == (x.is_conj(), x.is_neg())
    assert (again.shape, again.stride(), again.dtype) == (x.shape, x.stride(), x.dtype)


def test_what_an_op_makes_of_a_lazy_conjugate_is_its_working_memory(device: str) -> None:
    x = torch.randn(128, 128, dtype=torch.complex64, device=device)
    texts = [encode("aten.cumsum.default", [value, 0], {}) for value in (x, x.conj())]
    costs = measure(texts, device=device, limit_bytes=2**26).costs
    bare, lazy = (costs[text].working_bytes for text in texts)
    assert lazy - bare == x.nbytes
