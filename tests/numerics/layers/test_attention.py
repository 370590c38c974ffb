"""Attention in chunks: torch's numbers, no queries × keys tensor kept, one op for compilers and planners."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradstow as gs
from gradstow.layers._attention import Attention
from gradstow.layers._saved import saved_bytes
from gradstow.layers.ops import _attention
from gradstow.layers.ops._attention import attention, keeps_rows_only
from numerics.layers.judge import assert_no_worse, assert_same_state, error, gradients
from numerics.layers.torch_samples import module_samples, op_samples

B, H, L, S, E = 2, 4, 33, 40, 8
FLOOR = {torch.float32: 4e-6, torch.float64: 1e-14}


def inputs(dtype: torch.dtype = torch.float32, keys: int = S, group: int = H, value: int = E) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    sizes = [(B, H, L, E), (B, group, keys, E), (B, group, keys, value)]
    return [torch.randn(s, generator=made, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def mask_of(kind: str, *shape: int) -> torch.Tensor | None:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return {"none": None, "bool": made > -0.5, "float": made, "bias": made.clone().requires_grad_()}[kind]


def composite(*args: Any, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def assert_near(lean: Callable[..., Any], original: Callable[..., Any], given: list[Any]) -> None:
    """As ``assert_no_worse``; but over a handful of numbers a ratio of errors is luck, the more so where a softmax is
    all but 0 and 1, as with torch's samples: an error of ``FLOOR`` times the largest of the gradients passes, too."""
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]
    one, two, three = gradients(lean, given), gradients(original, given), gradients(original, exact)
    assert (one[0].dtype, one[0].shape) == (two[0].dtype, two[0].shape)
    floor = FLOOR[one[0].dtype] * max(float(x.norm()) for x in (one[0], *one[1]) if x is not None)
    for a, b, c in zip([one[0], *one[1]], [two[0], *two[1]], [three[0], *three[1]], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None and c is not None and a.numel():
            assert a.dtype == b.dtype
            assert (a - c).norm() <= max(2 * (b - c).norm(), floor)


# ---------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", ["none", "bool", "float", "bias"])
@pytest.mark.parametrize("chunk", [1, 7, L, 3 * L, 10**6])
def test_it_is_torchs_composite(kind: str, chunk: int) -> None:
    given = [*inputs(), mask_of(kind, H, L, S)]
    lean = gradients(lambda *a: attention(*a, chunk=chunk), given)
    plain = gradients(composite, given)
    if chunk >= L:  # whole heads: the same kernels over the same numbers
        assert torch.equal(lean[0], plain[0])
        assert all(a is b or torch.equal(a, b) for a, b in zip(lean[1], plain[1], strict=True))
    assert_no_worse(lambda *a: attention(*a, chunk=chunk), composite, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [H, 2, 1])
@pytest.mark.parametrize("chunk", [10, 2 * L])
def test_dtypes_causal_and_groups(dtype: torch.dtype, causal: bool, group: int, chunk: int) -> None:
    given = inputs(dtype, group=group, value=12)
    options = {"is_causal": causal, "enable_gqa": group != H}
    assert_no_worse(lambda *a: attention(*a, **options, chunk=chunk), lambda *a: composite(*a, **options), given)


@pytest.mark.parametrize("shape", [(S,), (L, S), (L, 1), (1, S), (H, L, S), (B, 1, L, S), (B, 1, 1, S), (1, H, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_masks_are_broadcast_and_their_gradients_reduced(shape: tuple[int, ...], kind: str) -> None:
    given = [*inputs(), mask_of(kind, *shape)]
    assert_no_worse(lambda *a: attention(*a, chunk=9), composite, given)


def test_a_row_that_is_masked_entirely_is_zero() -> None:
    """As in torch's kernels: no NaN, and no gradient."""
    mask = torch.ones(L, S, dtype=torch.bool)
    mask[3] = mask[-1] = False
    added = torch.zeros(L, S).masked_fill(~mask, float("-inf")).requires_grad_()
    for given in ([*inputs(), mask], [*inputs(), added]):
        output, found = gradients(lambda *a: attention(*a, chunk=10), given)
        assert output[:, :, 3].eq(0).all()
        assert found[0] is not None
        assert found[0][:, :, 3].eq(0).all()
        assert all(x is None or not x.isnan().any() for x in found)
        assert_no_worse(lambda *a: attention(*a, chunk=10), composite, given)


def test_causal_and_a_mask_both_hold() -> None:
    """torch refuses the two together; a padding mask need not be made queries × keys for it."""
    padding = mask_of("bool", B, 1, 1, S)
    assert padding is not None
    both = padding & torch.ones(L, S, dtype=torch.bool).tril()
    lean = gradients(lambda *a: attention(*a, attn_mask=padding, is_causal=True, chunk=11), inputs())
    plain = gradients(lambda *a: attention(*a, attn_mask=both, chunk=11), inputs())
    assert torch.equal(lean[0], plain[0])
    assert all(torch.equal(a, b) for a, b in zip(lean[1], plain[1], strict=True))


def test_long_causal_rows() -> None:
    """Keys behind a chunk's last query are left out."""
    given = [torch.randn(1, 2, n, 16, requires_grad=True) for n in (300, 210, 210)]
    options = {"is_causal": True, "scale": -0.3}
    assert_no_worse(lambda *a: attention(*a, **options, chunk=50), lambda *a: composite(*a, **options), given)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(group: int, causal: bool) -> None:
    made = [torch.randn(s, dtype=torch.float64) for s in ((2, 2, 3, 2), (1, group, 4, 2), (2, group, 4, 3), (2, 1, 4))]
    given = [x.requires_grad_() for x in made]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, m, is_causal=causal, enable_gqa=group == 1, chunk=2)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks_and_strides(rank: int) -> None:
    lead = (2, 1, 3)[5 - rank :]
    made = [torch.randn(*lead, n, 6) for n in (5, 7, 7)]
    mask = torch.randn(*lead, 5, 7)
    given = [x.mT.contiguous().mT.requires_grad_() for x in made] + [mask.requires_grad_()]
    assert_near(lambda *a: attention(*a, chunk=4), composite, given)


def test_inputs_are_broadcast() -> None:
    """One query for all samples: its gradient is summed before it is rounded."""
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (x.detach() for x in inputs(dtype))
        given = [query[:1].requires_grad_(), key[:, :1].requires_grad_(), value.requires_grad_()]
        assert_no_worse(lambda *a: attention(*a, chunk=50), composite, given)
        expanded = [query[:1].expand(B, -1, -1, -1), key, value]
        assert_no_worse(lambda *a: attention(*a, chunk=50), composite, [x.requires_grad_() for x in expanded])


@pytest.mark.parametrize("shapes", [((0, 4, 8), (0, 5, 8)), ((2, 0, 8), (2, 5, 8)), ((2, 4, 8), (2, 0, 8))])
def test_empty(shapes: Any) -> None:
    given = [torch.randn(shapes[i], requires_grad=True) for i in (0, 1, 1)]
    lean, plain = gradients(lambda *a: attention(*a, chunk=2), given), gradients(F.scaled_dot_product_attention, given)
    assert torch.equal(lean[0], plain[0])
    assert all(a is b or torch.equal(a, b) for a, b in zip(lean[1], plain[1], strict=True))


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=4))[1:])
def test_only_gradients_that_somebody_needs(needed: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given = [x.detach().requires_grad_(n) for x, n in zip([*inputs(), mask_of("float", L, S)], needed, strict=True)]
    _, found = gradients(lambda *a: attention(*a, chunk=20), given)
    assert [x is not None for x in found] == list(needed)
    _, plain = gradients(composite, given)
    for one, two in zip(found, plain, strict=True):
        assert one is two is None or torch.allclose(one, two, atol=1e-5)


# ---------------------------------------------------------------------------------------- dropout


def test_dropouts_rate_and_mask() -> None:
    """Equal weights of 1/n and values of 1: what comes out is the part that was kept, over 1 - p."""
    n, p = 256, 0.3
    torch.manual_seed(0)
    query = torch.zeros(1, 2, n, 4, requires_grad=True)
    value = torch.eye(n).expand(1, 2, n, n).clone().requires_grad_()
    result = attention(query, query, value, dropout_p=p, chunk=50)
    kept = result.detach() * n * (1 - p)
    assert torch.allclose(kept, kept.round(), atol=1e-4)
    assert abs(float(kept.mean()) - (1 - p)) < 4 * (p * (1 - p) / kept.numel()) ** 0.5
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert not torch.equal(kept[0, 0, :50], kept[0, 0, 50:100])
    (found,) = torch.autograd.grad(result, value, torch.ones_like(result))
    assert torch.allclose(found.sum(-1), result.detach().sum(-2) * n, rtol=1e-4, atol=1e-4)


def test_dropouts_gradients_and_streams() -> None:
    """gradcheck, with a seed that stays: forward, backward and double backward use one mask."""
    given = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def run(*args: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attention(*args, dropout_p=0.4, chunk=2)

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)
    torch.manual_seed(5)
    torch.randint(0, 1 << 62, (1,))
    state = torch.get_rng_state()
    run(*given).sum().backward()
    assert torch.equal(torch.get_rng_state(), state), "one number is drawn, and none in the backward"
    assert not torch.equal(attention(*given, dropout_p=0.4), attention(*given, dropout_p=0.4))


def test_everything_dropped() -> None:
    output, found = gradients(lambda *a: attention(*a, dropout_p=1.0), inputs())
    assert output.eq(0).all()
    assert all(x is not None and x.eq(0).all() for x in found)


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["none", "bool", "float", "bias"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_bytes(kind: str, dropout: float) -> None:
    """Nothing but the inputs and dropout's seed, or what torch's own kernel keeps: its output and a statistic."""
    given = [*inputs(), mask_of(kind, H, L, S)]
    known = [x for x in given if x is not None]
    seed = 8 if dropout else 0
    assert saved_bytes(lambda: attention(*given, dropout_p=dropout, chunk=20), known) == seed
    kernel = 4 * B * H * L * (E + 1) if kind == "none" and not dropout else seed
    assert saved_bytes(lambda: attention(*given, dropout_p=dropout), known) == kernel


@pytest.mark.parametrize("lead", [(2, 4), (4,), ()])
@pytest.mark.parametrize("keys", [32, 16])
@pytest.mark.parametrize("group", [None, 1, 2])
def test_torchs_kernel_is_taken_where_it_keeps_rows_only(lead: tuple[int, ...], keys: int, group: int | None) -> None:
    """Its rule on a CPU, against what it does; and whatever is taken, no queries × keys tensor is kept."""
    shapes = [None, (32, keys), (1, 1, 32, keys), (*lead, 32, keys), (2, 1, 1, keys), (32, 1)]
    groups = (*lead[:-1], lead[-1] if group is None else group) if lead else ()
    rows_bytes, taken = 4 * 32 * math.prod(lead), 0
    for shape, kind, causal, dropout, value in itertools.product(
        shapes, ["bool", "float", "bias"], [False, True], [0.0, 0.1], [8, 4]
    ):
        mask = None if shape is None else mask_of(kind, *shape)
        sizes = ((*lead, 32, 8), (*groups, keys, 8), (*groups, keys, value))
        given = [torch.randn(s, requires_grad=True) for s in sizes]
        options: Any = {"is_causal": causal, "enable_gqa": group == 2 and bool(lead)}
        try:
            plain = F.scaled_dot_product_attention(*given, mask, dropout, **options)
        except RuntimeError:
            continue  # a mask with is_causal
        rows = keeps_rows_only(*given, mask, dropout, causal, options["enable_gqa"])
        copied = mask is not None and mask.dtype == torch.bool and mask.shape[-2] > 1
        assert rows == (uses_flash(plain) and not copied)
        taken += rows
        row = 4 * mask.numel() if rows and mask is not None and mask.dtype == torch.bool else 0
        known = [x for x in (*given, mask) if x is not None]
        run = functools.partial(attention, *given, mask, dropout, **options)
        kept = saved_bytes(run, known)
        assert kept == (rows_bytes * (1 + value) + row if rows else 8 if dropout else 0)
    assert bool(taken) == bool(lead)


def uses_flash(output: torch.Tensor) -> bool:
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [below for below, _ in node.next_functions]
    return any("FlashAttention" in node.name() for node in seen)


def test_working_memory_is_bounded_by_the_chunk() -> None:
    length, chunk = 1024, 32
    for mask, dropout in ((None, 0.0), (mask_of("bool", length, length), 0.1)):
        query = torch.randn(1, 4, length, 16, requires_grad=True)
        with gs.measure_peak() as memory:
            attention(query, query, query, mask, dropout, chunk=chunk).sum().backward()
        size = query.numel() * 4
        scores = 4 * chunk * length
        # output, its gradient, the three gradients and their sum for one tensor, and one head's keys
        assert memory.peak_bytes <= 7 * size + 4.5 * scores, (memory.peak_bytes, size, scores)
        assert memory.peak_bytes < 4 * 4 * length * length


# ---------------------------------------------------------------------------------------- torch's own samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_sample_inputs(dtype: torch.dtype) -> None:
    compared = 0
    for sample in op_samples("nn.functional.scaled_dot_product_attention", dtype):
        given, options = [sample.input, *sample.args], dict(sample.kwargs)
        for chunk in (None, 3):
            if options.get("dropout_p"):
                lean = attention(*given, **options, chunk=chunk)
                assert lean.shape == F.scaled_dot_product_attention(*given, **options).shape
                lean.sum().backward()
                continue
            run: Any = lambda *a, o=options, c=chunk: attention(*a, **o, chunk=c)  # noqa: E731
            assert_near(run, lambda *a, o=options: F.scaled_dot_product_attention(*a, **o), given)
            compared += 1
    assert compared > 20


def test_torchs_module_inputs() -> None:
    lean_calls = 0
    for sample, need in itertools.product(module_samples(nn.MultiheadAttention), [False, True]):
        made, call = sample.constructor_input, sample.forward_input
        plain = nn.MultiheadAttention(*made.args, **made.kwargs)
        lean = copy.deepcopy(plain)
        lean.__class__ = Attention
        options = {**call.kwargs, "need_weights": need}
        one, two = lean(*call.args, **options), plain(*call.args, **options)
        assert (one[1] is None) == (two[1] is None)
        along = torch.randn_like(two[0])
        found = [torch.autograd.grad(r[0], list(m.parameters()), along) for r, m in ((one, lean), (two, plain))]
        for a, b in [(one[0], two[0]), *zip(*found, strict=True)]:
            assert error(a.detach(), b.detach()) < 1e-5
        name = type(one[0].grad_fn).__name__
        lean_calls += name != type(two[0].grad_fn).__name__ or not need
    assert lean_calls > 10


# ---------------------------------------------------------------------------------------- the module


def mha(**options: Any) -> tuple[Attention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 4, **options)
    lean = copy.deepcopy(plain)
    lean.__class__ = Attention
    return lean, plain  # type: ignore[return-value]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "3d", "causal"])
@pytest.mark.parametrize("padding", [None, "bool", "float"])
@pytest.mark.parametrize("sources", ["self", "cross", "three", "sizes"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_the_module_is_torchs(first: bool, kind: str, padding: str | None, sources: str) -> None:
    lean, plain = mha(batch_first=first, **({"kdim": 5, "vdim": 6} if sources == "sizes" else {}))
    lean.chunk = 6 if kind == "3d" else None
    n, queries = 3, 9
    keys = queries if sources == "self" else 7

    def made(length: int, width: int) -> torch.Tensor:
        return torch.randn((n, length, width) if first else (length, n, width), requires_grad=True)

    query = made(queries, 16)
    key = {"self": query, "sizes": made(keys, 5)}.get(sources, made(keys, 16))
    value = {"three": made(keys, 16), "sizes": made(keys, 6)}.get(sources, key)
    mask = mask_of(
        {"3d": "float", "causal": "bool"}.get(kind, kind), *((n * 4,) if kind == "3d" else ()), queries, keys
    )
    if kind == "causal":
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    elif mask is not None and mask.dtype == torch.bool:
        mask[:, 0] = False  # left out where True
    pad = None if padding is None else torch.zeros(n, keys, dtype=torch.bool)
    if pad is not None:
        pad[1, -2:] = True
    if pad is not None and padding == "float":
        pad = torch.zeros(n, keys).masked_fill(pad, float("-inf"))
    options = {"key_padding_mask": pad, "attn_mask": mask, "need_weights": False, "is_causal": kind == "causal"}
    one, two = (m(query, key, value, **options)[0] for m in (lean, plain))
    wanted = [*dict.fromkeys((query, key, value))]
    along = torch.randn_like(two)
    found = [torch.autograd.grad(r, [*wanted, *m.parameters()], along) for r, m in ((one, lean), (two, plain))]
    for a, b in [(one, two), *zip(*found, strict=True)]:
        assert error(a.detach(), b.detach()) < 1e-6


def test_the_module_keeps_less() -> None:
    lean, plain = mha(batch_first=True, dropout=0.1)
    x = torch.randn(2, 64, 16, requires_grad=True)
    pad = torch.zeros(2, 64, dtype=torch.bool)
    known = [x, pad, *lean.parameters(), *plain.parameters()]
    causal = torch.ones(64, 64, dtype=torch.bool).triu(1)
    options = {"key_padding_mask": pad, "attn_mask": causal, "is_causal": True, "need_weights": False}
    kept = saved_bytes(lambda: lean(x, x, x, **options), known)
    size = x.numel() * 4
    assert kept == 3 * size + size + pad.numel() + 8  # query, key and value, the output, the mask turned round, a seed
    assert saved_bytes(lambda: plain(x, x, x, **options), known) > kept + 3 * 4 * 2 * 4 * 64 * 64 / 2


def test_the_module_in_other_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    lean, plain = mha(batch_first=True)
    assert_same_state(lean, plain)
    x = torch.randn(2, 5, 16)
    assert torch.equal(lean(x, x, x)[1], plain(x, x, x)[1])
    two = (x[0], x[0], x[0])
    assert torch.equal(lean(*two, need_weights=False)[0], plain(*two, need_weights=False)[0])
    with pytest.raises(RuntimeError, match="attn_mask"):
        lean(x, x, x, need_weights=False, is_causal=True)
    for clone in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        assert type(clone) is Attention
        assert torch.equal(clone(x, x, x, need_weights=False)[0], lean(x, x, x, need_weights=False)[0])
    monkeypatch.setattr(sys.modules[Attention.__module__], "attention", None)  # nothing below may come here
    with torch.no_grad():
        assert torch.equal(lean(x, x, x, need_weights=False)[0], plain(x, x, x, need_weights=False)[0])
    lean.eval().requires_grad_(False)
    plain.eval().requires_grad_(False)
    assert torch.equal(lean(x, x, x, need_weights=False)[0], plain(x, x, x, need_weights=False)[0])


# ---------------------------------------------------------------------------------------- in company


@pytest.mark.parametrize("kind", ["none", "bool", "bias"])
def test_autocast(kind: str) -> None:
    given = [*inputs(), mask_of(kind, L, S)]

    def cast(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def inner(*args: Any) -> torch.Tensor:
            if args[0].dtype == torch.float64:
                return run(*args)
            with torch.autocast("cpu", torch.bfloat16):
                return run(*args)

        return inner

    assert_no_worse(cast(lambda *a: attention(*a, chunk=20)), cast(composite), given)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*given).dtype == torch.bfloat16
        assert attention(*inputs(torch.float64), chunk=4).dtype == torch.float64


@pytest.mark.parametrize(("kind", "dropout"), [("none", 0.0), ("none", 0.2), ("bias", 0.2)])
def test_compiled(kind: str, dropout: float) -> None:
    given = [*inputs(), mask_of(kind, L, S)]

    def run(*args: Any) -> torch.Tensor:
        return attention(args[0] * 2, *args[1:], dropout_p=dropout) * 2

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for function in (run, compiled):
        torch.manual_seed(3)
        results.append((*gradients(function, given), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][2], results[1][2])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert a is b is None or torch.equal(a, b)


def test_torchs_own_checks_of_an_operator() -> None:
    for mask, seed in ((None, None), (mask_of("bias", H, L, 1), torch.tensor([5]))):
        args = (*inputs(), mask, seed, 0.2 if seed is not None else 0.0, True, 0.3, 50)
        torch.library.opcheck(torch.ops.gradstow.attention.default, args)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.attention = Attention(16, 4, dropout=0.2, batch_first=True)
        self.attention.chunk = 8
        self.last = Attention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("budget", ["100%", "90%"])
def test_stowed(budget: str) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 32, 16), None)
    proof = gs.verify(Blocks(), batch, loss=lambda y, _: y.square().mean(), budget=budget, steps=2, rounds=1)
    assert proof.equal, proof.differences
    assert proof.compared > 10


def test_errors() -> None:
    with pytest.raises(gs.errors.GradstowError, match="chunk=0 rows"):
        attention(*inputs(), chunk=0)
    with pytest.raises(gs.errors.GradstowError, match="leading sizes"):
        attention(torch.randn(2, 3, 4, 8, requires_grad=True), *inputs()[1:], chunk=2)
    with pytest.raises(gs.errors.GradstowError, match="heads of key and value"):
        attention(*inputs(group=3), enable_gqa=True, chunk=2)


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _attention.attention_gradients

    def wrong(*args: Any) -> list[torch.Tensor]:
        found = real(*args)
        return [found[0] * 1.01, *found[1:]]

    monkeypatch.setattr(_attention, "attention_gradients", wrong)
    with pytest.raises(AssertionError):
        assert_no_worse(lambda *a: attention(*a, chunk=20), composite, inputs())
    with pytest.raises(AssertionError):
        assert_near(lambda *a: attention(*a, chunk=20), composite, inputs())
    with pytest.raises(RuntimeError, match="Jacobian"):
        torch.autograd.gradcheck(
            lambda *a: attention(*a, chunk=2), [x.detach()[:1, :1, :3].requires_grad_() for x in inputs(torch.float64)]
        )
