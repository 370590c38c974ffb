"""Gradients that are added to existing ones: equal numbers, hooks as in plain, and no more memory than plain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import gradstow as gs
from equality import Seen, differences, state
from gradstow._stow import plan_of
from gradstow.cost import measure_peak
from gradstow.ir import Deliver
from twins import POLICIES, assert_equal_twins, data

KIB = 1 << 10


class Net(torch.nn.Module):
    """Linear layers with everything between them that could go wrong; ``tied`` uses one weight twice."""

    def __init__(self, width: int = 64, depth: int = 3, *, tied: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        if tied:
            self.layers[-1].weight = self.layers[0].weight
        self.norm, self.drop = torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(width, 4)
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._layers(self.first(x), self.layers[:1])
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(self._layers(x, self.layers[1:]))

    def _layers(self, x: torch.Tensor, layers: Iterable[torch.nn.Module]) -> torch.Tensor:
        for layer in layers:
            x = self.drop(torch.relu(self.norm(layer(x))))
        return x


def accumulate(
    micro_batches: int = 2,
    before: Callable[[torch.nn.Module, int], Any] = lambda _model, _step: None,
    backward: Callable[[torch.nn.Module, torch.Tensor], Any] = lambda _model, loss: loss.backward(),
) -> Callable[[torch.nn.Module], Seen]:
    """Three optimizer steps of several micro-batches, looked at after each backward."""

    def use(model: torch.nn.Module) -> Seen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen: Seen = []
        for step in range(3):
            optimizer.zero_grad()
            before(model, step)
            for micro in range(micro_batches):
                loss = model(data(8, 16, seed=10 * step + micro)).square().mean() / micro_batches
                backward(model, loss)
                seen += [(f"loss {step}.{micro}", loss.detach().clone()), *state(model, f"step {step}.{micro}")]
            optimizer.step()
        return seen

    return use


def deliveries(model: torch.nn.Module) -> int:
    plan = plan_of(model)
    assert plan is not None
    return sum(isinstance(e, Deliver) for r in plan.schedule.regions for e in r.backward)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"broken": True}, {"tied": True, "broken": True}], ids=str)
def test_equal_to_plain(options: dict[str, bool], policy: str) -> None:
    stowed = assert_equal_twins(lambda: Net(**options), accumulate(3), policy)
    assert deliveries(stowed) > 2


def test_zero_grad_that_keeps_the_tensors() -> None:
    def use(model: torch.nn.Module) -> Seen:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen: Seen = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(data(8, 16, seed=step)).square().mean().backward()
            seen += state(model, f"step {step}")
            optimizer.step()
        return seen

    assert deliveries(assert_equal_twins(Net, use)) > 2


def test_some_gradients_exist_and_others_do_not() -> None:
    def use(model: torch.nn.Module) -> Seen:
        seen: Seen = []
        for step in range(4):
            model(data(8, 16, seed=step)).square().mean().backward()
            seen += state(model, f"step {step}")
            model.layers[step % 3].weight.grad = None
            model.head.bias.grad = None
        return seen

    assert deliveries(assert_equal_twins(Net, use)) > 2


def test_hooks_on_parameters_see_every_gradient_once() -> None:
    def use(model: torch.nn.Module) -> Seen:
        fired: list[tuple[str, torch.Tensor]] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name: fired.append((f"gradient of {name}", g.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: fired.append((f"accumulated {name}", p.grad.clone()))
            )
        model.first.weight.register_hook(lambda g: g * 2)
        return accumulate()(model) + sorted(fired, key=lambda pair: pair[0])

    stowed = assert_equal_twins(Net, use)
    assert deliveries(stowed) > 2


def test_a_gradient_reaches_its_parameter_before_the_next_one_is_made() -> None:
    order: list[str] = []
    model = gs.stow(Net().train(), policy="recompute-all")
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: order.append(name))
    for _ in range(2):
        order.clear()
        model(data(8, 16)).square().mean().backward()
    weights = [name for name in order if name.endswith("weight") and "norm" not in name]
    assert weights == ["head.weight", "layers.2.weight", "layers.1.weight", "layers.0.weight", "first.weight"]


def test_gradients_for_some_parameters_only() -> None:
    def subset(model: torch.nn.Module, loss: torch.Tensor) -> None:
        chosen = [model.layers[1].weight, model.head.bias]
        for parameter, gradient in zip(chosen, torch.autograd.grad(loss, chosen, retain_graph=True), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        loss.backward(inputs=[model.first.weight, model.layers[0].bias], retain_graph=True)
        loss.backward()

    assert deliveries(assert_equal_twins(Net, accumulate(backward=subset))) > 2


def test_a_penalty_on_the_weights_beside_the_model() -> None:
    """Two paths lead to each parameter: autograd adds them up before they reach ``.grad``, and so must we."""

    def with_penalty(model: torch.nn.Module, loss: torch.Tensor) -> None:
        once = [p for n, p in model.named_parameters() if "norm" not in n]
        (loss + 1e-2 * sum(p.square().sum() for p in once)).backward()

    assert deliveries(assert_equal_twins(Net, accumulate(backward=with_penalty))) > 2


@pytest.mark.xfail(strict=True, reason="(penalty + last use) + first use: a region adds its uses up before the penalty")
def test_a_penalty_on_a_weight_that_is_used_several_times() -> None:
    def with_penalty(model: torch.nn.Module, loss: torch.Tensor) -> None:
        (loss + 1e-2 * model.norm.weight.square().sum()).backward()

    assert_equal_twins(Net, accumulate(backward=with_penalty))


def twice(model: torch.nn.Module, together: bool) -> Seen:
    """Two calls, as of a GAN's judge, with one backward for both or one for each."""
    seen: Seen = []
    for step in range(2):
        losses = [model(data(8, 16, seed=2 * step + i)).square().mean() for i in range(2)] if together else []
        for i in range(0 if together else 2):
            model(data(8, 16, seed=2 * step + i)).square().mean().backward()
        if together:
            (losses[0] + losses[1]).backward()
        seen += state(model, f"step {step}")
    return seen


