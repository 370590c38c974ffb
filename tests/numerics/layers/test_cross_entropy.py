"""The linear cross entropy against head and loss of plain PyTorch: numbers, kept bytes, peak, and how it composes."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from gradstow.errors import GradstowError
from gradstow.layers._losses import LinearCrossEntropy
from gradstow.layers._saved import saved_bytes, saved_storages
from gradstow.layers.ops import _cross_entropy_chunks as chunks
from gradstow.layers.ops._cross_entropy import linear_cross_entropy
from numerics.layers.judge import assert_no_worse, assert_same_state, error, gradients
from numerics.layers.torch_samples import op_samples

N, WIDTH, CLASSES = 21, 5, 11
WHENS = ["forward", "backward"]
SHORT = [torch.bfloat16, torch.float16]


def parts(
    dtype: torch.dtype = torch.float32, n: int = N, width: int = WIDTH, classes: int = CLASSES, bias: bool = True
) -> tuple[list[torch.Tensor], torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes: list[Any] = [(n, width), (classes, width), (classes,)]
    given = [torch.randn(s, generator=made, dtype=torch.float64).to(dtype) for s in shapes]
    target = torch.randint(0, classes, (n,), generator=made)
    target[1::7] = -100
    return [x.requires_grad_() for x in given[: 3 if bias else 2]], target


def lean(target: torch.Tensor, **options: Any) -> Callable[..., torch.Tensor]:
    return lambda x, w, b=None: linear_cross_entropy(x, w, target, b, **{"chunk": 4, **options})


def plain(target: torch.Tensor, z: float = 0.0, token_weights: torch.Tensor | None = None, **options: Any) -> Any:
    """Head and loss in plain PyTorch; z-loss and token weights as the docstring states them."""
    ignored, reduction = options.get("ignore_index", -100), options.get("reduction", "mean")
    weight = options.get("weight")

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        logits = F.linear(x, w, b).flatten(0, -2)
        flat = target.flatten()
        if not z and token_weights is None:
            given = {**options, "weight": None if weight is None else weight.to(logits)}
            loss = F.cross_entropy(logits, flat, **given)
            return loss.view(target.shape) if reduction == "none" else loss
        given = {**options, "reduction": "none", "weight": None if weight is None else weight.to(logits)}
        losses = F.cross_entropy(logits, flat, **given)
        losses = losses + z * logits.logsumexp(1).square() * flat.ne(ignored)
        weights = flat.ne(ignored).to(losses)
        if token_weights is not None:
            weights = weights * token_weights.flatten().to(losses)
        losses = losses * weights
        if reduction == "none":
            return losses.view(target.shape)
        per_class = 1 if weight is None else weight.to(losses)[flat.clamp(0)]
        return losses.sum() if reduction == "sum" else losses.sum() / (weights * per_class).sum()

    return run


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_option_in_float64(bias: bool, when: str) -> None:
    given, target = parts(torch.float64, bias=bias)
    made = torch.Generator().manual_seed(1)
    per_class, per_token = torch.rand(CLASSES, generator=made), torch.rand(N, generator=made)
    for reduction, smoothing, weighted, z, tokens in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1, 1.0), (False, True), (0.0, 0.01), (None, per_token)
    ):
        if when == "forward" and reduction == "none":
            continue
        class_weight = per_class if weighted else None
        shared: Any = {"reduction": reduction, "label_smoothing": smoothing, "token_weights": tokens}
        one = gradients(lean(target, class_weight=class_weight, z_loss=z, when=when, **shared), given)
        two = gradients(plain(target, z, weight=class_weight, **shared), given)
        for a, b in zip([one[0], *one[1]], [two[0], *two[1]], strict=True):
            assert a is not None and b is not None  # noqa: PT018
            assert error(a, b) < 1e-13, (reduction, smoothing, weighted, z, tokens)


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
def test_no_worse_than_torch(dtype: torch.dtype, when: str) -> None:
    given, target = parts(dtype, n=300, width=32, classes=1000)
    if dtype == torch.float16 and when == "forward":
        with pytest.raises(GradstowError, match="float16 would lose small ones"):
            lean(target, when=when)(*given)
        return
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
        for chunk in (64, None):
            run = lean(target, when=when, chunk=chunk, **options)
            if dtype == torch.float32:
                one, two = gradients(run, given), gradients(plain(target, **options), given)
                right = gradients(plain(target, **options), [x.double() for x in given])
                for a, b, c in zip(one[1], two[1], right[1], strict=True):
                    assert error(a, c) <= 2 * error(b, c)  # type: ignore[arg-type]
                assert (
                    error(one[0], right[0]) <= 2 * error(two[0], right[0]) + 2**-24
                )  # one number may be exact by luck
            else:
                assert_no_worse(run, plain(target, **options), given)


def test_small_gradients_survive_in_float16() -> None:
    """The loss's scale reaches them before they are rounded; probabilities here are below float16's smallest number."""
    given, target = parts(torch.float16, n=64, width=16, classes=30000)
    loss = linear_cross_entropy(given[0], given[1], target, given[2])
    found = torch.autograd.grad(loss, given[1], torch.tensor(2.0**15, dtype=torch.float16))[0]
    exact = [x.detach().double().requires_grad_() for x in given]
    right = torch.autograd.grad(plain(target)(*exact), exact[1])[0]
    assert error(found.double() / 2**15, right) < 0.02


def test_weight_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of one token each are as precise as one chunk."""
    given, target = parts(torch.bfloat16, n=1024, width=8, classes=16)
    monkeypatch.setattr(chunks, "_SLAB", 5)
    exact = gradients(plain(target), [x.double() for x in given])[1]
    for when in WHENS:
        one, many = (gradients(lean(target, chunk=c, when=when), given)[1] for c in (1024, 1))
        for a, b, c in zip(one[1:], many[1:], exact[1:], strict=True):
            assert error(b, c) <= 1.5 * error(a, c)  # type: ignore[arg-type]


