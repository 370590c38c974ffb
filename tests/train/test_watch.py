"""``Watch`` warns, once each and by name, of what keeps more memory than training needs; and of nothing else."""

from __future__ import annotations

import gc
import inspect
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradstow.train import _growth
from gradstow.train._growth import Growth
from gradstow.train._holders import name_holder
from gradstow.train._watch import Watch

KEPT_HERE: list[torch.Tensor] = []
Batch = tuple[torch.Tensor, torch.Tensor]


def make() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, (torch.randn(8, 16), torch.randint(0, 4, (8,)))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def said(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [w for w in caught if "gradstow" in str(w.message)]


def test_an_ordinary_loop_is_silent() -> None:
    model, batch = make()
    watch = Watch(model)

    def train() -> None:
        history = []
        for _ in range(40):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward()
            watch.end_step(loss)
            history.append(loss.item())
            history.append(loss.detach())

    assert not said(train)


def test_a_list_of_losses_is_named_with_the_line() -> None:
    model, batch = make()
    watch = Watch(model)

    def train() -> None:
        losses = []
        for _ in range(10):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward()
            watch.end_step(loss)
            losses.append(loss)

    (warning,) = said(train)
    assert "the list `losses` in train()" in str(warning.message)
    assert "loss.item()" in str(warning.message)
    lines, first = inspect.getsourcelines(train)
    assert warning.filename == __file__
    assert "begin_step" in lines[warning.lineno - first]


def test_a_running_sum_is_named() -> None:
    """Nobody holds the losses themselves: the sum's graph leads to them."""
    model, batch = make()
    watch = Watch(model)

    class Meter:
        total: Any = 0.0

    meter = Meter()

    def train() -> None:
        for _ in range(10):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward()
            watch.end_step(loss)
            meter.total = meter.total + loss

    (warning,) = said(train)
    assert "`total` of a Meter" in str(warning.message)


def test_an_output_that_the_model_keeps_is_named() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(16, 4), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.layer(x))
            return self.seen[-1]

    model, batch = Keeps(), make()[1]
    watch = Watch(model)

    def train() -> None:
        for _ in range(10):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward()
            watch.end_step(loss)

    (warning,) = said(train)
    assert "the list `seen` of a Keeps" in str(warning.message)


def test_garbage_in_a_cycle_is_no_holder() -> None:
    model, batch = make()
    watch = Watch(model)

    class Node:
        pass

    def train() -> None:
        gc.disable()
        try:
            for _ in range(20):
                watch.begin_step()
                loss = loss_of(model, batch)
                loss.backward()
                watch.end_step(loss)
                cycle = Node()
                cycle.me, cycle.loss = cycle, loss  # type: ignore[attr-defined]
        finally:
            gc.enable()

    assert not said(train)


def test_a_graph_retained_for_nothing_is_named_with_its_line() -> None:
    model, batch = make()
    watch = Watch(model)

    def train() -> None:
        for _ in range(5):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward(retain_graph=True)
            watch.end_step(loss)

    (warning,) = said(train)
    assert "no second backward came" in str(warning.message)
    lines, first = inspect.getsourcelines(train)
    line = first + next(i for i, text in enumerate(lines) if "retain_graph=True" in text)
    assert f"{__file__}:{line}" in str(warning.message)


