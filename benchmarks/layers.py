"""Each lean layer against torch's own: bytes kept for the backward, peak, time of forward and backward, error.

    python benchmarks/layers.py                           # all, a few minutes; says on which device
    python benchmarks/layers.py --models "linear cross entropy" --rounds 3
    python benchmarks/layers.py --device cuda

Both run in one process, in turn; a ratio is the median of lean / torch with a 95 % interval. Kept bytes are counted
through ``saved_tensors_hooks``, without parameters and inputs. Peaks are of one forward and backward, above what is
alive before. Errors are those of all gradients together against float64, lean / torch; 1 where both are equal.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from _rows import VERSIONS, parse, versions, write
from gradstow import layers
from gradstow._verify import median_interval
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops._blocked import relu_sparse_linear

MIB = 1 << 20
FIELDS = [
    "layer", "shape", "dtype", "kept_mib", "torch_kept_mib", "peak_mib", "torch_peak_mib", "ratio", "ratio_low",
    "ratio_high", "error_ratio", "rounds", *VERSIONS,
]  # fmt: skip


@dataclass
class Pair:
    """A layer in torch's form and in its lean form, with the same weights, and what both are given."""

    plain: Callable[..., torch.Tensor]
    lean: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    random: bool = False  # errors of two draws say nothing

    @property
    def shape(self) -> str:
        return " ".join("x".join(map(str, x.shape)) for x in self.inputs if x.numel())


def swapped(module: nn.Module, x: torch.Tensor, random: bool = False, **attributes: Any) -> Pair:
    lean = copy.deepcopy(module)
    layers.convert(lean, "*")
    for name, value in attributes.items():
        setattr(lean, name, value)
    return Pair(module, lean, (x,), random)


def given(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).to(dtype).requires_grad_()


def conv_norm_relu() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))


def head(tokens: int, width: int, classes: int) -> Pair:
    """The last layer of a language model and its loss."""
    module = nn.Linear(width, classes, bias=False)
    target = torch.randint(0, classes, (tokens,))

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x), target.to(x.device))

    def lean(x: torch.Tensor) -> torch.Tensor:
        return layers.linear_cross_entropy(x, module.weight, target.to(x.device))

    plain.parameters = lean.parameters = module.parameters  # type: ignore[attr-defined]
    return Pair(plain, lean, (given(tokens, width),))


def attention(dropout: float, bias: bool) -> Pair:
    query, key, value = (given(2, 12, 1024, 64) for _ in range(3))
    extra = (given(1, 12, 1024, 1024),) if bias else ()

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, dropout_p=dropout, is_causal=not bias)

    def lean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return layers.attention(q, k, v, *mask, dropout_p=dropout, is_causal=not bias)

    return Pair(plain, lean, (query, key, value, *extra), random=dropout > 0)


def blocked(width: int, tokens: int) -> Pair:
    module = nn.Linear(width, width)
    lean = copy.deepcopy(module)
    lean.__class__ = layers.BlockedLinear
    return Pair(module, lean, (given(tokens, width),))


def behind_relu(zero_columns: float) -> Pair:
    """A linear layer on what a ReLU gives, where a share of the columns is zero in every row."""
    module = nn.Linear(4096, 4096)
    dead = torch.arange(4096) < zero_columns * 4096
    x = torch.where(dead, torch.zeros(()), torch.randn(1024, 4096).relu()).requires_grad_()

    def lean(x: torch.Tensor) -> torch.Tensor:
        return relu_sparse_linear(x, module.weight, module.bias)

    lean.parameters = module.parameters  # type: ignore[attr-defined]
    return Pair(module, lean, (x,))