@pytest.mark.parametrize("when", WHENS)
def test_gradcheck(when: str) -> None:
    for shape in ((0,), (3,), (2, 0), (2, 3), ()):
        given, _ = parts(torch.float64, n=6)
        x = torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
        target = torch.randint(0, CLASSES, shape)
        options: Any = {"label_smoothing": 0.1, "z_loss": 0.1, "when": when, "reduction": "sum"}
        run = lean(target, **options)
        assert torch.autograd.gradcheck(run, (x, *given[1:]))
        if when == "backward":
            assert torch.autograd.gradcheck(lean(target, reduction="none"), (x, *given[1:]))
            assert torch.autograd.gradgradcheck(run, (x, *given[1:]), fast_mode=True)


def test_strides() -> None:
    given, target = parts(torch.float64)
    for x in (given[0].detach().t().contiguous().t(), given[0].detach()[:1].expand(N, -1)):
        for w in (given[1].detach(), given[1].detach().t().contiguous().t()):
            inputs = [x.requires_grad_(), w.requires_grad_(), given[2]]
            one, two = gradients(lean(target), inputs), gradients(plain(target), inputs)
            for a, b in zip([one[0], *one[1]], [two[0], *two[1]], strict=True):
                assert error(a, b) < 1e-13  # type: ignore[arg-type]


@pytest.mark.parametrize("when", WHENS)
def test_a_mean_of_nothing(when: str) -> None:
    given, target = parts()
    ignored = torch.full_like(target, -100)
    one, two = (gradients(run, given) for run in (lean(ignored, when=when), plain(ignored)))
    assert one[0].isnan()
    assert two[0].isnan()
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))  # type: ignore[arg-type]
    assert not any(g.any() for g in one[1])  # type: ignore[union-attr]
    empty = lean(torch.zeros(0, dtype=torch.long), when=when)(given[0][:0], *given[1:])
    assert empty.isnan()
    assert lean(ignored, reduction="sum", when=when)(*given) == 0


def test_ignore_index_may_be_a_class_or_beyond() -> None:
    given, target = parts(torch.float64)
    for ignored in (3, 10**6):
        marked = target.masked_fill(target == -100, ignored)
        one, two = (gradients(run(marked, ignore_index=ignored), given) for run in (lean, plain))
        assert all(error(a, b) < 1e-13 for a, b in zip(one[1], two[1], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SHORT])
def test_saved_bytes(dtype: torch.dtype) -> None:
    given, target = parts(dtype)
    known = [*given, target]
    per_token = N * (8 if dtype == torch.float64 else 4)
    for reduction in ("mean", "sum", "none"):
        run = lean(target, reduction=reduction, when="backward")
        assert list(saved_storages(lambda run=run: run(*given), known).values()) == [per_token]
    if dtype == torch.float16:
        return
    size = dtype.itemsize
    expected = {N * WIDTH * size, CLASSES * WIDTH * size, CLASSES * size}
    found = saved_storages(lambda: lean(target)(*given))  # "forward" is the default; the inputs are not kept
    assert set(found.values()) == expected
    assert len(found) == 3
    frozen = [given[0], *(x.detach() for x in given[1:])]
    assert saved_bytes(lambda: lean(target)(*frozen)) == N * WIDTH * size
    assert saved_bytes(lambda: lean(target)(*(x.detach() for x in given))) == 0
    logits = saved_bytes(lambda: plain(target)(*given), known)
    assert logits >= N * CLASSES * size


