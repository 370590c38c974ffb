"""A stowed model lives as a plain one does: modes, copies, hooks, several backwards, no growth."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import SEED, Seen, assert_trains_as_plain, differences, state, train
from gradstow._stow import is_stowed, plan_of
from models import CASES, Case, Outputs, Reused, rows, squares

pytestmark = pytest.mark.usefixtures("guessed_costs")

CONV, REUSED = CASES["conv"], CASES["reused"]


def stowed(case: Case, device: str, policy: str = "recompute-all") -> nn.Module:
    return gs.stow(case.model(device), policy=policy)


def both(case: Case, device: str, use: Callable[[nn.Module, Any], Seen]) -> tuple[Seen, Seen]:
    """What ``use`` sees on a plain model and on a stowed one."""
    found = []
    for model in (case.model(device), stowed(case, device)):
        torch.manual_seed(SEED)
        found.append(use(model, case.data(device)) + state(model, "the end"))
    return found[0], found[1]


def test_stow_changes_nothing_that_users_see(device: str) -> None:
    model = CONV.model(device)
    keys, kind = list(model.state_dict()), type(model)
    assert gs.stow(model, policy="recompute-all") is model
    CONV.run(model, CONV.data(device)).backward()
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert gs.unstow(model) is model
    assert not is_stowed(model)


def test_eval_and_no_grad_run_plain_without_planning(device: str) -> None:
    plain, model, batch = CONV.model(device), stowed(CONV, device), CONV.data(device)
    with torch.no_grad():
        torch.manual_seed(SEED)
        expected = plain(batch[0])
        torch.manual_seed(SEED)
        assert torch.equal(model(batch[0]), expected)
    assert torch.equal(model.eval()(batch[0]), plain.eval()(batch[0]))
    assert plan_of(model) is None
    plain.train(), model.train()
    assert differences(train(plain, CONV, batch, 1), train(model, CONV, batch, 1)) == []
    assert plan_of(model) is not None


def test_gs_plain_runs_plain(device: str) -> None:
    model = stowed(CONV, device)
    expected = train(CONV.model(device), CONV, CONV.data(device), 1)
    with gs.plain():
        assert differences(expected, train(model, CONV, CONV.data(device), 1)) == []
    assert plan_of(model) is None


def test_unstow_and_stow_again(device: str) -> None:
    model, batch = CONV.model(device), CONV.data(device)
    for policy in ("recompute-all", "store-all"):
        gs.stow(model, policy=policy)
        CONV.run(model, batch).backward()
        assert plan_of(model).policy == policy
        gs.unstow(model)
        assert_trains_as_plain(model, CONV, batch)


def test_copies_and_pickles_are_plain(device: str) -> None:
    model, batch = stowed(CONV, device), CONV.data(device)
    CONV.run(model, batch).backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert not is_stowed(twin)
        assert plan_of(twin) is None
        assert_trains_as_plain(twin, CONV, batch)
    assert is_stowed(model)


def test_two_stowed_models_of_one_class(device: str) -> None:
    batch = CONV.data(device)
    expected = train(CONV.model(device), CONV, batch, 2)
    models = [stowed(CONV, device, policy) for policy in ("recompute-all", "store-all")]
    for model in models:
        assert differences(expected, train(model, CONV, batch, 2)) == []
    assert [plan_of(m).rerun_ops > 0 for m in models] == [True, False]


class Bigger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(16, 16), Reused(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x).relu()).tanh())


def test_a_stowed_part_of_a_bigger_model(device: str) -> None:
    case = Case(Bigger, rows(), squares)
    model = case.model(device)
    gs.stow(model.inner, policy="recompute-all")
    expected = train(case.model(device), case, case.data(device))
    assert differences(expected, train(model, case, case.data(device))) == []
    assert plan_of(model.inner).rerun_ops > 0


def _two_backwards(model: nn.Module, batch: Any) -> Seen:
    loss = CONV.run(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return [("loss", loss.detach())]


def _two_losses(model: nn.Module, batch: Any) -> Seen:
    output = model(batch[0])
    first = squares(output["a"], batch)
    first.backward(retain_graph=True)
    once = state(model, "the first backward")
    second = squares(output["a"] * output["b"], batch)
    second.backward(retain_graph=True)
    output["hidden"].square().sum().backward()
    return [("first", first.detach()), ("second", second.detach()), *once]


def _some_gradients(model: nn.Module, batch: Any) -> Seen:
    wanted = [model.head[1].weight, model.features[4].weight]
    found = torch.autograd.grad(CONV.run(model, batch), wanted)
    return [(f"gradient {i}", g) for i, g in enumerate(found)]


def _micro_batches(model: nn.Module, batch: Any) -> Seen:
    seen: Seen = []
    for part in ((batch[0][:2], batch[1][:2]), (batch[0][2:], batch[1][2:])):
        CONV.run(model, part).backward()
        seen += state(model, "a micro-batch")
    return seen


def _two_forwards(model: nn.Module, batch: Any) -> Seen:
    loss = CONV.run(model, batch) + CONV.run(model, batch)
    loss.backward()
    return [("loss", loss.detach())]


def _short_batch(model: nn.Module, batch: Any) -> Seen:
    seen: Seen = []
    for size in (4, 3, 4):
        model.zero_grad(set_to_none=True)
        CONV.run(model, (batch[0][:size], batch[1][:size])).backward()
        seen += state(model, f"size {size}")
    return seen


OUTPUTS = Case(Outputs, rows(), squares)
USES: dict[str, tuple[Case, Callable[[nn.Module, Any], Seen]]] = {
    "retain_graph": (CONV, _two_backwards),
    "two losses": (OUTPUTS, _two_losses),
    "autograd.grad": (CONV, _some_gradients),
    "micro-batches": (CONV, _micro_batches),
    "two forwards, one backward": (CONV, _two_forwards),
    "short batch": (CONV, _short_batch),
}


@pytest.mark.parametrize("use", USES)
def test_unusual_uses_equal_plain(use: str, device: str) -> None:
    assert differences(*both(*_with_device(use, device))) == []


def _with_device(use: str, device: str) -> tuple[Case, str, Callable[[nn.Module, Any], Seen]]:
    case, function = USES[use]
    return case, device, function


@pytest.mark.parametrize("used", ["a", "b", "hidden"])
def test_a_loss_on_other_outputs_than_planned_is_equal_or_refused(used: str, device: str) -> None:
    """The plan keeps what the loss on "a" needs; a loss on the others may need more."""
    batch = OUTPUTS.data(device)
    plan = gs.plan(OUTPUTS.model(device), batch, loss=lambda out, b: squares(out["a"], b), policy="recompute-all")
    case = Case(Outputs, rows(), lambda out, b: out[used].square().mean())
    model = gs.stow(case.model(device), plan=plan)
    expected = train(case.model(device), case, batch)
    if used == "b":
        with pytest.raises(gs.errors.CaptureError, match="did not expect.*loss=.*gs.plain"):
            case.run(model, batch).backward()
        with gs.plain():
            assert differences(expected, train(model, case, batch)) == []
    else:
        assert differences(expected, train(model, case, batch)) == []


def test_hooks_fire_as_often_as_in_plain(device: str) -> None:
    def use(model: nn.Module, batch: Any) -> Seen:
        fired: list[str] = []
        layer = model.features[4]
        layer.register_forward_pre_hook(lambda *_: fired.append("pre"))
        layer.register_forward_hook(lambda *_: fired.append("forward"))
        layer.weight.register_hook(lambda _grad: fired.append("weight"))
        model.head[1].bias.register_post_accumulate_grad_hook(lambda _p: fired.append("accumulated"))
        for _ in range(3):
            CONV.run(model, batch).backward()
        assert sorted(set(fired)) == ["accumulated", "forward", "pre", "weight"]
        return [(name, torch.tensor(fired.count(name))) for name in sorted(set(fired))]

    assert differences(*both(CONV, device, use)) == []


def test_a_stowed_model_is_collected(device: str) -> None:
    model = stowed(REUSED, device)
    REUSED.run(model, REUSED.data(device)).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def alive() -> int:
    """Bytes of all tensors that Python can still see."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("backward", [True, False], ids=["steps", "forwards without a backward"])
def test_many_steps_do_not_grow(backward: bool, device: str) -> None:
    model, batch = stowed(REUSED, device), REUSED.data(device)

    def steps(count: int) -> int:
        for _ in range(count):
            loss = REUSED.run(model, batch)
            if backward:
                model.zero_grad(set_to_none=True)
                loss.backward()
        model.zero_grad(set_to_none=True)
        del loss
        return alive()

    before = steps(3)
    with gs.measure_peak(device) as memory:
        after = steps(100 if not backward else 50)
    assert after == before
    assert memory.end_bytes <= 2 * sum(p.nbytes for p in model.parameters())
