"""A16: what is offloaded comes back with its own shape, strides and memory format, and once for all its views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradstow._stow import plan_of
from twins import assert_equal_twins, data, steps

SIZE = 48


class Square(torch.nn.Module):
    """A square value and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (x @ x.T) @ x


class Parts(Square):
    """Slices, every second row, an expanded row, and a transpose of one value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        rows = x[1:].sin() @ x[:, ::2]
        wide = x[:1].expand(SIZE - 1, SIZE) * x[1:].exp()
        return rows.sum() + (wide @ x.t().tanh()).square().mean() + x[::2].square().sum()


class Expanded(Square):
    """One row that stands for many: it costs what it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = self.linear(x)[:1].sin()
        return (row.expand(100 * SIZE, SIZE).sin() * row.expand(100 * SIZE, SIZE)).sum()


class SavedTwice(Square):
    """Two ops save one value, and a third its contiguous transpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        return x.square().sum() + (x * x.t().contiguous()).sin().sum() + (x @ x).sum()


class Images(torch.nn.Module):
    """Convolutions, in either memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))).transpose(2, 3)).square().mean((1, 2, 3))


def images(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = data(4, 3, 24, 24, seed=step)
    last = next(model.parameters()).is_contiguous(memory_format=torch.channels_last)
    return model(x.to(memory_format=torch.channels_last) if last else x).sum()


def square(model: torch.nn.Module, step: int) -> torch.Tensor:
    return model(data(SIZE, SIZE, seed=step)).sum()


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[torch.nn.Module, int], torch.Tensor]]] = {
    "square": (Square, square),
    "parts": (Parts, square),
    "expanded": (Expanded, square),
    "saved twice": (SavedTwice, square),
    "images": (Images, images),
    "channels last": (lambda: Images().to(memory_format=torch.channels_last), images),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_plain(name: str) -> None:
    make, loss = CASES[name]
    plan = plan_of(assert_equal_twins(make, steps(loss), "*=disk"))
    assert plan is not None
    rows = [row for row in plan.rows if row.decision == "offload"]
    assert rows, "something waits on disk"
    region, schedule = plan.graph.regions[0], plan.schedule.regions[0]
    again = [e.op for e in schedule.backward if getattr(e, "op", -1) >= 0 and region.ops[e.op].rerun is not None]
    assert len(again) == len(set(again)), "views of one value share what was fetched"


def test_an_expanded_value_costs_what_it_is() -> None:
    plan = plan_of(assert_equal_twins(Expanded, steps(square), "*=disk"))
    assert plan is not None
    assert max(row.nbytes for row in plan.rows if row.decision == "offload") <= 4 * SIZE * SIZE * 100
    row = next(row for row in plan.rows if row.op == "sin")
    assert row.nbytes == 4 * SIZE