PAIRS: dict[str, Callable[[], Pair]] = {
    "ReLU": lambda: swapped(nn.ReLU(), given(32, 64, 56, 56), saves="mask"),
    "LeakyReLU": lambda: swapped(nn.LeakyReLU(), given(32, 64, 56, 56), saves="mask"),
    "Hardtanh": lambda: swapped(nn.Hardtanh(), given(32, 64, 56, 56), saves="mask"),
    "Dropout": lambda: swapped(nn.Dropout(0.1), given(32, 256, 1024)),
    "Softsign": lambda: swapped(nn.Softsign(), given(32, 256, 1024)),
    "MaxPool2d": lambda: swapped(nn.MaxPool2d(3, 2, 1), given(16, 64, 112, 112)),
    "Linear": lambda: swapped(nn.Linear(768, 3072), given(4096, 768)),
    "Conv2d": lambda: swapped(nn.Conv2d(64, 64, 3, padding=1), given(16, 64, 56, 56)),
    "conv norm relu": lambda: swapped(conv_norm_relu(), given(16, 64, 56, 56)),
    "linear relu": lambda: swapped(nn.Sequential(nn.Linear(768, 3072), nn.ReLU()), given(4096, 768), saves="mask"),
    "LayerNorm": lambda: swapped(nn.LayerNorm(768), given(16384, 768)),
    "LayerNorm bf16": lambda: swapped(nn.LayerNorm(768).bfloat16(), given(16384, 768, dtype=torch.bfloat16)),
    "RMSNorm": lambda: swapped(nn.RMSNorm(768), given(16384, 768)),
    "RMSNorm bf16": lambda: swapped(nn.RMSNorm(768).bfloat16(), given(16384, 768, dtype=torch.bfloat16)),
    "GroupNorm": lambda: swapped(nn.GroupNorm(8, 64), given(16, 64, 56, 56)),
    "GroupNorm bf16": lambda: swapped(nn.GroupNorm(8, 64).bfloat16(), given(16, 64, 56, 56, dtype=torch.bfloat16)),
    "attention": lambda: attention(0.0, bias=False),
    "attention, dropout": lambda: attention(0.1, bias=False),
    "attention, bias": lambda: attention(0.0, bias=True),
    "linear cross entropy": lambda: head(8192, 768, 50257),
    "BlockedLinear": lambda: blocked(4096, 1024),
    "BlockedLinear, 4096 rows": lambda: blocked(4096, 4096),
    "zeros behind ReLU skipped, 0 % of columns": lambda: behind_relu(0.0),
    "zeros behind ReLU skipped, 50 % of columns": lambda: behind_relu(0.5),
    "zeros behind ReLU skipped, 90 % of columns": lambda: behind_relu(0.9),
}


def main() -> None:
    arguments = parse(__doc__, list(PAIRS), "layers.csv", rounds=7).parse_args()
    for name in arguments.models:
        torch.manual_seed(0)
        pair = moved(PAIRS[name](), arguments.device)
        row = {
            "layer": name,
            "shape": pair.shape,
            "dtype": str(pair.inputs[0].dtype).removeprefix("torch."),
            **memory(pair, arguments.device),
            **times(pair, arguments.rounds, arguments.device),
            "error_ratio": None if pair.random else error_ratio(pair),
            "rounds": arguments.rounds,
            **versions(arguments.device),
        }
        write(arguments.out, FIELDS, row)


def moved(pair: Pair, device: str) -> Pair:
    for run in (pair.plain, pair.lean):
        if isinstance(run, nn.Module):
            run.to(device)
    inputs = tuple(x.detach().to(device).requires_grad_() for x in pair.inputs)
    return Pair(pair.plain, pair.lean, inputs, pair.random)


def parameters(run: Any) -> list[torch.Tensor]:
    return list(run.parameters()) if hasattr(run, "parameters") else []


def step(run: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    for tensor in (*inputs, *parameters(run)):
        tensor.grad = None
    output = run(*inputs)
    output.backward(torch.ones_like(output))


def memory(pair: Pair, device: str) -> dict[str, float]:
    found = {}
    for prefix, run in (("", pair.lean), ("torch_", pair.plain)):
        known = [*pair.inputs, *parameters(run)]
        found[f"{prefix}kept_mib"] = saved_bytes(lambda run=run: run(*pair.inputs), known) / MIB
        for tensor in known:
            tensor.grad = None
        with gs.measure_peak(device) as peak:
            step(run, pair.inputs)
        found[f"{prefix}peak_mib"] = peak.peak_bytes / MIB
    return found


def times(pair: Pair, rounds: int, device: str) -> dict[str, float]:
    def seconds(run: Callable[..., torch.Tensor]) -> float:
        start = time.perf_counter()
        step(run, pair.inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(pair.plain), seconds(pair.lean)
    ratios = [seconds(pair.lean) / seconds(pair.plain) for _ in range(rounds)]
    low, high = median_interval(ratios)
    return {"ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}


def error_ratio(pair: Pair) -> float | None:
    """Of all gradients, against torch's in float64."""
    exact = copy.deepcopy(pair.plain).double() if isinstance(pair.plain, nn.Module) else None
    found = [gradients(run, pair.inputs) for run in (pair.lean, pair.plain)]
    if all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        return 1.0
    if exact is None:
        return None  # the tests judge these, on smaller inputs
    right = gradients(exact, tuple(x.detach().double().requires_grad_() for x in pair.inputs))
    lean, plain = (
        sum(float((a.double() - b).square().sum()) for a, b in zip(each, right, strict=True)) ** 0.5 for each in found
    )
    return lean / plain if plain else float(lean > 0) + 1


def gradients(run: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    step(run, inputs)
    return [t.grad for t in (*inputs, *parameters(run)) if t.grad is not None]


if __name__ == "__main__":
    main()
