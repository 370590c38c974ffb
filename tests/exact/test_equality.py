"""The main promise: whatever the plan, the numbers are plain PyTorch's, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch

import gradstow as gs
from equality import Seen, differences, plain_copy, train
from gradstow.planner import make_plan
from models import CASES, Case

pytestmark = pytest.mark.usefixtures("guessed_costs")

RECORDED = ["norm2d-no-momentum"]  # a counter's value is a constant of the graph, which changes with every step
KEPT = ("outputs", "lstm", "gru")  # all that a rerun could make is held by the caller, or read outside of graphs
PLANNED = [name for name in CASES if name not in RECORDED]
WITH_ALL_POLICIES = ("conv", "transformer", "densenet", "norm2d-double", "in-place", "scattered")
GRID = [(name, "recompute-all") for name in PLANNED]
GRID += [(name, "tight") for name in PLANNED if not name.startswith(("dropout", "norm1d"))]
GRID += [(name, policy) for name in WITH_ALL_POLICIES for policy in ("store-all", "sqrt")]


@functools.cache
def captured(name: str, device: str) -> tuple[gs.Plan, Seen]:
    """The store-all plan of a case, and what plain PyTorch makes of it."""
    case, batch = CASES[name], CASES[name].data(device)
    made = gs.plan(case.model(device), batch, loss=case.loss, forward=case.call, policy="store-all")
    return made, train(case.model(device), case, batch)


def plan_for(made: gs.Plan, policy: str) -> gs.Plan:
    """Another plan for the same graph; "tight" leaves 5 % above the smallest step peak that can be met."""
    if policy == "store-all":
        return made
    if policy != "tight":
        return make_plan(made.graph, made.costs, step_budget=None, budget="", policy=policy, kind=gs.Plan)
    with pytest.raises(gs.errors.BudgetTooSmall) as refused:
        make_plan(made.graph, made.costs, step_budget=1, budget="", kind=gs.Plan)
    room = int((refused.value.minimum_bytes - made.resident_bytes) * 1.05)
    plan = make_plan(made.graph, made.costs, step_budget=room, budget="", kind=gs.Plan)
    assert plan.predicted_step_peak_bytes <= room
    return plan


@pytest.mark.parametrize(("name", "policy"), GRID)
def test_three_steps_equal_plain(name: str, policy: str, device: str) -> None:
    made, expected = captured(name, device)
    plan = plan_for(made, policy)
    if policy == "recompute-all" and name not in KEPT:
        assert plan.rerun_ops > 0
    model = gs.stow(CASES[name].model(device), plan=plan)
    got = train(model, CASES[name], CASES[name].data(device))
    assert differences(expected, got) == []
    assert len(got) == len(expected) > 0


@pytest.mark.parametrize("name", RECORDED)
def test_what_changes_its_graph_with_every_step_is_equal_or_refused(name: str, device: str) -> None:
    """Up to torch 2.13 the tracer leaves out the whole call, which is refused."""
    case, batch = CASES[name], CASES[name].data(device)
    model = gs.stow(case.model(device), policy="recompute-all")
    expected = train(case.model(device), case, batch)
    with pytest.warns(UserWarning, match="recorded"):
        found = trained_or_refused(model, case, batch)
    assert "no budget can hold" in found if isinstance(found, str) else differences(expected, found) == []


def trained_or_refused(model: torch.nn.Module, case: Case, batch: object) -> Seen | str:
    try:
        return train(model, case, batch)
    except gs.errors.CaptureError as error:
        return str(error)


def test_float_inputs_that_need_gradients_get_plains(device: str) -> None:
    case = CASES["groups"]
    found = []
    for stowed in (False, True):
        model, (x, y) = case.model(device), case.data(device)
        x.requires_grad_()
        if stowed:
            gs.stow(model, policy="recompute-all")
        case.run(model, (x, y)).backward()
        found.append([("gradient of x", x.grad), *((n, p.grad) for n, p in model.named_parameters())])
    assert differences(*found) == []


# ------------------------------------------------------------------------- the comparator can see differences


def _seen(**tensors: torch.Tensor | None) -> Seen:
    return list(tensors.items())


def test_comparator_accepts_equal_runs_with_nan_and_none() -> None:
    value = torch.tensor([1.0, float("nan")])
    assert differences(_seen(a=value, b=None), _seen(a=value.clone(), b=None)) == []


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0 + 2**-22]),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([[1.0, 2.0]]),
        None,
    ],
    ids=["last bit", "nan", "dtype", "shape", "none"],
)
def test_comparator_sees(other: torch.Tensor | None) -> None:
    value = torch.tensor([1.0, 2.0])
    assert differences(_seen(a=value), _seen(a=other)) == ["a"]
    assert differences(_seen(a=other, b=value), _seen(a=value, b=value)) == ["a"]


def test_comparator_refuses_to_compare_nothing() -> None:
    assert differences([], []) == ["nothing was compared"]
    assert differences(_seen(a=None), _seen(a=None)) == ["nothing was compared"]
    assert differences(_seen(a=torch.ones(1)), _seen(b=torch.ones(1))) == ["the names differ"]


@pytest.mark.parametrize("fault", ["weight", "buffer", "dropout", "gradient"])
def test_comparator_sees_faults_in_training(fault: str, device: str) -> None:
    case, batch = CASES["conv"], CASES["conv"].data(device)
    expected = train(case.model(device), case, batch, 1)
    assert differences(expected, train(case.model(device), case, batch, 1)) == []
    assert differences(expected, train(_with_fault(case, fault, device), case, batch, 1))


def _with_fault(case: Case, fault: str, device: str) -> torch.nn.Module:
    model = plain_copy(case.model(device))
    if fault == "weight":
        with torch.no_grad():
            model.features[0].weight.view(-1)[0] += 2**-20
    elif fault == "buffer":
        model.features[1].num_batches_tracked += 1
    elif fault == "dropout":
        model.features[7].register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    else:
        model.head[1].bias.register_hook(lambda grad: grad + 2**-20)
    return model
