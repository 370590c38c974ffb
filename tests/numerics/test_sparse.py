"""Sparse codes: bit-equal whatever the numbers are, of the planned size, and what does not fit waits elsewhere."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest
import torch

from gradstow.offload import _sparse, decode_sparse, encode_sparse, sparse_nbytes, spill_sparse, store_in

KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    code = encode_sparse(x)
    assert code.nbytes == sparse_nbytes(x.numel(), x.element_size())
    ticket = spill_sparse(x, code)
    return decode_sparse(code, ticket, list(x.shape), list(x.stride()), x.dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(kind)


def with_zeros(shape: tuple[int, ...], share: float, kind: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    return x.masked_fill(torch.rand(shape, generator=generator) < share, 0.0).to(kind)


@pytest.mark.filterwarnings("ignore:gradstow")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.45, 0.3, 0.0])
@pytest.mark.parametrize("numel", [1, 7, 8, 129, 1000, (1 << 18) + 3, (1 << 19) + 100])
def test_bits_come_back(numel: int, share: float, kind: torch.dtype) -> None:
    x = with_zeros((numel,), share, kind)
    assert torch.equal(bits(there_and_back(x)), bits(x))


@pytest.mark.filterwarnings("ignore:gradstow")
def test_layouts_and_numbers_that_are_no_numbers() -> None:
    x = with_zeros((4, 6, 10, 10), 0.5).to(memory_format=torch.channels_last)
    x[0, 0] = float("nan")
    x[0, 1] = -0.0
    x[0, 2], x[0, 3] = float("inf"), -float("inf")
    again = there_and_back(x)
    assert again.stride() == x.stride()
    assert torch.equal(bits(again), bits(x))
    assert torch.equal(bits(there_and_back(x.transpose(0, 3))), bits(x.transpose(0, 3)))


def test_what_fits_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sparse._ops, "put_away", None)
    x = with_zeros((1 << 19,), 0.5)
    assert torch.equal(there_and_back(x), x)


def test_what_does_not_fit_is_said_once_and_given_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sparse, "_said", False)
    x = with_zeros((1 << 20,), 0.0)
    code = encode_sparse(x)
    with pytest.warns(UserWarning, match="fewer zeros than its code counts on: 50 % of it fit"):
        ticket = spill_sparse(x, code)
    before = store_in("disk").used_bytes
    assert before >= x.nbytes // 2 - 4096
    for _ in range(2):
        assert torch.equal(decode_sparse(code, ticket, [1 << 20], [1], x.dtype), x)
    del ticket
    gc.collect()
    assert store_in("disk").used_bytes < before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there_and_back(x)


def test_where_no_file_can_be_written_it_stays_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_sparse, "_PLACES", {"cpu": f"disk:{tmp_path / 'none'}"})
    monkeypatch.setattr(_sparse, "_said", True)
    x = with_zeros((1 << 20,), 0.0)
    with pytest.warns(UserWarning, match="stay in memory beyond the budget"):
        again = there_and_back(x)
    assert torch.equal(again, x)


def test_a_code_of_zero_bytes_is_a_typical_one() -> None:
    """So the cost table times decoding with it."""
    code = torch.zeros(sparse_nbytes(1000, 4), dtype=torch.uint8)
    calls = []
    original = torch.Tensor.masked_scatter_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "masked_scatter_", lambda t, m, s: (calls.append(int(m.sum())), original(t, m, s))[1]
        )
        decode_sparse(code, torch.zeros(1, dtype=torch.int64), [1000], [1], torch.float32)
    assert calls == [500]
    with pytest.raises(ValueError, match="no sparse code"):
        decode_sparse(code, torch.zeros(1, dtype=torch.int64), [999], [1], torch.float64)
