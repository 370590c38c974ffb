"""The Triton kernels of LayerNorm and of the linear cross entropy, on the CPU: run by Triton's interpreter, and
compiled for CUDA without running. Each in a process of its own: the interpreter is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from gradstow.layers.ops import triton as kernels

SHARED = """
import torch, torch.nn.functional as F
from gradstow.layers.ops import triton as kernels
from gradstow.layers.ops._cross_entropy import linear_cross_entropy
from gradstow.layers.ops._layer_norm import layer_norm
torch.manual_seed(0)

def near(found, exact, bound):
    error = float((found.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp_min(1e-300))
    assert error <= bound, (error, bound)

def ran(name):
    import importlib
    module = importlib.import_module("gradstow.layers.ops.triton." + name)
    seen, original = [], module.backward
    module.backward = lambda *given: (seen.append(name), original(*given))[1]
    return seen
"""

LAYER_NORM = """
seen = ran("_layer_norm")
# the interpreter cuts bfloat16 off instead of rounding
for dtype, bound in ((torch.float32, 2e-7), (torch.bfloat16, 5e-3)):
    for shape, last in (((19, 140), 1), ((3, 5, 4, 30), 2), ((2, 5000), 1), ((17, 1), 1)):
        given = [torch.randn(s).to(dtype).requires_grad_() for s in (shape, shape[-last:], shape[-last:])]
        exact = [t.detach().double().requires_grad_() for t in given]
        g = torch.randn(shape).to(dtype)
        right = F.layer_norm(exact[0], shape[-last:], *exact[1:])
        with kernels.using("layer_norm"):
            y = layer_norm(given[0], shape[-last:], *given[1:])
            gradients = torch.autograd.grad(y, given, g)
            alone = torch.autograd.grad(layer_norm(given[0], shape[-last:]), given[0], g)
        near(y, right, bound)
        if shape[-1] == 1:
            continue  # all of it is zero
        for found, expected in zip(gradients, torch.autograd.grad(right, exact, g.double())):
            assert found.dtype == dtype
            near(found, expected, 2 * bound)
        near(alone[0], torch.autograd.grad(F.layer_norm(exact[0], shape[-last:]), exact[0], g.double())[0], 2 * bound)
assert len(seen) == 16, seen
with kernels.using("layer_norm"):
    assert layer_norm(torch.randn(0, 4, requires_grad=True), (4,)).shape == (0, 4)
    run = torch.compile(lambda x: layer_norm(x, (8,)), backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 8, requires_grad=True)
    near(run(x), F.layer_norm(x.double(), (8,)), 2e-7)
"""

CROSS_ENTROPY = """
seen = ran("_cross_entropy")
# no bfloat16: the interpreter's product takes its bits for whole numbers
for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 1e-3)):
    for smoothing, weighted, when, bias in (
        (0.0, False, "backward", True), (0.1, True, "backward", False), (0.1, False, None, True)
    ):
        shapes = ((70, 40), (300, 40), (300,))[: 3 if bias else 2]
        given = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
        exact = [t.detach().double().requires_grad_() for t in given]
        target = torch.randint(0, 300, (70,))
        target[3::9] = -100
        options = dict(label_smoothing=smoothing, z_loss=0.01, class_weight=torch.rand(300) if weighted else None)

        def run(x, w, b=None, **more):
            return linear_cross_entropy(x, w, target, b, **options, **more)

        with kernels.using("cross_entropy"):
            loss = run(*given, when=when, chunk=33)
            gradients = torch.autograd.grad(loss, given)
        right = run(*exact)
        near(loss, right, bound)
        for found, expected in zip(gradients, torch.autograd.grad(right, exact)):
            near(found, expected, bound)
assert len(seen) == 6, seen
with kernels.using("cross_entropy"):
    # classes whose logits are all minus infinity in a whole part, and logits that overflow without a shift
    x, w, b = torch.ones(3, 4), torch.zeros(700, 4), torch.full((700,), float("-inf"))
    b[5:8] = torch.tensor([900.0, 901.0, 902.0])
    target = torch.tensor([5, 6, 7])
    found = linear_cross_entropy(x, w, target, b, reduction="none")
    near(found, F.cross_entropy(b.double().expand(3, -1), target, reduction="none"), 1e-6)
    assert linear_cross_entropy(x[:0], w, target[:0], b, reduction="sum") == 0
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gradstow.layers.ops.triton import _cross_entropy as cross_entropy, _layer_norm as layer_norm

