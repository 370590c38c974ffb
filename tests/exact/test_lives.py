"""Longer lives: a thousand steps, threads, two players, interrupts, torch's own checkpointing, warnings."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradstow as gs
from equality import Seen, differences, state
from gradstow._stow import is_stowed, plan_of
from models import Broken
from twins import POLICIES, assert_equal_twins, data, steps

pytestmark = pytest.mark.usefixtures("guessed_costs")


def whole() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 16, sparse=True), nn.GRU(16, 16)
        self.last = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, :4].abs() * 10).long().clamp(max=19)
        return self.last(self.rnn(self.words(ids))[0])


class Asking(nn.Module):
    """Recorded, not rehearsed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if h.sum() < -1e9:
            h = h * 2
        return self.last(torch.exp(h))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "whole": whole,
    "broken": lambda: Broken("break"),
    "recurrent": Recurrent,
    "recorded": Asking,
}


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live() -> int:
    """Bytes of all real tensors that Python can still see."""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and not isinstance(item, torch._subclasses.FakeTensor):
            storage = item._values().untyped_storage() if item.is_sparse else item.untyped_storage()
            found[storage._cdata] = storage.nbytes() if storage.device.type == "cpu" else 0
    return sum(found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_steps_do_not_grow(kind: str) -> None:
    model, x = gs.stow(KINDS[kind](), policy="recompute-all"), data(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run(count: int) -> tuple[int, int]:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return live(), resident()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradstow")
        tensors, before = run(200)
        more, after = run(1000)
    assert more == tensors
    assert after - before <= 3 << 20
    assert is_stowed(model)


class Numbers(Asking):
    """A Python number that the graph holds as a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h * h.abs().max().item())


def test_a_model_that_never_stops_making_graphs_runs_plain_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstow._run._MOST_GRAPHS", 6)
    use = steps(lambda m, step: m(data(8, 16, seed=step)).square().mean(), 14)
    with pytest.warns(UserWarning, match=r"more than 6 new graphs.*as plain PyTorch, outside of any budget"):
        assert_equal_twins(Numbers, use)


def test_models_in_threads() -> None:
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(3)]
    stowed = [gs.stow(copy.deepcopy(model), policy="recompute-all") for model in plain]
    use, found, errors = steps(lambda m, step: m(data(8, 16, seed=step)).square().mean()), {}, []

    def train(number: int) -> None:
        try:
            found[number] = [pair for pair in use(stowed[number]) if "random" not in pair[0]]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, model in enumerate(plain):
        expected = [pair for pair in use(model) if "random" not in pair[0]]
        assert differences(expected, found[number]) == []
        assert plan_of(stowed[number]) is not None


def test_one_model_in_a_thread_of_its_own() -> None:
    """Planned in one thread, run in another: a loader's or a trainer's."""

    def use(model: nn.Module) -> Seen:
        seen: Seen = []
        for step in range(4):

            def run(step: int = step) -> None:
                model.zero_grad(set_to_none=True)
                model(data(8, 16, seed=step)).square().mean().backward()

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            seen += state(model, f"step {step}")
        return seen

    assert_equal_twins(lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)), use)


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        self.judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))


def test_two_players_take_turns() -> None:
    torch.manual_seed(0)
    found = []
    first = Players()
    for stow in (False, True):
        players = copy.deepcopy(first)
        if stow:
            gs.stow(players.maker, policy="recompute-all")
            gs.stow(players.judge, policy="recompute-all")
        torch.manual_seed(1)
        found.append(_play(players))
    assert differences(*found) == []


def _play(players: Players) -> Seen:
    make = torch.optim.Adam(players.maker.parameters(), 1e-2)
    judge = torch.optim.Adam(players.judge.parameters(), 1e-2)
    seen: Seen = []
    for step in range(4):
        real, noise = data(8, 6, seed=step), torch.randn(8, 8)
        judge.zero_grad()
        made = players.maker(noise)
        loss = players.judge(real).sub(1).square().mean() + players.judge(made.detach()).square().mean()
        loss.backward()
        judge.step()
        make.zero_grad()
        players.judge.requires_grad_(False)
        players.judge(made).sub(1).square().mean().backward()
        players.judge.requires_grad_(True)
        make.step()
        seen += [(f"loss {step}", loss.detach().clone()), *state(players, f"step {step}")]
    return seen


class Interrupts(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["whole", "broken"])
@pytest.mark.parametrize("step", [0, 2])
def test_an_interrupt_in_the_backward(kind: str, step: int) -> None:
    """In the loss, and in a hook between the model's parts; what was there before is there again."""

    def use(model: nn.Module) -> Seen:
        seen: Seen = []
        for number in range(4):
            model.zero_grad(set_to_none=True)
            output = model(data(8, 16, seed=number))
            if number == step:
                output = Interrupts.apply(output)
            try:
                output.square().mean().backward()
            except KeyboardInterrupt:
                assert number == step
            del output
            seen += state(model, f"step {number}")
        return seen

    before = live()
    model = assert_equal_twins(KINDS[kind], use)
    assert is_stowed(model)
    model.zero_grad(set_to_none=True)
    del model
    assert live() <= before + 256


class Checkpointed(nn.Module):
    """Some parts under torch's own checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number == 1 else x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_torchs_own_checkpointing_in_parts(policy: str, reentrant: bool) -> None:
    use = steps(lambda m, step: m(data(8, 16, seed=step)).square().mean())
    assert_equal_twins(lambda: Checkpointed(reentrant), use, policy)


def test_warnings_name_the_line_that_called_the_model() -> None:
    model = gs.stow(Asking(), policy="recompute-all")
    with pytest.warns(UserWarning, match="recorded as it runs") as said:
        model(data(8, 16)).square().mean().backward()
    assert {warning.filename for warning in said} == {__file__}