def test_two_calls_of_tied_weights_before_one_backward_are_named() -> None:
    model = gs.stow(Tied().train(), "100%")
    with pytest.warns(UserWarning, match=r"the parameter first\.weight is used several times"):
        twice(model, together=True)


@pytest.mark.xfail(strict=True, reason="(b2 + b1) + (a2 + a1): each call adds its own uses up first")
@pytest.mark.filterwarnings("ignore:gradstow")
def test_two_calls_of_tied_weights_before_one_backward_are_equal() -> None:
    assert_equal_twins(Tied, lambda model: twice(model, together=True))


@pytest.mark.filterwarnings("error:gradstow")
@pytest.mark.parametrize(("tied", "together"), [(True, False), (False, True)])
def test_calls_that_are_added_up_as_in_plain_pytorch(tied: bool, together: bool) -> None:
    assert_equal_twins(Tied if tied else Untied, lambda model: twice(model, together))


class Tied(torch.nn.Module):
    """One weight is used twice in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.first(x)))))


class Untied(Tied):
    """No weight is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_weights_changed_between_forward_and_backward_are_refused() -> None:
    model = gs.stow(Net().train(), policy="recompute-all")
    model(data(8, 16)).square().mean().backward()
    loss = model(data(8, 16)).square().mean()
    with torch.no_grad():
        model.layers[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="layers.1.weight was changed in place"):
        loss.backward()