short, wide = "*bf16", "*fp32"
types = dict.fromkeys(("x", "weight", "bias", "y", "g", "dx", "gradient"), short)
types |= {"target": "*i64", "eps": "fp32"}
whole = ("width", "rows", "each", "tokens", "classes", "x_row", "w_row", "w_column", "splits")
types |= dict.fromkeys(whole, "i32")
tiles = {"has_bias": True, "has_class_weight": True, "with_even": True}
tiles |= {"tile_tokens": 64, "tile_classes": 128, "step": 64}
norm = {"has_weight": True, "block": 1024}
for kernel, constants, product in (
    (layer_norm.forward_kernel, norm | {"has_bias": True}, False),
    (layer_norm.input_kernel, norm, False),
    (layer_norm.weight_kernel, {"tile_rows": 16, "tile_columns": 128}, False),
    (cross_entropy.forward_kernel, tiles, True),
    (cross_entropy.gradient_kernel, tiles, True),
):
    signature = {a: "constexpr" if a in constants else types.get(a, wide) for a in kernel.arg_names}
    places = {(kernel.arg_names.index(a),): v for a, v in constants.items()}
    code = triton.compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", 80, 32)).asm
    assert code["cubin"]
    assert ("mma.sync" in code["ptx"]) == product  # tensor cores
"""


def run(script: str, folder: Path, interpreted: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "1" if interpreted else "0"}
    environment["PYTHONPATH"] = str(Path(kernels.__file__).parents[4])
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("script", [LAYER_NORM, CROSS_ENTROPY], ids=["layer norm", "cross entropy"])
def test_interpreted(script: str, tmp_path: Path) -> None:
    found = run(SHARED + script, tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.slow
def test_compiled_for_cuda(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    found = run(COMPILE, tmp_path, interpreted=False)
    assert found.returncode == 0, found.stderr[-2000:]


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    found = run(SHARED + "near(torch.ones(3) + 1e-6, torch.ones(3).double(), 2e-7)", tmp_path)
    assert "AssertionError" in found.stderr


def test_no_kernel_runs_unasked() -> None:
    """Not on the CPU, and on CUDA none before a benchmark there has shown that it wins."""
    x = torch.randn(2, 3)
    assert not any(kernels.wanted(name, x) for name in kernels.NAMES)
    with kernels.using("layer_norm"):
        assert not kernels.wanted("layer_norm", x)
    with pytest.raises(ValueError, match="no kernels"), kernels.using("softmax"):
        pass


@pytest.mark.gpu
def test_on_cuda(device: torch.device) -> None:
    """The kernels against float64, on the device."""
    from gradstow.layers.ops._cross_entropy import linear_cross_entropy
    from gradstow.layers.ops._layer_norm import layer_norm

    def near(found: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
        assert float((found.double() - exact).norm() / exact.norm()) <= bound

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        x, w, b = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((500, 300), (300,), (300,)))
        exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
        g = torch.randn_like(x)
        right = torch.autograd.grad(F.layer_norm(exact[0], (300,), *exact[1:]), exact, g.double())
        with kernels.using("layer_norm"):
            found = torch.autograd.grad(layer_norm(x, (300,), w, b), (x, w, b), g)
        for one, two in zip(found, right, strict=True):
            near(one, two, bound)
        head = torch.randn(1000, 300, device=device).to(dtype).requires_grad_()
        target = torch.randint(0, 1000, (500,), device=device)
        loss = linear_cross_entropy(exact[0], head.double(), target)
        expected = torch.autograd.grad(loss, exact[0])[0]
        for names in ((), ("cross_entropy",)):
            for when in ("forward", "backward"):
                with kernels.using(*names):
                    loss = linear_cross_entropy(x, head, target, when=when)
                    near(torch.autograd.grad(loss, x)[0], expected, bound)