@pytest.mark.parametrize("when", WHENS)
def test_peak(when: str) -> None:
    """The issue's bar on the way to it: 1/8 of plain's, at a quarter of its tokens and vocabulary."""
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=made).requires_grad_() for s in ((4096, 32), (8192, 32)))
    target = torch.randint(0, 8192, (4096,), generator=made)
    peaks = []
    for run in (lean(target, when=when, chunk=256), plain(target)):
        x.grad = w.grad = None
        with gs.measure_peak() as memory:
            run(x, w).backward()
        peaks.append(memory.peak_bytes)
    assert peaks[0] <= peaks[1] / 8, peaks


def test_only_gradients_that_are_needed() -> None:
    given, target = parts()
    for when in WHENS:
        whole = gradients(lean(target, when=when), given)[1]
        for alone in range(3):
            some = [x.detach().requires_grad_(i == alone) for i, x in enumerate(given)]
            found = gradients(lean(target, when=when), some)[1]
            assert [f is not None for f in found] == [i == alone for i in range(3)]
            assert torch.equal(found[alone], whole[alone])  # type: ignore[arg-type]


def test_token_weights_can_be_learned() -> None:
    given, target = parts(torch.float64)
    weights = torch.rand(N, dtype=torch.float64, requires_grad=True)
    for reduction in ("mean", "sum", "none"):

        def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor, r: str = reduction) -> torch.Tensor:
            return linear_cross_entropy(x, w, target, b, token_weights=t, reduction=r, chunk=4, z_loss=0.1)

        assert torch.autograd.gradcheck(run, (*given, weights))
        with torch.no_grad():
            expected = plain(target, 0.1, weights, reduction=reduction)(*given)
            assert error(run(*given, weights), expected) < 1e-13


@pytest.mark.parametrize("dtype", SHORT)
def test_autocast(dtype: torch.dtype) -> None:
    given, target = parts(n=200, width=16, classes=100)
    whens = [None, "backward"] if dtype == torch.float16 else [None, *WHENS]
    for when, reduction in itertools.product(whens, ("mean", "none")):
        if when == "forward" and reduction == "none":
            continue

        def cast(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def inner(*values: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", dtype):
                    return run(*values)

            return inner

        found, torchs = lean(target, when=when, reduction=reduction), plain(target, reduction=reduction)
        assert cast(found)(*given).dtype == cast(torchs)(*given).dtype == torch.float32
        one, two = gradients(cast(found), given), gradients(cast(torchs), given)
        right = gradients(torchs, [x.double() for x in given])
        for a, b, c in zip(one[1], two[1], right[1], strict=True):
            assert a is not None and a.dtype == torch.float32  # noqa: PT018
            assert error(a, c) <= 2 * error(b, c)  # type: ignore[arg-type]
        known = [*given, target]
        if when == "backward":
            run = cast(found)
            assert saved_bytes(lambda run=run: run(*given), known) == 200 * 4  # no copy of the weight


@pytest.mark.parametrize("when", [None, "backward"])
def test_compiled(when: str | None) -> None:
    torch._dynamo.reset()

    def run(target: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda *given: lean(target, when=when, z_loss=0.1, label_smoothing=0.1)(*given) * 2

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(target: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return run(target)(*given)

    for n in (21, 34):
        given, target = parts(n=n)
        one, two = gradients(lambda *g, t=target: compiled(t, *g), given), gradients(run(target), given)
        assert torch.equal(one[0], two[0])
        assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))  # type: ignore[arg-type]
    wrong = target.clone()
    wrong[0] = CLASSES
    with pytest.raises(GradstowError, match="not a class"):
        compiled(wrong, *given)


def test_compilers_see_one_operator() -> None:
    """The loop over chunks is not in the graph."""
    given, target = parts(n=2000)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch._dynamo.reset()
        torch.compile(lean(target, chunk=1), backend=backend, fullgraph=True)(*given)
    assert sum("linear_cross_entropy" in str(n.target) for n in graphs[0].graph.nodes) <= 1
    assert len(graphs[0].graph.nodes) < 40


class Model(nn.Module):
    def __init__(self, when: str | None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = LinearCrossEntropy(32, 50, chunk=16, when=when)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x), target)


@pytest.mark.parametrize("when", [None, "backward"])
def test_stowed(when: str | None) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(64, 8), "target": torch.randint(0, 50, (64,))}
    proof = gs.verify(Model(when), batch, loss=lambda loss, _: loss, budget="100%", steps=2, rounds=1)
    assert proof.ok, proof


