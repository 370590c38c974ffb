"""The optimizer inside the backward: the ordinary step's numbers bit for bit, in less memory; and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._errors import GradstowError
from gradstow._stow import plan_of
from gradstow.ir import Deliver
from gradstow.train._clip import AdaptiveClip, Clip, GlobalNorm, PerParameter, PreviousNorm
from gradstow.train._inside import check_inside, optimize_inside

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=1, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mix = nn.MultiheadAttention(size, heads, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        x = x + self.mix(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class SmallViT(nn.Module):
    """Patches, a class token, positions whose gradient others see as theirs, and a decoder tied to the first layer."""

    def __init__(self, size: int = 32, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(49, size, bias=False)
        self.positions = nn.Parameter(0.02 * torch.randn(16, size))
        self.blocks = nn.Sequential(*(Block(size, heads) for _ in range(depth)))
        self.head = nn.Linear(size, 10)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cut = x.unfold(-2, 7, 7).unfold(-2, 7, 7).reshape(len(x), 16, 49)
        hidden = self.blocks(self.patches(cut) + self.positions)
        return self.head(hidden.mean(1)), (hidden @ self.patches.weight - cut).square().mean()


def make(size: int = 32, depth: int = 2) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return SmallViT(size, depth), (torch.randn(4, 1, 28, 28), torch.randint(0, 10, (4,)))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    output, rebuilt = model(batch[0])
    return nn.functional.cross_entropy(output, batch[1]) + rebuilt


def plain_for_loop(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = False
    return optimizer


def train(
    inside: bool,
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    clip: Clip | None = None,
    steps: int = 3,
) -> list[Any]:
    """Everything that must be equal."""
    model, batch = make()
    optimizers = make_optimizers(model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    handle = optimize_inside(model, optimizers, clip) if inside else None
    found: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        if handle is not None:
            with handle.window() as window:
                loss = loss_of(model, batch)
                loss.backward()
            assert window.result is not None
            norm = window.result.norm
            assert all(p.grad is None for p in model.parameters())
        else:
            loss = loss_of(model, batch)
            loss.backward()
            norm = (clip or PerParameter(1e30))(list(model.parameters())).norm
            for optimizer in optimizers:
                plain_for_loop(optimizer).step()
                optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        found += [loss.detach(), float(norm), torch.get_rng_state()]
    found += list(model.parameters())
    for optimizer in optimizers:
        states = optimizer.state_dict()["state"]
        found += [v for i in sorted(states) for _, v in sorted(states[i].items())]
    return found


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 20
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, other), index
        else:
            assert mine == other, index


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_the_ordinary_step(name: str) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[name](list(model.parameters()))]

    assert_equal(train(True, optimizers), train(False, optimizers))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "clip", [lambda: PerParameter(1e-3), lambda: PerParameter(1e-3, math.inf), lambda: PreviousNorm(0.1)]
)
def test_equal_with_a_clip(name: str, clip: Callable[[], Clip]) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[name](list(model.parameters()))]

    clipped = train(True, optimizers, clip())
    assert_equal(clipped, train(False, optimizers, clip()))
    free = train(True, optimizers)
    assert not all(torch.equal(a, b) for a, b in zip(clipped, free, strict=True) if isinstance(a, torch.Tensor))


def test_several_optimizers_groups_and_timms() -> None:
    optim = pytest.importorskip("timm.optim")

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *rest = list(model.parameters())
        groups = [{"params": rest[::2], "lr": 0.1}, {"params": rest[1::2], "lr": 0.01, "weight_decay": 0.3}]
        return [torch.optim.SGD([first], lr=0.1), optim.Lars(groups, momentum=0.9)]

    assert_equal(train(True, optimizers), train(False, optimizers))


def test_a_gradient_that_others_read_is_not_changed() -> None:
    """Autograd hands one tensor to both sides of the sum, and the parameter takes a view of it over as its gradient."""
    ends = []
    for inside in (True, False):
        torch.manual_seed(0)
        own, layer, x = nn.Parameter(torch.randn(2, 2)), nn.Linear(4, 4), torch.randn(4)
        model = nn.ParameterList([own, *layer.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clip = PerParameter(1e-3)
        loss = (layer(x).tanh() + own.view(4)).square().sum()
        if inside:
            with optimize_inside(model, optimizer, clip).window():
                loss.backward()
        else:
            loss.backward()
            clip(list(model))
            optimizer.step()
        ends.append([p.detach() for p in model])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_sparse_gradients() -> None:
    ends = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
        optimizers = [
            torch.optim.SparseAdam(model[0].parameters(), lr=0.1),
            torch.optim.SGD(model[1].parameters(), lr=0.1, foreach=False),
        ]
        clip, handle = PerParameter(0.1), optimize_inside(model, optimizers, PerParameter(0.1))
        for _ in range(3):
            loss = model(torch.tensor([1, 1, 2, 7])).square().sum()
            if inside:
                with handle.window():
                    loss.backward()
                continue
            loss.backward()
            clip(list(model.parameters()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_gradients_take_less_memory() -> None:
    """A small ViT whose gradients dominate: 18 MiB of them, of which the largest is 1 MiB."""
    peaks = {}
    for inside in (False, True):
        model, batch = make(256, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        handle = optimize_inside(model, optimizer)
        for _ in range(2):
            with gs.measure_peak("cpu") as memory:
                if inside:
                    with handle.window():
                        loss_of(model, batch).backward()
                else:
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        peaks[inside] = memory.peak_bytes
        nbytes = sum(p.nbytes for p in model.parameters())
    print(f"gradients {nbytes}, peak of the ordinary step {peaks[False]}, inside {peaks[True]}")
    assert peaks[True] < 0.55 * peaks[False]
    assert peaks[False] - peaks[True] > 0.5 * nbytes


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "adafactor"])
def test_the_working_memory_is_known(name: str) -> None:
    layer = nn.Linear(512, 512, bias=False)
    handle = optimize_inside(layer, OPTIMIZERS[name](list(layer.parameters())))
    predicted = handle.working_bytes()
    (optimizer,) = handle.optimizers
    assert not optimizer.state
    for _ in range(2):
        layer.weight.grad = torch.ones_like(layer.weight)
        with gs.measure_peak("cpu") as memory:
            plain_for_loop(optimizer).step()
    assert abs(memory.peak_bytes - predicted) <= 4096


def test_nothing_is_left_behind() -> None:
    model, batch = make()
    handle = optimize_inside(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with handle.window():
        loss_of(model, batch).backward()
    before = copy.deepcopy(list(model.parameters()))
    loss_of(model, batch).backward()  # outside of a window gradients stay
    assert sum(p.grad is not None for p in model.parameters()) == len(before) - 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_after_an_error_the_next_window_is_clean() -> None:
    model, batch = make()
    handle = optimize_inside(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook = model.patches.weight.register_hook(lambda _g: 1 / 0)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), handle.window():
        loss_of(model, batch).backward()
    hook.remove()
    assert all(p.grad is None for p in model.parameters())
    with handle.window() as window:
        loss_of(model, batch).backward()
    assert window.result is not None


def test_gradients_given_by_hand_are_applied_at_the_end() -> None:
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()
    with optimize_inside(layer, torch.optim.SGD(layer.parameters(), lr=1.0)).window():
        layer.weight.grad = torch.ones(2, 2)
    assert torch.equal(layer.weight, before - 1)


def test_what_is_not_finite_is_told() -> None:
    layer = nn.Linear(2, 2)
    with optimize_inside(layer, torch.optim.SGD(layer.parameters(), lr=1.0)).window() as window:
        (layer(torch.ones(2)).sum() * math.inf).backward()
    assert window.result is not None
    assert not torch.isfinite(window.result.norm)
    assert window.result.limit is None


def test_several_losses_at_once_and_a_second_backward() -> None:
    model, batch = make()
    handle = optimize_inside(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with handle.window():
        output, rebuilt = model(batch[0])
        torch.autograd.backward([output.square().mean(), rebuilt])
    with handle.window():
        loss_of(model, batch).backward()
        with pytest.raises(GradstowError, match="second gradient"):
            loss_of(model, batch).backward()
    with handle.window():
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # torch itself sees that the weights are others


@pytest.mark.parametrize("clip", [1.0, GlobalNorm(1.0), AdaptiveClip()])
def test_clips_that_need_all_gradients_are_refused(clip: Any) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(GradstowError, match=r"PerParameter.*PreviousNorm"):
        optimize_inside(layer, torch.optim.SGD(layer.parameters(), lr=0.1), clip)


@pytest.mark.parametrize(
    ("case", "says"),
    [({"micro_batches": 2}, "micro-batches"), ({"scaling": True}, "fp16"), ({"retry": True}, "retried")],
)
def test_what_cannot_be_inside_is_refused(case: dict[str, Any], says: str) -> None:
    with pytest.raises(GradstowError, match=says):
        check_inside(None, **case)
    assert check_inside(PerParameter(1.0), micro_batches=1) is not None
    assert check_inside(None) is None


def test_optimizers_that_need_all_gradients_are_refused() -> None:
    layer = nn.Linear(2, 2)

    class Own(torch.optim.SGD):
        pass

    for optimizer in (torch.optim.LBFGS(layer.parameters()), Own(layer.parameters(), lr=0.1)):
        with pytest.raises(GradstowError, match=type(optimizer).__name__):
            optimize_inside(layer, optimizer)
    optimize_inside(layer, Own(layer.parameters(), lr=0.1), independent=True)
    with pytest.raises(GradstowError, match="LBFGS"):
        optimize_inside(layer, torch.optim.LBFGS(layer.parameters()), independent=True)
    with pytest.raises(GradstowError, match="in common"):
        optimize_inside(layer, [torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.Adam(layer.parameters())])
    with pytest.raises(GradstowError, match="not Linear"):
        optimize_inside(layer, [layer])  # type: ignore[list-item]
    optim = pytest.importorskip("timm.optim")
    with pytest.raises(GradstowError, match="Lamb clips"):
        optimize_inside(layer, optim.Lamb(layer.parameters()))


def test_states_in_which_no_window_may_begin() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = optimize_inside(layer, optimizer)
    layer.weight.grad = torch.ones(2, 2)
    with pytest.raises(GradstowError, match="zero_grad"), handle.window():
        pass
    optimizer.zero_grad()
    with handle.window(), pytest.raises(GradstowError, match="inside of another"), handle.window():
        pass
    hook = optimizer.register_step_post_hook(lambda *_a: None)
    with pytest.raises(GradstowError, match="step hooks"), handle.window():
        pass
    hook.remove()
    with handle.window():
        pass


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("budget", ["100%", "70%"])
@pytest.mark.parametrize("clip", [None, PerParameter(1e-3)])
def test_through_a_stowed_model_equal_and_as_predicted(name: str, budget: str, clip: Clip | None) -> None:
    """The plan knows that gradients are given up, and what applying them takes."""
    ends, nbytes = [], 0
    for stowed in (True, False):
        model, batch = make(128, 3)
        nbytes = sum(p.nbytes for p in model.parameters())
        optimizer = plain_for_loop(OPTIMIZERS[name](list(model.parameters())))
        if stowed:
            gs.stow(model, budget=budget)
        handle = optimize_inside(model, optimizer, clip)
        for step in range(2):
            torch.manual_seed(step)
            with gs.measure_peak("cpu") as memory, handle.window() as window:
                loss = loss_of(model, batch)
                loss.backward()
            assert window.result is not None
        ends.append([loss.detach(), window.result.norm, torch.get_rng_state(), *model.parameters()])
        if stowed:
            plan = plan_of(model)
            assert plan is not None
            assert plan.resident_bytes < 3.2 * nbytes, "no gradient is resident"
            assert memory.peak_bytes <= plan.predicted_step_peak_bytes * 1.01 + 4096
            assert any(isinstance(e, Deliver) for r in plan.schedule.regions for e in r.backward)
            gs.unstow(model)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_plan_made_for_it_serves() -> None:
    model, batch = make(128, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = optimize_inside(model, optimizer)
    options: dict[str, Any] = {"loss": lambda output, b: loss_of_output(output, b), "optimizer": optimizer}
    ordinary = gs.plan(model, batch, **options)
    with handle.stand_ins():
        plan = gs.plan(model, batch, **options)
    assert all(p.grad is None for p in model.parameters())
    assert plan.predicted_peak_bytes < ordinary.predicted_peak_bytes
    assert gs.Plan.from_json(plan.to_json()) == plan
    gs.stow(model, plan=plan)
    with handle.window():
        loss_of_output(model(batch[0]), batch).backward()
    assert plan_of(model) is plan
    gs.unstow(model)
    gs.stow(model, plan=ordinary)
    with handle.window():
        loss_of_output(model(batch[0]), batch).backward()
    assert plan_of(model) is not ordinary, "it was made for gradients that stay"


def test_inside_and_outside_take_turns() -> None:
    """Accumulating takes the plan for gradients that stay, and the weights are changed only inside."""
    ends = []
    for stowed in (True, False):
        model, batch = make()
        optimizer = plain_for_loop(torch.optim.SGD(model.parameters(), lr=0.1))
        handle = optimize_inside(model, optimizer)
        if stowed:
            gs.stow(model, budget="90%")
        for step in range(4):
            torch.manual_seed(step)
            if step % 2 == 0:
                with handle.window():
                    loss_of(model, batch).backward()
                continue
            for _ in range(2):
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def loss_of_output(output: tuple[torch.Tensor, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output[0], batch[1]) + output[1]


class Shared(nn.Module):
    """A weight in several places of several graphs, a scale that every layer reads, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.again, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 10)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = hidden = self.norm(self.first(x)).relu()
        for index in range(4):
            hidden = (self.again(hidden) * self.scale).relu() + skip
            if index == 1:
                torch._dynamo.graph_break()
        return self.last(hidden.mean((-2, -1)))


@pytest.mark.parametrize("policy", ["store-all", "recompute-all"])
def test_shared_weights_statistics_and_graph_breaks(policy: str) -> None:
    ends = []
    for stowed in (True, False):
        torch.manual_seed(0)
        model, x, y = Shared(), torch.randn(4, 1, 12, 12), torch.randint(0, 10, (4,))
        optimizer = plain_for_loop(torch.optim.AdamW(model.parameters(), lr=0.01))
        handle = optimize_inside(model, optimizer)
        if stowed:
            gs.stow(model, policy=policy)
        for _ in range(3):
            with handle.window():
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
        ends.append([loss.detach(), *model.parameters(), *model.buffers()])
        if stowed:
            plan = plan_of(model)
            assert plan is not None
            assert len(plan.graph.regions) >= 2
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
