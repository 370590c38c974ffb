"""Bad input: each a clear error, that says what to do, and after each the model trains as plain PyTorch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import assert_trains_as_plain, differences, plain_copy, train
from gradstow._stow import is_stowed
from gradstow.errors import BudgetError, BudgetTooSmall, CaptureError, GradstowError, PolicyError, StalePlan
from models import BROKEN, CASES, Case, ConvNet, Frozen, InPlace, Notes, images, rows, squares

pytestmark = pytest.mark.usefixtures("guessed_costs")

CONV, REUSED = CASES["conv"], CASES["reused"]


def refused(model: nn.Module, kind: type[Exception], words: str, act: Callable[[], Any], case: Case = CONV) -> str:
    """``act`` raises ``kind`` with ``words``; the model is plain afterwards. Returns the message."""
    device = next(model.parameters()).device.type
    with pytest.raises(kind, match=words) as error:
        act()
    assert not is_stowed(model)
    assert_trains_as_plain(model, case, case.data(device), plain_copy(model))
    return str(error.value)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (0, "positive"),
        (-5, "positive"),
        ("-1 GiB", "positive"),
        (float("nan"), "float"),
        ("nan", "positive"),
        (0.5, "fraction"),
        ("0.5", "no unit"),
        ("6 XB", "unknown unit"),
        ("a lot", "cannot be read"),
        ("0%", "positive"),
        (True, "bool"),
        ([], "list"),
    ],
)
def test_budgets_that_mean_nothing(budget: Any, words: str, device: str) -> None:
    model = CONV.model(device)
    message = refused(model, BudgetError, words, lambda: gs.stow(model, budget))
    assert '"6GiB"' in message


def test_a_budget_below_the_minimum_names_it_and_the_minimum_works(device: str) -> None:
    model, batch = CONV.model(device), CONV.data(device)
    gs.stow(model, 30_000)
    ran: list[int] = []
    model.features[0].register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(BudgetTooSmall, match="set by aten") as error:
        CONV.run(model, batch)
    assert ran == []  # refused before any real op
    assert str(error.value.minimum_bytes) in str(error.value)
    assert "models.py:" in str(error.value)
    assert_trains_as_plain(model, CONV, batch)
    expected = train(CONV.model(device), CONV, batch)
    fits = gs.stow(CONV.model(device), error.value.minimum_bytes)
    assert differences(expected, train(fits, CONV, batch)) == []


def test_a_budget_below_what_is_resident(device: str) -> None:
    model = gs.stow(CONV.model(device), 1000)
    words = "less than what is resident"
    refused(model, BudgetTooSmall, words, lambda: CONV.run(model, CONV.data(device)))


def test_a_model_that_does_not_train(device: str) -> None:
    model = CONV.model(device).requires_grad_(False)
    for act in (lambda: gs.stow(model, "60%"), lambda: gs.plan(model, CONV.data(device), loss=CONV.loss)):
        with pytest.raises(CaptureError, match="no trainable parameters.*requires_grad_"):
            act()
    refused(model.requires_grad_(True), BudgetError, "unit", lambda: gs.stow(model, "6"))


def test_a_model_in_eval_mode_and_an_optimizer_of_another(device: str) -> None:
    model, batch = CONV.model(device), CONV.data(device)
    other = torch.optim.SGD(REUSED.model(device).parameters(), 0.1)
    words = "none of the optimizer's parameters.*model.parameters"
    refused(model, CaptureError, words, lambda: gs.plan(model, batch, loss=CONV.loss, optimizer=other))
    with pytest.raises(CaptureError, match="eval mode.*model.train"):
        gs.plan(model.eval(), batch, loss=CONV.loss)


def test_a_batch_on_another_device(device: str) -> None:
    model, (x, y) = CONV.model(device), CONV.data(device)
    words = "on meta.*Move the batch"
    refused(model, CaptureError, words, lambda: gs.plan(model, (x.to("meta"), y), loss=CONV.loss))
    gs.stow(model, "100%")
    refused(model, CaptureError, words, lambda: model(x.to("meta")))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, batch: batch[0].mean().requires_grad_(), "does not depend on any trainable parameter"),
        (lambda out, batch: out.detach().mean(), "does not depend on any trainable parameter"),
        (lambda out, batch: out, "not one number"),
        (lambda out, batch: 3.0, "not a tensor"),
        (None, "not one number|no loss|loss"),
    ],
    ids=["other", "detached", "vector", "float", "absent"],
)
def test_losses_that_are_none(loss: Any, words: str, device: str) -> None:
    model, batch = CONV.model(device), CONV.data(device)
    if loss is None:
        gs.plan(model, batch)  # the loss is outside: room for it is reserved
        with pytest.raises(CaptureError, match=words):
            gs.verify(model, batch, steps=1, rounds=1)
        return
    refused(model, CaptureError, words, lambda: gs.plan(model, batch, loss=loss))


# ------------------------------------------------------------------------------------------------ plan files


def saved(case: Case, device: str, path: Path) -> Path:
    gs.plan(case.model(device), case.data(device), loss=case.loss, policy="recompute-all").save(path)
    return path


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> gs.Plan:
    """Load the plan file after ``change``, with a checksum that fits."""
    head, body = path.read_text().splitlines()
    data, meta = json.loads(body), json.loads(head)
    change(data)
    body = json.dumps(data, separators=(",", ":"), sort_keys=True)
    meta["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(json.dumps(meta) + "\n" + body + "\n")
    return gs.Plan.load(path)


def test_a_saved_plan_runs(device: str, tmp_path: Path) -> None:
    plan = gs.Plan.load(saved(CONV, device, tmp_path / "p.json"))
    expected = train(CONV.model(device), CONV, CONV.data(device))
    model = gs.stow(CONV.model(device), plan=plan)
    assert differences(expected, train(model, CONV, CONV.data(device))) == []


def test_a_plan_of_another_model(device: str, tmp_path: Path) -> None:
    plan, model = gs.Plan.load(saved(REUSED, device, tmp_path / "p.json")), CONV.model(device)
    refused(model, StalePlan, "for Reused and this model is ConvNet.*gs.plan", lambda: gs.stow(model, plan=plan))


def test_a_plan_of_another_model_of_the_same_class(device: str) -> None:
    batch, wide = CONV.data(device), Case(lambda: ConvNet(width=12), images(), CONV.loss)
    plan, model = gs.plan(wide.model(device), batch, loss=CONV.loss), CONV.model(device)
    refused(model, StalePlan, "other shapes or dtypes.*gs.plan", lambda: gs.stow(model, plan=plan))


def test_a_plan_of_a_model_that_computes_something_else(device: str) -> None:
    batch, model = CONV.data(device), CONV.model(device)
    model.features[2] = nn.Sigmoid()
    plan, plain = gs.plan(model, batch, loss=CONV.loss), CONV.model(device)
    gs.stow(plain, plan=plan)
    refused(plain, StalePlan, "none of the planned ones.*budget=", lambda: CONV.run(plain, batch))


def test_a_plan_of_another_torch(device: str, tmp_path: Path) -> None:
    path = saved(CONV, device, tmp_path / "p.json")
    plan = edited(path, lambda data: data["graph"]["versions"].update(torch="1.0"))
    model = CONV.model(device)
    refused(model, StalePlan, "torch 1.0.*gs.plan", lambda: gs.stow(model, plan=plan))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other", "missing", "binary"])
def test_damaged_plan_files(damage: str, device: str, tmp_path: Path) -> None:
    path = saved(REUSED, device, tmp_path / "p.json")
    text = path.read_text()
    damaged = {"cut": text[:-500], "changed": text.replace("relu", "rely").replace("tanh", "tamh"), "empty": ""}
    if damage == "missing":
        path.unlink()
    elif damage == "binary":
        path.write_bytes(b"\xff\xfe\x00" * 50)
    else:
        path.write_text(damaged.get(damage, '{"a": 1}\n{}\n'))
    with pytest.raises(StalePlan, match="plan file .*p.json.*plan"):
        gs.Plan.load(path)


def test_a_plan_that_cannot_be_written(device: str, tmp_path: Path) -> None:
    plan = gs.plan(REUSED.model(device), REUSED.data(device), loss=REUSED.loss)
    with pytest.raises(GradstowError, match="cannot be written to .*nowhere.*No such file"):
        plan.save(tmp_path / "nowhere" / "p.json")
    (tmp_path / "there.json").write_text("before")
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert gs.Plan.load(tmp_path / "there.json").dumps() == plan.dumps()
    with pytest.raises(StalePlan, match="cannot be read"):
        gs.Plan.load(None)


# ----------------------------------------------------------------------------------------- models and options


def test_options_that_do_not_go_together(device: str) -> None:
    model, batch = CONV.model(device), CONV.data(device)
    plan = gs.plan(model, batch, loss=CONV.loss)
    refused(model, PolicyError, "store-all", lambda: gs.stow(model, "60%", policy="store-al"))
    refused(model, PolicyError, "no policy", lambda: gs.plan(model, batch, loss=CONV.loss, policy="none"))
    refused(model, GradstowError, "carries its own", lambda: gs.stow(model, "60%", plan=plan))
    refused(model, GradstowError, "budget=", lambda: gs.stow(model))
    refused(model, StalePlan, "Plan.load", lambda: gs.stow(model, plan="p.json"))
    refused(model, GradstowError, "not stowed", lambda: gs.unstow(model))
    with pytest.raises(GradstowError, match="torch.nn.Module"):
        gs.stow(lambda x: x, "60%")


def test_a_stowed_model_is_not_stowed_twice(device: str) -> None:
    model = gs.stow(CONV.model(device), "100%")
    with pytest.raises(GradstowError, match="stowed already.*unstow"):
        gs.stow(model, "60%")
    bigger = nn.Sequential(model)
    with pytest.raises(GradstowError, match="stowed already.*sub-module 0"):
        gs.stow(bigger, "60%")
    refused(gs.unstow(model), BudgetError, "unit", lambda: gs.stow(model, "6"))


def test_compiled_and_scripted_models(device: str) -> None:
    model = CONV.model(device)
    with pytest.raises(CaptureError, match="compiled already.*original module"):
        gs.stow(torch.compile(model), "60%")
    model.compile()
    with pytest.raises(CaptureError, match="compiled already.*original module"):
        gs.stow(model, "60%")
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4)).to(device)
    with pytest.raises(CaptureError, match="ScriptModule.*sub-module 0.*Python module"):
        gs.stow(scripted, "60%")
    model._compiled_call_impl = None
    assert_trains_as_plain(model, CONV, CONV.data(device), plain_copy(model))


# ------------------------------------------------------------------------------------------ during the step


def test_a_weight_changed_between_forward_and_backward(device: str) -> None:
    for stow in (False, True):
        model, batch = CONV.model(device), CONV.data(device)
        if stow:
            gs.stow(model, policy="recompute-all")
        loss = CONV.run(model, batch)
        with torch.no_grad():
            model.head[1].weight.mul_(2)
        words = "the parameter head.1.weight was changed in place" if stow else "modified by an inplace operation"
        with pytest.raises(RuntimeError, match=words):
            loss.backward()
        assert_trains_as_plain(model, CONV, batch, plain_copy(model))


def test_what_the_backward_does_not_need_may_change(device: str) -> None:
    batch, found = CONV.data(device), []
    for stow in (False, True):
        model = CONV.model(device)
        if stow:
            gs.stow(model, policy="recompute-all")
        torch.manual_seed(0)
        loss = CONV.run(model, batch)
        with torch.no_grad():
            model.head[1].bias.add_(1)
            model.features[1].num_batches_tracked.zero_()
        loss.backward()
        found.append([(n, p.grad) for n, p in model.named_parameters()])
    assert differences(*found) == []


class EndsInTanh(InPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.first(x).exp()))


@pytest.mark.parametrize("policy", ["store-all", "recompute-all"])
def test_an_output_changed_in_place_is_refused_as_in_plain(policy: str, device: str) -> None:
    case = Case(EndsInTanh, rows(), squares)
    for stow in (False, True):
        model, batch = case.model(device), case.data(device)
        if stow:
            gs.stow(model, policy=policy)
        output = case.call(model, batch)
        output.detach().zero_()
        with pytest.raises(RuntimeError, match="in.?place"):
            output.sum().backward()
        assert_trains_as_plain(model, case, batch, plain_copy(model))


def test_an_input_changed_in_place_is_refused_as_in_plain(device: str) -> None:
    for stow in (False, True):
        model, batch = CONV.model(device), CONV.data(device)
        if stow:
            gs.stow(model, policy="recompute-all")
        loss = CONV.run(model, batch)
        batch[0].zero_()
        with pytest.raises(RuntimeError, match="in.?place"):
            loss.backward()
        assert_trains_as_plain(model, CONV, CONV.data(device), plain_copy(model))


def _penalty(model: nn.Module, batch: Any) -> list[tuple[str, torch.Tensor | None]]:
    torch.manual_seed(0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(REUSED.run(model, batch), parameters, create_graph=True)
    sum(g.square().sum() for g in gradients).backward()
    return [(n, p.grad) for n, p in model.named_parameters()]


def test_double_backward_names_plain_and_is_equal_inside_it(device: str) -> None:
    model, batch = gs.stow(REUSED.model(device), policy="recompute-all"), REUSED.data(device)
    with pytest.raises(CaptureError, match="create_graph.*gs.plain"):
        _penalty(model, batch)
    model.zero_grad(set_to_none=True)
    model.load_state_dict(REUSED.model(device).state_dict())
    with gs.plain():
        got = _penalty(model, batch)
    assert differences(_penalty(REUSED.model(device), batch), got) == []
    model.zero_grad(set_to_none=True)
    assert_trains_as_plain(model, REUSED, batch)


def test_a_backward_under_autocast_is_refused_by_name(device: str) -> None:
    case = CASES["conv-autocast"]
    model, batch = gs.stow(case.model(device), policy="recompute-all"), case.data(device)
    with torch.autocast(device, torch.bfloat16):
        loss = case.loss(model(batch[0]), batch)
        with pytest.raises(CaptureError, match="inside an autocast block.*after"):
            loss.backward()
    assert_trains_as_plain(model, case, batch)


# ---------------------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("stage", ["rehearse", "time ops", "plan"])
def test_an_interrupt_while_planning_leaves_a_plain_model(
    stage: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with real timing, whose profiler must be stopped

    def progress(now: str, _done: int, _total: int) -> None:
        if now == stage:
            raise KeyboardInterrupt

    width = 5 + len(stage)  # of which no op has been timed yet
    case = Case(lambda: ConvNet(width=width), images(), CONV.loss)
    model = gs.stow(case.model(device), "100%", progress=progress)
    refused(model, KeyboardInterrupt, "", lambda: case.run(model, case.data(device)), case)
    torch.ones(2) * 2  # no mode of ours is left behind
    with gs.measure_peak(device) as memory:
        torch.empty(1000, device=device)
    assert memory.peak_bytes >= 4000


def test_an_interrupt_in_the_forward_leaves_a_plain_model(device: str) -> None:
    case, batch = BROKEN["effect"], BROKEN["effect"].data(device)
    for number in range(2):  # in the rehearsal, then in the first real forward
        model = case.model(device)
        model.calls = _Interrupting(number)
        gs.stow(model, policy="recompute-all")
        with pytest.raises(KeyboardInterrupt):
            case.run(model, batch)
        assert not is_stowed(model)
        model.calls = Notes()
        assert_trains_as_plain(model, case, batch, plain_copy(model))


class _Interrupting(Notes):
    """Raises KeyboardInterrupt beyond ``limit``; copies share the count."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def add(self) -> None:
        super().add()
        if self.count > self.limit:
            raise KeyboardInterrupt

    def __deepcopy__(self, memo: Any) -> _Interrupting:
        return self


def test_an_error_of_the_model_itself_reaches_the_user(device: str) -> None:
    model = gs.stow(CONV.model(device), policy="recompute-all")
    with pytest.raises((RuntimeError, CaptureError), match="shape|size|channels"):
        model(torch.zeros(4, 5, 16, 16, device=device))
    assert_trains_as_plain(model, CONV, CONV.data(device), plain_copy(model))


def test_frozen_layers_thawed_after_the_first_step(device: str) -> None:
    case = Case(Frozen, images(), CONV.loss)
    found = []
    for stow in (False, True):
        model, batch = case.model(device), case.data(device)
        if stow:
            gs.stow(model, policy="recompute-all")
        seen = train(model, case, batch, 1)
        found.append(seen + train(model.requires_grad_(True), case, batch, 1))
    assert differences(*found) == []
