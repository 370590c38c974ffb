"""The tiled matrix product, through Triton's interpreter: one process for all of it, as it is switched on by import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

BODY = """
import itertools

import torch
from torch.nn import functional as F

from gradstow._errors import GradstowError
from gradstow._ops import above_bits, unpack_bits
from gradstow.layers.ops.triton import _matmul
from gradstow.layers.ops.triton._matmul import linear_relu

SMALL = {"rows": 16, "columns": 16, "inner": 16, "group": 2}


def made(m, n, k, dtype):
    torch.manual_seed(m + n + k)
    return [torch.randn(s).to(dtype) for s in ((m, k), (n, k), (n,))]


def check(x, w, b, relu=True, bits=True, tile=SMALL):
    result, code = linear_relu(x, w, b, relu=relu, bits=bits, tile=tile)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    exact = exact.relu() if relu else exact
    plain = F.linear(x.float(), w.float(), None if b is None else b.float())  # float32 sums
    plain = plain.relu() if relu else plain
    if x.dtype == torch.bfloat16:  # which the interpreter cuts off, where a GPU rounds
        plain = (plain.view(torch.int32) & -65536).view(torch.float32)
    plain = plain.to(x.dtype)
    assert result.dtype == x.dtype and result.is_contiguous()
    error, allowed = ((t.double() - exact).norm() for t in (result, plain))
    assert error <= 2 * allowed + 1e-12, (error, allowed)
    if bits:
        assert torch.equal(code, above_bits(result, 0.0))
        assert torch.equal(unpack_bits(code, result.shape, result.stride()), result > 0)
    else:
        assert code is None


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for m, n, k in ((16, 16, 16), (33, 24, 40), (5, 48, 7), (50, 19, 33), (1, 8, 1), (17, 3, 16)):
        check(*made(m, n, k, dtype))
x, w, b = made(33, 40, 20, torch.float32)
check(x, w, None)
check(x, w, b, relu=False, bits=False)
check(x, w, b, bits=False)
check(x.t().contiguous().t(), w.t().contiguous().t(), torch.stack([b, b], 1)[:, 0])
check(x[::2, ::2], w[:, ::2], b)
check(x[:1].expand(33, 20), w, b)
check(*made(70, 72, 40, torch.float32), tile=None)
check(*made(40, 40, 20, torch.float32), tile=SMALL | {"rows": 32, "columns": 64})

result, code = linear_relu(x[:0], w, b)
assert result.shape == (0, 40) and code.numel() == 0
result, code = linear_relu(x[:, :0], w[:, :0], b)
assert torch.equal(result, b.relu().expand(33, 40))

x[3, 4] = float("nan")  # which ReLU lets through, with its gradient
result, code = linear_relu(x, w, b, tile=SMALL)
assert result[3].isnan().all() and unpack_bits(code, result.shape, result.stride())[3].all()
assert torch.equal(code, above_bits(result, 0.0))

for wrong in ((x, w[:, :3], b), (x, w, b[:3]), (x, w.double(), b), (x[0], w, b), (x.double(), w.double(), b.double())):
    try:
        linear_relu(*wrong)
    except GradstowError as error:
        assert "linear_relu" in str(error)
    else:
        raise AssertionError(wrong)
try:
    linear_relu(x, w, b, relu=False)
except GradstowError as error:
    assert "bits" in str(error)
else:
    raise AssertionError("bits without ReLU")

real = _matmul.kernel


class Wrong:
    def __getitem__(self, grid):
        return lambda *args, **options: (real[grid](*args, **options), args[3][0, :2].add_(1e-3))


_matmul.kernel = Wrong()  # and a comparator that sees it
x, w, b = made(33, 24, 40, torch.float32)
try:
    check(x, w, b)
except AssertionError:
    print("all is well")
"""


def test_the_kernel_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BODY],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all is well"
