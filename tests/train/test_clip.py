"""Clipping: torch's own numbers, sparse gradients as dense ones, limits from the history, states that go on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradstow._errors import GradstowError
from gradstow.train._clip import AdaptiveClip, Clip, GlobalNorm, PerParameter, PreviousNorm

KINDS: list[Callable[[], Clip]] = [
    lambda: GlobalNorm(0.5),
    lambda: PerParameter(0.5),
    lambda: PreviousNorm(0.5),
    lambda: AdaptiveClip(percentile=50, window=8, warmup=2),
    lambda: AdaptiveClip(deviations=1.0, decay=0.9, warmup=2),
]


def parameters(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    found = []
    for gradient in gradients:
        shape = (1,) if gradient is None else gradient.shape
        dtype = torch.float32 if gradient is None else gradient.dtype
        found.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        found[-1].grad = None if gradient is None else gradient.clone()
    return found


def some(seed: int = 0, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return parameters(*(scale * torch.randn(shape, generator=generator) for shape in [(7, 5), (5,), (3, 2, 2)]))


def of_norm(norm: float) -> list[nn.Parameter]:
    return parameters(torch.tensor([norm]))


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e9])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_global_norm_is_torchs(max_norm: float, norm_type: float, dtype: torch.dtype) -> None:
    ours = parameters(*(p.grad.to(dtype) for p in some() if p.grad is not None))
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    result = GlobalNorm(max_norm, norm_type)(ours)
    norm = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert torch.equal(result.norm, norm)
    assert result.limit == max_norm
    assert result.norm.dim() == 0
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def sparse_twins() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """An embedding with a dense head after two micro-batches with repeated indices: sparse, and dense."""
    found = []
    for sparse in (True, False):
        torch.manual_seed(3)
        table, head = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 4)
        for seed in (0, 1):
            indices = torch.randint(0, 12, (40,), generator=torch.Generator().manual_seed(seed))
            head(table(indices)).square().sum().backward()
        found.append([*table.parameters(), *head.parameters()])
    return found[0], found[1]


@pytest.mark.parametrize("kind", [lambda: GlobalNorm(0.1), lambda: PerParameter(0.1), lambda: AdaptiveClip(first=0.1)])
def test_sparse_gradients_equal_dense_ones(kind: Callable[[], Clip]) -> None:
    sparse, dense = sparse_twins()
    assert sparse[0].grad is not None
    assert not sparse[0].grad.is_coalesced()
    ours, theirs = kind()(sparse), kind()(dense)
    torch.testing.assert_close(ours.norm, theirs.norm, rtol=1e-6, atol=0)
    assert sparse[0].grad.is_sparse
    assert sparse[0].grad._nnz() <= 12, "nothing became dense"
    for mine, other in zip(sparse, dense, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        got = mine.grad.to_dense()
        torch.testing.assert_close(got, other.grad, rtol=1e-6, atol=0)


def test_sparse_and_dense_are_scaled_by_one_factor() -> None:
    clipped, whole = sparse_twins()[0], sparse_twins()[0]
    result = GlobalNorm(0.1)(clipped)
    factor = torch.clamp(0.1 / (result.norm + 1e-6), max=1.0)
    for mine, other in zip(clipped, whole, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        expected = other.grad.coalesce().values() if other.grad.is_sparse else other.grad
        got = mine.grad.coalesce().values() if mine.grad.is_sparse else mine.grad
        assert torch.equal(got, expected * factor)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_sparse_optimizers_and_scaler_train_as_dense_ones(kind: str) -> None:
    """The whole of a reported case: GradScaler, two micro-batches, a clip, SparseAdam beside Adam."""
    ends = []
    for sparse in (True, False):
        torch.manual_seed(3)
        table, head = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 4)
        rows: Any = torch.optim.SparseAdam if sparse and kind == "Adam" else getattr(torch.optim, kind)
        optimizers = [rows(table.parameters(), lr=0.01), getattr(torch.optim, kind)(head.parameters(), lr=0.01)]
        scaler, clip = torch.amp.GradScaler("cpu", init_scale=2.0**8), GlobalNorm(2.0)
        for step in range(1 if kind == "Adam" else 4):  # dense Adam moves rows without a gradient, too, later
            for seed in (2 * step, 2 * step + 1):
                indices = torch.randint(0, 12, (40,), generator=torch.Generator().manual_seed(seed))
                scaler.scale(head(table(indices)).square().sum()).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            assert float(clip([*table.parameters(), *head.parameters()]).norm) > 2.0
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        ends.append([*table.parameters(), *head.parameters()])
    for mine, other in zip(*ends, strict=True):
        # SparseAdam puts its epsilon elsewhere than Adam: a hundredth of the step
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4 if kind == "Adam" else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_clip(kind: Callable[[], Clip]) -> None:
    result = kind()(parameters(None, None))
    assert float(result.norm) == 0
    empty = torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.long), torch.zeros((0, 3)), (5, 3), check_invariants=True
    )
    assert float(kind()(parameters(empty, torch.zeros(0))).norm) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_clips_nothing(kind: Callable[[], Clip], bad: float) -> None:
    clip = kind()
    for norm in (1.0, 2.0, 3.0):
        clip(of_norm(norm))
    state = clip.state_dict()
    given = parameters(torch.tensor([bad, 1.0]), torch.tensor([0.25]))
    result = clip(given)
    assert not math.isfinite(float(result.norm))
    assert given[1].grad is not None
    if not isinstance(clip, PreviousNorm):  # whose factor does not depend on this window
        assert torch.equal(given[1].grad, torch.tensor([0.25]))
    assert clip.state_dict() == state


def test_a_parameter_given_twice_counts_once() -> None:
    given = some()
    expected = GlobalNorm(0.5)(some())
    assert torch.equal(GlobalNorm(0.5)([*given, *given]).norm, expected.norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_short_floats_are_computed_in_float32(dtype: torch.dtype) -> None:
    gradient = torch.full((1000,), 3e3, dtype=dtype)  # torch's own norm of fp16 is inf here
    result = GlobalNorm(1.0)(parameters(gradient))
    torch.testing.assert_close(result.norm, gradient.double().norm().float(), rtol=1e-6, atol=0)
    mixed = parameters(gradient, torch.full((10,), 3e3))
    assert math.isfinite(float(GlobalNorm(1.0)(mixed).norm))


def test_complex_gradients() -> None:
    given = parameters(torch.complex(torch.randn(5), torch.randn(5)))
    expected = torch.view_as_real(given[0].grad.clone()).norm()  # type: ignore[union-attr]
    torch.testing.assert_close(GlobalNorm(0.1)(given).norm, expected)


def test_per_parameter_bounds_each() -> None:
    given = some(scale=3.0)
    before = [p.grad.clone() for p in given if p.grad is not None]
    result = PerParameter(0.5)(given)
    torch.testing.assert_close(result.norm, torch.cat([g.flatten() for g in before]).norm())
    for parameter, gradient in zip(given, before, strict=True):
        assert parameter.grad is not None
        alone = nn.Parameter(torch.zeros_like(gradient))
        alone.grad = gradient
        nn.utils.clip_grad_norm_([alone], 0.5)
        torch.testing.assert_close(parameter.grad, alone.grad, rtol=1e-6, atol=0)


def test_previous_norm_follows_the_window_before() -> None:
    clip = PreviousNorm(1.0)
    first = of_norm(10.0)
    assert float(clip(first).norm) == 10.0
    assert float(first[0].grad) == pytest.approx(1.0, rel=1e-5)  # type: ignore[arg-type]
    second = of_norm(0.8)
    clip(second)
    assert float(second[0].grad) == pytest.approx(0.08, rel=1e-5)  # type: ignore[arg-type]
    third = of_norm(0.8)
    clip(third)
    assert torch.equal(third[0].grad, torch.tensor([0.8]))  # type: ignore[arg-type]


def test_a_percentile_of_the_window() -> None:
    clip = AdaptiveClip(percentile=90, window=10, warmup=10)
    for norm in range(1, 11):
        assert clip.limit is None
        given = of_norm(float(norm))
        assert clip(given).limit is None
        assert torch.equal(given[0].grad, torch.tensor([float(norm)]))  # type: ignore[arg-type]
    assert clip.limit == 9.0
    given = of_norm(100.0)
    result = clip(given)
    assert result.limit == 9.0
    assert float(result.norm) == 100.0
    assert result.value == 100.0
    assert float(given[0].grad) == pytest.approx(9.0, rel=1e-5)  # type: ignore[arg-type]
    assert max(clip.state_dict()["norms"]) == 18.0, "an outlier is entered as twice the limit"


@pytest.mark.parametrize("kind", [{"percentile": 90, "window": 50}, {"deviations": 3.0, "decay": 0.95}])
def test_a_single_outlier_moves_the_limit_little(kind: dict[str, Any]) -> None:
    clip = AdaptiveClip(**kind)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        clip(of_norm(1.0 + 0.1 * float(torch.rand((), generator=generator))))
    before = clip.limit
    assert before is not None
    clip(of_norm(1e6))
    assert clip.limit is not None
    assert before * 0.99 <= clip.limit < before * 2


@pytest.mark.parametrize("kind", [{"percentile": 90, "window": 50}, {"deviations": 3.0, "decay": 0.95}])
def test_an_outlier_among_the_first_steps_does_not_count(kind: dict[str, Any]) -> None:
    clip = AdaptiveClip(warmup=10, **kind)
    for norm in (1e6, 1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 0.8, 1.0, 1.1):
        clip(of_norm(norm))
    assert clip.limit is not None
    assert clip.limit < 3.0


@pytest.mark.parametrize("kind", [{"percentile": 90, "window": 50}, {"deviations": 3.0, "decay": 0.95}])
def test_a_lasting_change_is_followed(kind: dict[str, Any]) -> None:
    clip = AdaptiveClip(warmup=10, **kind)
    for _ in range(30):
        clip(of_norm(1.0))
    for _ in range(150):
        clip(of_norm(100.0))
    assert clip.limit is not None
    assert clip.limit >= 100.0


def test_the_first_limit_holds_until_the_warmup_is_over() -> None:
    clip = AdaptiveClip(warmup=3, first=2.0)
    for _ in range(3):
        assert clip(of_norm(50.0)).limit == 2.0
    assert clip.limit == 4.0, "entered as twice the limit that held"


@pytest.mark.parametrize("kind", [{"percentile": 50}, {"deviations": 1.0}])
def test_norms_of_zero_do_not_lock_the_limit_at_zero(kind: dict[str, Any]) -> None:
    clip = AdaptiveClip(warmup=2, **kind)
    for _ in range(20):
        clip(of_norm(0.0))
    given = of_norm(1.0)
    clip(given)
    assert torch.equal(given[0].grad, torch.tensor([1.0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_bit_for_bit(kind: Callable[[], Clip]) -> None:
    def train(clip: Clip, seeds: range) -> list[Any]:
        found: list[Any] = []
        for seed in seeds:
            given = some(seed, scale=1 + seed % 5)
            result = clip(given)
            found += [result.norm, result.limit, *(p.grad for p in given)]
        return found

    whole, half = kind(), kind()
    expected = train(whole, range(30))[15 * 5 :]
    train(half, range(15))
    resumed = kind()
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))  # plain numbers, whole in text
    got = train(resumed, range(15, 30))
    assert len(got) == len(expected) > 0
    for mine, other in zip(got, expected, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def test_a_state_of_another_kind_is_refused() -> None:
    state = AdaptiveClip(percentile=50).state_dict()
    for clip in (AdaptiveClip(deviations=1.0), PreviousNorm(1.0), GlobalNorm(1.0)):
        with pytest.raises(GradstowError, match="Resume"):
            clip.load_state_dict(state)


def test_what_may_be_given_as_clip() -> None:
    assert Clip.of(None) is None
    found = Clip.of(1)
    assert isinstance(found, GlobalNorm)
    assert found.max_norm == 1.0
    assert Clip.of(found) is found
    for wrong in ("1.0", True, torch.tensor(1.0)):
        with pytest.raises(GradstowError, match="no clipping"):
            Clip.of(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"percentile": 0},
        {"percentile": 101},
        {"percentile": 90, "deviations": 2.0},
        {"deviations": -1.0},
        {"decay": 1.0},
        {"warmup": 0},
        {"warmup": 200, "window": 100},
        {"outlier": 1.0},
        {"first": 0.0},
        {"norm_type": 0},
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GradstowError):
        AdaptiveClip(**wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, True, "1"])
def test_limits_that_mean_nothing_are_refused(wrong: Any) -> None:
    for kind in (GlobalNorm, PerParameter, PreviousNorm):
        with pytest.raises(GradstowError, match="positive"):
            kind(wrong)


@pytest.mark.gpu
def test_on_a_gpu_beside_the_cpu(device: str) -> None:
    given = [*some(), *(nn.Parameter(p.detach().to(device)) for p in some())]
    for parameter in given[3:]:
        parameter.grad = torch.ones_like(parameter)
    result = GlobalNorm(0.1)(given)
    total = torch.cat([p.grad.flatten().cpu() for p in given if p.grad is not None]).norm()
    assert float(total) == pytest.approx(0.1, rel=1e-4)
    assert math.isfinite(float(result.norm))
