"""Parts that no captured graph holds run as plain PyTorch between the planned ones, are counted and are listed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gradstow as gs
from gradstow._stow import plan_of
from twins import POLICIES, assert_equal_twins, data, steps


class Sequences(nn.Module):
    """A recurrent module between two planned parts."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, width: int = 16, **options: object) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(width, width), kind(width, width, batch_first=True, **options)
        self.last = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.rnn(torch.tanh(self.first(x)))
        return self.last(torch.tanh(h))


class Stacked(nn.Module):
    """Several in a loop, each with what follows it, and the last state of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(3))
        self.mixes = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for rnn, mix in zip(self.rnns, self.mixes, strict=True):
            h, state = rnn(x, state)
            x = x + mix(h)
        return torch.cat([x, state.transpose(0, 1)], 1)


class TakesFirst(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0]


class Packed(Sequences):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(torch.tanh(self.first(x)), torch.tensor([6, 4, 1]), batch_first=True)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.last(torch.tanh(h))


class Filled(Sequences):
    """Writes what the recurrent module made into a tensor from before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(3, 6, 32)
        for half in range(2):
            h, _ = self.rnn(torch.tanh(self.first(x)))
            out[..., 16 * half : 16 * half + 16] = h * (1 + half)
        return self.last(out)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.LSTMCell(16, 16), nn.GRUCell(16, 16), nn.RNNCell(16, 16)
        self.last = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, h, g = None, None, None
        for step in range(3):
            state = self.one(x[:, step], state)
            h = self.two(state[0], h)
            g = self.three(h, g)
        return self.last(g)


class Checkpointed(Sequences):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda x: self.rnn(x)[0], torch.tanh(self.first(x)), use_reentrant=False)
        return self.last(torch.tanh(h))


class Frozen(Sequences):
    """A recurrent part without gradients, and one inside of an autocast block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            frozen, _ = self.rnn(h)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.last[0](h + frozen)
            h, _ = self.rnn(torch.tanh(h))
            h = self.last[1](h)
        return self.last[2](h.float())

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))


class Direct(Sequences):
    """The op itself, without its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(1, len(x), 16)
        weights = self.rnn._flat_weights
        h, *_ = torch.lstm(self.first(x), (zeros, zeros), weights, True, 1, 0.0, self.training, False, True)
        return self.last(torch.tanh(h))


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Sequences,
    "GRU": lambda: Sequences(nn.GRU),
    "RNN": lambda: Sequences(nn.RNN, nonlinearity="relu"),
    "two layers, both ways, dropout": lambda: Sequences(num_layers=2, bidirectional=True, dropout=0.3),
    "projected": lambda: Sequences(nn.LSTM, proj_size=8),
    "in a loop": Stacked,
    "in a Sequential": lambda: nn.Sequential(
        nn.Linear(16, 16), nn.LSTM(16, 16, batch_first=True), TakesFirst(), nn.Linear(16, 4)
    ),
    "packed": Packed,
    "into a buffer": Filled,
    "cells": Cells,
    "checkpointed": Checkpointed,
    "without gradients, and in bfloat16": Frozen,
    "the op itself": Direct,
}


def ready(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """With lazy layers settled."""

    def made() -> nn.Module:
        model = make()
        model(data(3, 6, 16))
        return model

    return made


@pytest.mark.usefixtures("guessed_costs")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_modules(kind: str, policy: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if kind == "packed" else "error", message="gradstow")
        use = steps(lambda m, step: m(data(3, 6, 16, seed=step)).square().mean())
        model = assert_equal_twins(ready(RECURRENT[kind]), use, policy)
    plan = plan_of(model)
    assert plan is not None
    if kind != "packed":
        cuts = [b for b in plan.graph.breaks if "runs as plain PyTorch" in b.reason]
        assert cuts
        assert all(("test_structures.py:" in b.source) == (kind != "in a Sequential") for b in cuts)


class Words(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Embedding, **options: object) -> None:
        super().__init__()
        self.words, self.last = kind(20, 16, sparse=True, **options), nn.Sequential(nn.Linear(16, 16), nn.GELU())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.words(ids)))


class Tied(Words):
    """Two lookups in one table, whose sparse gradients are added."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.words(ids)) + self.words(ids.flip(1)))


class Graphed(nn.Module):
    """A sparse adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.x = nn.Parameter(torch.randn(3, 16))
        edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
        self.register_buffer("edges", torch.sparse_coo_tensor(edges, torch.ones(4), (3, 3)).coalesce())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(torch.sparse.mm(self.edges, torch.tanh(self.first(self.x)))))


SPARSE: dict[str, Callable[[], nn.Module]] = {
    "Embedding": Words,
    "padded": lambda: Words(padding_idx=3),
    "EmbeddingBag": lambda: Words(nn.EmbeddingBag, mode="sum"),
    "two lookups": Tied,
    "adjacency": Graphed,
}
IDS = torch.tensor([[3, 5, 5, 0], [1, 3, 19, 7], [2, 2, 2, 2]])


@pytest.mark.usefixtures("guessed_costs")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_and_tensors(kind: str, policy: str) -> None:
    model = assert_equal_twins(SPARSE[kind], steps(lambda m, _: m(IDS).square().mean()), policy)
    plan = plan_of(model)
    assert plan is not None
    assert any("sparse" in b.reason for b in plan.graph.breaks)


def test_sparse_gradients_stay_sparse() -> None:
    model = gs.stow(Words(), policy="recompute-all")
    for _ in range(2):  # the second one is added to the first
        model(IDS).square().mean().backward()
    grad = model.words.weight.grad
    assert grad.is_sparse
    assert not grad.is_coalesced()


def _wide(kind: type[nn.RNNBase]) -> nn.Module:
    def mixes() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))

    return nn.Sequential(
        nn.Embedding(500, 64, sparse=True), mixes(), kind(64, 64, batch_first=True), TakesFirst(), mixes()
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_budget_holds_around_them(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    plain, ids = _wide(kind), torch.arange(640).view(32, 20) % 500
    model = copy.deepcopy(plain)
    budget = "75%"
    plan = gs.plan(model, ids, loss=lambda out, _: out.square().mean(), budget=budget)
    assert plan.rerun_ops > 0
    assert plan.graph.outside_bytes > 0
    gs.stow(model, plan=plan)
    for first in (True, False):
        found = []
        for twin in (plain, model):
            twin.zero_grad(set_to_none=True)
            with gs.measure_peak("cpu") as memory:
                twin(ids).square().mean().backward()
            found.append([p.grad.to_dense() for p in twin.parameters()])
        if not first:
            assert memory.peak_bytes <= plan.predicted_step_peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
