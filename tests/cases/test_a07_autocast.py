"""A7. Recompute in another autocast dtype: what is made again has the dtype of the first pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twins import POLICIES, assert_equal_twins, data, steps


class Nested(nn.Module):
    """One part opts out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(self.exact(h.float()))
        return self.last(h)


def _loss(model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype):
        output = model(data(8, 16))
    return output.float().square().mean()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nested_part_without_autocast(dtype: torch.dtype, policy: str) -> None:
    assert_equal_twins(Nested, steps(lambda m, _: _loss(m, dtype)), policy)


def test_another_dtype_in_the_next_step() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float16)
    assert_equal_twins(Nested, steps(lambda m, step: _loss(m, dtypes[step])))