def test_several_losses_on_one_graph_are_silent_and_right() -> None:
    model, batch = make()
    watch = Watch(model)

    def train() -> None:
        for _ in range(10):
            model.zero_grad()
            watch.begin_step()
            output = model(batch[0])
            first, second = nn.functional.cross_entropy(output, batch[1]), output.square().mean()
            first.backward(retain_graph=True)
            watch.end_step(first)
            second.backward()
            watch.end_step(second)

    assert not said(train)
    together = make()[0]
    output = together(batch[0])
    (nn.functional.cross_entropy(output, batch[1]) + output.square().mean()).backward()
    for ours, theirs in zip(model.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_a_graph_used_again_in_the_next_step_is_not_retained_for_nothing() -> None:
    """Truncated backpropagation through time, over two steps."""
    cell, x = nn.RNNCell(4, 4), torch.randn(2, 4)
    watch = Watch(cell)

    def train() -> None:
        state = torch.zeros(2, 4)
        for _ in range(12):
            watch.begin_step()
            before, state = state, cell(x, state)
            loss = state.square().mean()
            last = before.grad_fn is not None
            loss.backward(retain_graph=not last)
            watch.end_step(loss)
            if last:
                state = state.detach()

    assert not [w for w in said(train) if "no second backward" in str(w.message)]


def test_memory_that_grows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make()
    KEPT_HERE.clear()
    # the resident set itself grows late where the process has given memory back before
    monkeypatch.setattr(_growth, "_allocated", lambda _device: 10**8 + sum(t.nbytes for t in KEPT_HERE))
    watch = Watch(model)

    def train() -> None:
        for _ in range(80):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward()
            watch.end_step(loss)
            KEPT_HERE.append(torch.ones(1 << 18))

    try:
        (warning,) = said(train)
    finally:
        KEPT_HERE.clear()
    assert "memory grows by 1.0 MiB each step" in str(warning.message)
    assert "the list `KEPT_HERE`" in str(warning.message)
    assert "(262144,)" in str(warning.message)


def test_the_resident_set_is_read() -> None:
    psutil = pytest.importorskip("psutil")
    assert _growth._allocated(torch.device("cpu")) == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_tensors_are_counted_only_where_memory_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    level = [0]
    monkeypatch.setattr(_growth, "_allocated", lambda _device: level[0])
    monkeypatch.setattr(_growth, "_storages", lambda _device: walks.append(1) or {})
    quiet = Growth(nn.Linear(2, 2))
    for step in range(1, 5000):
        level[0] = 10**9 + step % 7 * 10**5  # goes up and down
        assert quiet.look(step) is None
    assert not walks
    rising = Growth(nn.Linear(2, 2))
    for step in range(1, 200):
        level[0] += 1 << 20
        rising.look(step)
    assert walks, "a look that never comes would make the test above worth nothing"


@pytest.mark.parametrize("stowed", [False, True])
def test_through_a_stowed_model(stowed: bool) -> None:
    import gradstow as gs

    model, batch = make()
    if stowed:
        gs.stow(model, policy="store-all")
    watch = Watch(model)

    def train(keep: bool) -> None:
        losses = []
        for _ in range(6):
            watch.begin_step()
            loss = loss_of(model, batch)
            loss.backward()
            watch.end_step(loss)
            if keep:
                losses.append(loss)

    assert not said(lambda: train(False))
    assert len(said(lambda: train(True))) == 1


def test_what_is_no_loss_is_left_alone() -> None:
    watch = Watch(make()[0])
    for loss in (None, 1.5, torch.tensor(1.0)):
        watch.begin_step()
        watch.end_step(loss)


def test_a_step_costs_next_to_nothing() -> None:
    model, batch = make()
    watch = Watch(model)
    spent = []
    for _ in range(600):
        loss = loss_of(model, batch)
        loss.backward()
        start = time.perf_counter()
        watch.begin_step()
        watch.end_step(loss)
        spent.append(time.perf_counter() - start)
    assert sorted(spent)[len(spent) // 2] < 100e-6  # 50 µs are meant; a busy machine is forgiven the rest


class _Slots:
    __slots__ = ("held",)


def test_holders_have_names() -> None:
    class Thing:
        pass

    item, owner, slots = Thing(), Thing(), _Slots()
    owner.attribute = {"deep": [item]}  # type: ignore[attr-defined]

    def find(target: list[Any]) -> str:
        return name_holder(target.pop())

    text = find([item])
    assert "variable `item` in test_holders_have_names()" in text
    target = [item]
    del item
    assert "the dict `attribute` of a Thing, 1 items" in find(target)
    slots.held = Thing()
    assert "`held` of a _Slots" in find([slots.held])
