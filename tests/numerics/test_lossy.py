"""Lossy codes: the stated bound holds on everything, inf and NaN survive, and rounding is right on average."""

from __future__ import annotations

import pytest
import torch

from gradstow import _lossy
from gradstow._codes import CODES, GROUP
from gradstow._lossy import code_nbytes, decode_lossy, encode_lossy

INTEGERS = [name for name, code in CODES.items() if code.of_range]
KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BIG = 3.0e38


def _noise(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size)))


VALUES = {
    "empty": torch.empty(0, 3),
    "one number": torch.tensor(1.25),
    "noise": _noise(37, 61),
    "several chunks": _noise(2048 * GROUP + 77),
    "transposed": _noise(60, 35).t(),
    "channels last": _noise(2, 5, 7, 9).to(memory_format=torch.channels_last),
    "zeros": torch.zeros(3, 200),
    "rows of zeros": _noise(8, 256) * torch.tensor([0.0, 1.0] * 4).unsqueeze(1),
    "all the same": torch.full((500,), -7.3),
    "far from zero": 1e4 + _noise(1000),
    "one huge outlier": torch.cat([_noise(500), torch.tensor([6e4]), _noise(500)]),
    "tiny": _noise(1000) * 1e-39,
    "ReLU": _noise(1000).relu(),
    "probabilities": _noise(20, 50).softmax(-1),
}
WIDE = {"the whole range": torch.linspace(-1, 1, 1000) * BIG, "largest": torch.full((300,), torch.finfo().max)}
WIDE |= {f"largest {t}": torch.full((300,), torch.finfo(t).max, dtype=t) for t in (torch.float16, torch.bfloat16)}


# as bf16 the short types gain nothing, and float64 reaches further: never offered
PAIRS = [(name, t) for name in CODES for t in KINDS if name != "bf16" or t == torch.float32]


def again(x: torch.Tensor, name: str) -> torch.Tensor:
    data = encode_lossy(x, name)
    assert data.dtype == torch.uint8
    assert data.numel() == code_nbytes(name, x.numel(), x.dtype)
    got = decode_lossy(data, name, list(x.shape), list(x.stride()), x.dtype)
    assert (got.shape, got.stride(), got.dtype) == (x.shape, x.stride(), x.dtype)
    return got


def groups(x: torch.Tensor) -> torch.Tensor:
    """Rows of neighbours in memory, the last filled up with its last number, as float64."""
    flat = x.as_strided((x.numel(),), (1,)).double()
    missing = -len(flat) % GROUP
    return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, GROUP)


def largest_error(x: torch.Tensor, name: str) -> torch.Tensor:
    """What the code's bound allows for each number, in groups; rounding to the tensor's own type comes on top."""
    code, rows = CODES[name], groups(x)
    finite = rows.isfinite()
    low = torch.where(finite, rows, float("inf")).amin(1, keepdim=True)
    high = torch.where(finite, rows, -float("inf")).amax(1, keepdim=True)
    size = torch.where(finite, rows, 0).abs()
    eps = torch.finfo(x.dtype).eps * 2
    if not code.of_range:
        return size * code.bound + size.amax(1, keepdim=True) * 2.0**-30 + 1e-38
    steps = torch.where(finite.all(1, keepdim=True), code.levels, max(code.levels - 3, 0.5))
    return ((high - low) / steps).clamp(min=0) * 1.0001 + size.amax(1, keepdim=True) * eps + 1e-37


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("values", VALUES)
def test_the_bound_holds(values: str, name: str, dtype: torch.dtype) -> None:
    x = VALUES[values].to(dtype)
    got = again(x, name)
    if x.numel():
        error = (groups(got) - groups(x)).abs()
        assert bool((error <= largest_error(x, name)).all())
        assert values != "noise" or bool(error.max() > 0.2 * largest_error(x, name).max()), "it changes nothing"


@pytest.mark.parametrize(
    ("values", "name"), [(values, name) for values, x in WIDE.items() for name in CODES if (name, x.dtype) in PAIRS]
)
def test_nothing_overflows(values: str, name: str) -> None:
    x = WIDE[values]
    got = again(x, name)
    assert bool(got.isfinite().all())
    assert bool(((groups(got) - groups(x)).abs() <= largest_error(x, name)).all())


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_inf_and_nan_survive(name: str, dtype: torch.dtype) -> None:
    x = _noise(10, GROUP).to(dtype)
    x[1, 3], x[2, 5], x[3, 7], x[9, 127] = float("inf"), -float("inf"), float("nan"), float("nan")
    x[4], x[5], x[6] = float("nan"), float("inf"), -float("inf")
    got = again(x, name)
    special = ~x.isfinite()
    assert torch.equal(got[special], x[special]) or bool((got[special].isnan() == x[special].isnan()).all())
    assert torch.equal(got.nan_to_num(0, 1, -1)[special], x.nan_to_num(0, 1, -1)[special])
    error = (groups(got) - groups(x)).abs()
    assert bool((error <= largest_error(x, name))[~special].all())


@pytest.mark.parametrize("name", INTEGERS)
def test_rounding_is_right_on_average(name: str) -> None:
    x = _noise(4, GROUP)
    _lossy.seed(0)
    runs = torch.stack([again(x, name) for _ in range(4000)])
    step = (groups(x).amax(1) - groups(x).amin(1)) / CODES[name].levels
    spread = step.view(4, 1).float() / 2 / 4000**0.5
    assert bool(((runs.mean(0) - x).abs() < 5 * spread).all())
    assert not torch.equal(runs[0], runs[1])


def test_the_same_seed_gives_the_same_numbers_and_the_users_streams_stay() -> None:
    x = _noise(1000)
    before = torch.get_rng_state()
    _lossy.seed(7)
    first, second = again(x, "int4"), again(x, "int4")
    _lossy.seed(7)
    assert torch.equal(again(x, "int4"), first)
    assert torch.equal(again(x, "int4"), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes() -> None:
    numbers = 1 << 20
    found = {name: code_nbytes(name, numbers, torch.float32) * 8 / numbers for name in CODES}
    assert found == {"int2": 2.5, "int4": 4.5, "fp8": 8.25, "int8": 8.5, "bf16": 16.0}


def test_data_of_another_length_is_refused() -> None:
    data = encode_lossy(_noise(200), "int4")
    with pytest.raises(ValueError, match="int4 do not fit 300 elements"):
        decode_lossy(data, "int4", [300], [1], torch.float32)


@pytest.mark.parametrize("code", ["int2", "int4", "int8"])
def test_the_ends_of_the_widest_type_stay_finite(code: str) -> None:
    most = torch.finfo(torch.float64).max
    x = torch.tensor([most, -most, 0.0, 1.0] * 64, dtype=torch.float64)
    again = decode_lossy(encode_lossy(x, code), code, [256], [1], x.dtype)
    assert again.isfinite().all()
