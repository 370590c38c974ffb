"""Random numbers of Python and NumPy in the forward: the same numbers and streams as in plain, in every step."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradstow as gs
from equality import Seen, differences, state
from gradstow._stow import is_stowed, plan_of
from twins import data

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))


class DropsLayers(Blocks):
    def draw(self) -> float:
        return random.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.draw() < 0.5:
                x = x + block(x)
        return self.last(x)


class DropsByNumPy(DropsLayers):
    def draw(self) -> float:
        return np.random.rand()


class DropsByTorch(DropsLayers):
    def draw(self) -> float:
        return torch.rand(())  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class DropsOwnBlocks(DropsLayers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))


class Scales(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * random.uniform(0.5, 1.5)
        for block in self.blocks:
            x = x + block(x) * random.random()
        return self.last(x) * random.gauss(1, 0.1)


class Picks(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[random.randint(0, 2)](self.first(x))
        return self.last(x * random.choice([0.5, 1.0]))


class Shuffles(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, order = self.first(x), [0, 1, 2]
        random.shuffle(order)
        for number in order + random.sample([0, 1, 2], 1):
            x = self.blocks[number](x)
        return self.last(x)


class Branches(Blocks):
    """Draws before anything else runs, and counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        which = np.random.rand()
        self.calls += 1
        x = torch.tanh(self.first(x)) if which < 0.5 else torch.relu(self.first(x))
        return self.last(x)


class OwnGenerators(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * float(self.numpy.random()) * self.python.random()
        return self.last(self.blocks[0](x)) * self.python.uniform(1, 2)


class Masks(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.from_numpy((np.random.rand(16) < 0.5).astype(np.float32))
        return self.last(self.blocks[0](self.first(x) * mask) * torch.rand(16))


class Seeds(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return self.last(self.blocks[0](self.first(x)) * torch.rand(16))


KINDS = [
    DropsLayers, DropsByNumPy, DropsByTorch, DropsOwnBlocks, Scales, Picks, Shuffles, Branches, OwnGenerators, Masks,
    Seeds,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    """Leave Python's and NumPy's streams as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def _train(model: nn.Module, count: int) -> Seen:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    seen: Seen = []
    for step in range(count):
        optimizer.zero_grad(set_to_none=True)
        loss = model(data(6, 8, seed=step)).square().mean()
        loss.backward()
        seen += [(f"loss {step}", loss.detach().clone()), *state(model, f"step {step}")]
        streams: Any = [random.getstate()[1], np.random.get_state()[1], [np.random.get_state()[2]]]
        seen += [(f"stream {i} after step {step}", torch.tensor(s)) for i, s in enumerate(streams)]
        optimizer.step()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_random_forwards_are_equal(kind: type[Blocks]) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = gs.stow(copy.deepcopy(plain), policy="recompute-all")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradstow")
        assert differences(_train(plain, 10), _train(model, 10)) == []
    assert is_stowed(model)
    plan = plan_of(model)
    assert plan is not None
    assert getattr(plain, "calls", 0) == getattr(model, "calls", 0)
    assert gs.unstow(model)._compiled_call_impl is None
    assert all(m._compiled_call_impl is None for m in model.modules())


def test_graphs_that_change_for_ever_are_planned_alone_and_said_once() -> None:
    model = gs.stow(Picks(), policy="recompute-all")
    with pytest.warns(UserWarning, match="gradstow") as said:
        _train(model, 12)
    texts = [str(w.message) for w in said]
    assert sum("recorded as it runs" in t for t in texts) <= 2
    assert sum("other graphs from step to step" in t for t in texts) == 1


class Wide(nn.Module):
    """Another graph in every step: a number from NumPy is a constant in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x) * float(np.random.rand()))


def test_graphs_that_change_for_ever_come_near_the_budget(device: str) -> None:
    """Each graph gets its share; what lies between two graphs (torch 2.13 makes two of it) comes on top."""
    model, x = Wide().to(device), data(1024, 64).to(device)
    with gs.measure_peak(device) as memory:
        model(x).square().mean().backward()
    plain = memory.peak_bytes
    model.zero_grad(set_to_none=True)
    gs.stow(model, "70%")
    peaks = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradstow")
        for _ in range(8):
            with gs.measure_peak(device) as memory:
                model(x).square().mean().backward()
            peaks.append(memory.peak_bytes)
            model.zero_grad(set_to_none=True)
    assert max(peaks[5:]) <= 0.8 * plain
