"""Graph breaks: several graphs in one step, planned together, equal to plain, and listed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import differences, tight_budget, train
from gradstow._stow import plan_of
from gradstow._units import format_bytes
from gradstow.capture._normalize import drop_tangents
from gradstow.report import plan_json, summarize
from models import BROKEN, CASES, Case, Skipped, broken_cases, first_four, rows
from twins import POLICIES, assert_equal_twins, data, steps

REASONS = {"break": "graph_break", "print": "builtin", "effect": "disable", "loop": "graph_break"}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_graphs_are_planned_listed_and_equal(kind: str, device: str) -> None:
    case, batch = BROKEN[kind], BROKEN[kind].data(device)
    plan = gs.plan(case.model(device), batch, loss=case.loss, policy="recompute-all")
    assert sum(region.managed for region in plan.graph.regions) == {"loop": 8}.get(kind, 2)
    assert plan.rerun_ops > 0
    assert REASONS[kind] in "; ".join(b.reason for b in plan.graph.breaks)
    assert REASONS[kind] in next(line for line in str(plan).splitlines() if line.startswith("graph breaks"))
    expected = train(case.model(device), case, batch)
    assert differences(expected, train(gs.stow(case.model(device), plan=plan), case, batch)) == []


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_graphs_at_a_tight_budget(kind: str, device: str) -> None:
    case = broken_cases(features=64, count=512)[kind]
    batch = case.data(device)
    resident = gs.plan(case.model(device), batch, loss=case.loss).resident_bytes
    model = case.model(device)
    budget = tight_budget(lambda b: gs.plan(model, batch, loss=case.loss, budget=b, keep_output=False), resident)
    plan = gs.plan(model, batch, loss=case.loss, budget=budget, keep_output=False)
    expected = train(case.model(device), case, batch)
    gs.stow(model, plan=plan)
    assert differences(expected, train(model, case, batch)) == []
    model.zero_grad(set_to_none=True)
    with gs.measure_peak(device) as memory:
        case.run(model, batch).backward()
    assert plan.resident_bytes + memory.peak_bytes <= budget


def test_breaks_name_their_line_and_what_they_keep(device: str) -> None:
    case = BROKEN["break"]
    plan = gs.plan(case.model(device), case.data(device), loss=case.loss, policy="recompute-all")
    (found,) = summarize(plan).breaks
    first = plan.graph.regions[0]
    assert re.fullmatch(r"models\.py:\d+", found.source)
    assert plan.graph.breaks[0].regions == (0,)
    assert found.nbytes == sum(first.storages[first.values[v].storage].nbytes for v in set(first.outputs))
    assert f"({found.source}), keeps {format_bytes(found.nbytes)}" in str(plan)
    assert plan_json(plan)["breaks"][0]["bytes"] == found.nbytes


def test_a_side_effect_happens_once_a_step(device: str) -> None:
    case, batch = BROKEN["effect"], BROKEN["effect"].data(device)
    model = gs.stow(case.model(device), policy="recompute-all")
    for step in range(3):
        case.run(model, batch).backward()
        assert model.calls.count == step + 1


def test_a_graph_without_breaks_lists_none(device: str) -> None:
    case = CASES["reused"]
    plan = gs.plan(case.model(device), case.data(device), loss=case.loss)
    assert plan.graph.breaks == ()


def test_code_outside_of_any_graph_is_counted_and_listed(device: str) -> None:
    """A break in a frame's own loop: Dynamo leaves the frame to Python."""
    case = Case(Skipped, rows(256, count=2048), first_four)
    batch = case.data(device)
    plan = gs.plan(case.model(device), batch, loss=case.loss, keep_output=False)
    assert plan.graph.outside == ("Addmm", "Addmm", "Exp", "Exp", "Sin", "Sin")
    assert "outside" in str(plan)
    model = gs.stow(case.model(device), plan=plan)
    case.run(model, batch).backward()
    model.zero_grad(set_to_none=True)
    with gs.measure_peak(device) as memory:
        case.run(model, batch).backward()
    assert memory.peak_bytes <= plan.predicted_step_peak_bytes


class LaterChanged(nn.Module):
    """The first graph reads buffers that change later, in another graph and outside of any. Plain needs neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x) * torch.exp(self.scale) + torch.sin(self.shift))
        torch._dynamo.graph_break()
        self.scale.mul_(0.9)
        self.outside()
        return self.last(torch.tanh(h) * (self.scale + 1))

    @torch._dynamo.disable
    def outside(self) -> None:
        self.shift.add_(0.1)


@pytest.mark.usefixtures("guessed_costs")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_that_a_later_part_changes(policy: str) -> None:
    model = assert_equal_twins(LaterChanged, steps(lambda m, step: m(data(8, 16, seed=step)).square().mean()), policy)
    plan = plan_of(model)
    assert plan is not None
    assert "reads what is changed before the backward" in {op.pinned for r in plan.graph.regions for op in r.ops}


class HandsOnParts(torch.nn.Module):
    """A graph that hands on parts of its input, of which one gets no gradient: zeros stand for it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 24), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        a, b, c = h.split([8, 8, 8], dim=1)
        a, b, c = self.second(a), b.transpose(0, 1).view(8, -1), c.transpose(0, 1).sin()
        torch._dynamo.graph_break()
        with torch.no_grad():
            scale = b.mean()
        return a * scale + c.transpose(0, 1)


@pytest.mark.parametrize("policy", ["store-all", "recompute-all"])
def test_a_part_without_a_gradient(policy: str) -> None:
    use = steps(lambda model, step: model(data(8, 16, seed=step)).square().mean())
    assert_equal_twins(HandsOnParts, use, policy)


def test_zeros_for_absent_gradients_lie_on_memory_of_their_own() -> None:
    """The gradient that they stand for may be a view of an input's memory, as fakes tell it."""
    graph = torch.fx.Graph()
    given, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    other = graph.placeholder("tangents_2")
    absent = graph.call_function(torch.ops.aten.t.default, (tangent,))
    joined = graph.call_function(torch.ops.aten.cat.default, ([absent, other],))
    graph.output((joined,))
    x = torch.empty(4, 4)
    values = {given: x, tangent: x, other: torch.empty(4, 4), absent: x.t(), joined: torch.empty(8, 4)}
    for node, value in values.items():
        node.meta["val"] = value
    drop_tangents(graph, [False, True])
    (zeros,) = graph.find_nodes(op="call_function", target=torch.ops.aten.zeros.default)
    assert zeros.meta["val"].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert zeros.meta["val"].stride() == (4, 1)