class Outer(torch.nn.Module):
    """Holds a stowed part whose input has a gradient, and trains around it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = torch.nn.Linear(16, 16), Net(), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(torch.tanh(self.before(x))))


def test_a_stowed_part_of_a_larger_model() -> None:
    torch.manual_seed(0)
    plain = Outer().train()
    stowed = copy.deepcopy(plain)
    gs.stow(stowed.inner, policy="recompute-all")
    found = []
    for model in (plain, stowed):
        torch.manual_seed(1)
        found.append(accumulate()(model))
    assert differences(*found) == []
    assert deliveries(stowed.inner) > 2


class HandsOutItsWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.a(x))
        return self.b(hidden), self.a.weight, self.b.weight[:4]


def test_outputs_that_are_parameters() -> None:
    def use(model: torch.nn.Module) -> Seen:
        seen: Seen = []
        for step in range(3):
            out, weight, part = model(data(8, 16, seed=step))
            (out.square().mean() + weight.square().mean() + part.sum()).backward()
            seen += state(model, f"step {step}")
        return seen

    assert deliveries(assert_equal_twins(HandsOutItsWeight, use)) == 0


def step_peaks(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Of the second micro-batch."""
    model.zero_grad()
    model(x).square().mean().backward()
    with measure_peak("cpu") as memory:
        model(x).square().mean().backward()
    return memory.peak_bytes


@pytest.mark.parametrize(("width", "depth", "batch"), [(256, 6, 8), (128, 4, 256), (512, 2, 64)])
def test_the_peak_is_plain_pytorchs(width: int, depth: int, batch: int) -> None:
    plain = Net(width, depth).train()
    stowed = gs.stow(copy.deepcopy(plain), "100%")
    x = data(batch, 16)
    for _ in range(2):
        expected, got = step_peaks(plain, x), step_peaks(stowed, x)
    assert got <= 1.01 * expected
    assert got >= 64 * KIB, "nothing was measured"


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"broken": True}, {"tied": True, "broken": True}], ids=str)
def test_the_budget_holds_with_existing_gradients(options: dict[str, bool]) -> None:
    plain = Net(128, 6, **options).train()
    x = data(256, 16)
    stowed = gs.stow(copy.deepcopy(plain), "60%")
    for _ in range(2):
        expected, got = step_peaks(plain, x), step_peaks(stowed, x)
    assert got <= 0.6 * expected


def test_a_plan_made_without_gradients_is_made_again_for_accumulation() -> None:
    model, x = Net(128, 6).train(), data(64, 16)
    plan = gs.plan(model, x, loss=lambda out, _: out.square().mean(), budget="60%")
    gs.stow(model, plan=plan)
    model(x).square().mean().backward()
    assert plan_of(model) is plan
    model(x).square().mean().backward()
    assert plan_of(model) is not plan
    assert deliveries(model) > 2


class ChangesItsBoundary(torch.nn.Module):
    """The second graph changes in place what the first one handed on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * 2
        torch._dynamo.graph_break()
        if self.kind == "view":
            h.view(-1).mul_(0.5)
        else:
            h.mul_(0.5)
        return self.second(h)


@pytest.mark.parametrize("kind", ["whole", "view"])
def test_a_boundary_that_is_changed_in_place(kind: str) -> None:
    assert_equal_twins(lambda: ChangesItsBoundary(kind), accumulate())


def under_autocast(model: torch.nn.Module) -> Seen:
    seen: Seen = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data(64, 16, seed=step))
        out.float().square().mean().backward()
        seen += state(model, f"step {step}")
    return seen


def test_a_shared_weight_under_autocast() -> None:
    """Plain autocast casts it once: the gradients of its uses are added up in bf16, and the sum to what is there."""
    assert deliveries(assert_equal_twins(lambda: Net(tied=True), under_autocast)) > 2


def test_a_weight_that_two_graphs_share_under_autocast_is_named() -> None:
    model = gs.stow(Net(tied=True, broken=True).train(), "60%")
    with pytest.warns(UserWarning, match=r"layers\.0\.weight of Net is read under autocast on both sides"):
        under_autocast(model)


@pytest.mark.filterwarnings("error:.*is read under autocast")
@pytest.mark.parametrize("options", [{"tied": True}, {"broken": True}], ids=str)
def test_no_weight_is_named_without_need(options: dict[str, bool]) -> None:
    under_autocast(gs.stow(Net(**options).train(), "60%"))


@pytest.mark.xfail(
    strict=True, reason="plain autocast casts a weight once for all graphs, and each graph casts its own"
)
def test_a_weight_that_two_graphs_share_under_autocast() -> None:
    assert_equal_twins(lambda: Net(tied=True, broken=True), under_autocast)