def test_module() -> None:
    per_class = torch.rand(CLASSES)
    lean_one = LinearCrossEntropy(WIDTH, CLASSES, class_weight=per_class, label_smoothing=0.1, reduction="sum")
    original = nn.Linear(WIDTH, CLASSES)
    assert_same_state(lean_one, original)
    x, target = torch.randn(2, 3, WIDTH), torch.randint(0, CLASSES, (2, 3))
    logits = original(x)
    assert torch.equal(lean_one.logits(x), logits)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), per_class, label_smoothing=0.1, reduction="sum")
    for module in (lean_one, copy.deepcopy(lean_one), pickle.loads(pickle.dumps(lean_one)), lean_one.eval()):
        assert error(module(x, target), expected) < 1e-6
        with torch.no_grad():
            assert error(module(x, target), expected) < 1e-6
    original.__class__ = LinearCrossEntropy
    assert error(original(x, target), F.cross_entropy(logits.flatten(0, 1), target.flatten())) < 1e-6
    assert lean_one.double().class_weight.dtype == torch.float64  # type: ignore[union-attr]


def test_torchs_samples() -> None:
    """Of those whose targets are classes: logits (N, C) are the input, the head is the identity."""
    count = 0
    for sample in op_samples("nn.functional.cross_entropy", torch.float64):
        logits, target, kwargs = sample.input, sample.args[0], dict(sample.kwargs)
        if target.is_floating_point() or logits.dim() != 2:
            continue
        given = {"class_weight" if k == "weight" else k: v for k, v in kwargs.items()}
        identity = torch.eye(logits.shape[1], dtype=torch.float64)
        one, two = (
            gradients(run, [logits])
            for run in (
                lambda x, t=target, g=given, i=identity: linear_cross_entropy(x, i, t, **g),
                lambda x, t=target, g=kwargs: F.cross_entropy(x, t, **g),
            )
        )
        if two[0].isnan().any():
            assert one[0].isnan().all()
        else:
            assert error(one[0], two[0]) < 1e-13
            assert error(one[1][0], two[1][0]) < 1e-13  # type: ignore[arg-type]
        count += 1
    assert count > 5


def test_errors() -> None:
    given, target = parts()
    for wrong in (CLASSES, -1, -99):
        bad = target.clone()
        bad[2] = wrong
        for when in WHENS:
            with pytest.raises(GradstowError, match=f"the target {wrong} is not a class: there are 11") as caught:
                lean(bad, when=when)(*given)
            assert isinstance(caught.value, IndexError)
    with pytest.raises(GradstowError, match="class probabilities"):
        lean(torch.rand(N, CLASSES))(*given)
    with pytest.raises(GradstowError, match="do not fit together"):
        lean(target[1:])(*given)
    for options, text in (
        ({"reduction": "avg"}, "no reduction 'avg'"),
        ({"when": "never"}, "when='never'"),
        ({"chunk": 0}, "a chunk of 0 tokens"),
        ({"label_smoothing": 2}, "label_smoothing=2"),
        ({"token_weights": torch.ones(3)}, "token_weights"),
        ({"class_weight": torch.ones(3)}, "class_weight"),
        ({"reduction": "none", "when": "forward"}, "a gradient of its own"),
        ({"token_weights": torch.ones(N, requires_grad=True), "when": "forward"}, "token weights need gradients"),
    ):
        with pytest.raises(GradstowError, match=text):
            lean(target, **options)(*given)
    loss = lean(target, when="forward")(*given)
    with pytest.raises(GradstowError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, given, create_graph=True)


def test_function_transforms_run_the_original() -> None:
    given, target = parts(torch.float64)
    found = torch.func.grad(lean(target, z_loss=0.1), argnums=(0, 1, 2))(*given)
    right = torch.autograd.grad(lean(target, z_loss=0.1)(*given), given)
    assert all(error(a.detach(), b) < 1e-13 for a, b in zip(found, right, strict=True))


def test_the_comparison_can_fail() -> None:
    given, target = parts(torch.float64)
    one, two = (gradients(run, given)[1] for run in (lean(target, label_smoothing=1e-9), plain(target)))
    assert not all(error(a, b) < 1e-13 for a, b in zip(one, two, strict=True))  # type: ignore[arg-type]
    assert saved_bytes(lambda: plain(target)(*given), [*given, target]) > N * 8
