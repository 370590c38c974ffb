"""Graphs, schedules, costs and plans come back from JSON as they were; damaged plan files are refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from gradstow.errors import StalePlan
from gradstow.ir import (
    CostTable,
    Deliver,
    GraphBreak,
    OpCost,
    PlanData,
    Resident,
    Schedule,
    StepGraph,
    just_in_time,
    replay,
)
from gradstow.ir._plan import FORMAT
from gradstow.planner import make_plan
from graphs import HAND_MADE, batch_norm, chain, costs_of, step, two_regions_and_loss


def through_text(data: object) -> object:
    return json.loads(json.dumps(data))


def plan_of(graph: StepGraph, policy: str = "recompute-all") -> PlanData:
    return make_plan(graph, costs_of(graph, {"f": 0.1}), step_budget=None, budget="none", policy=policy)


@pytest.mark.parametrize("name", HAND_MADE)
def test_graphs(name: str) -> None:
    graph = HAND_MADE[name]()
    assert StepGraph.from_json(through_text(graph.to_json())) == graph  # type: ignore[arg-type]


def test_every_field_of_a_graph() -> None:
    graph = replace(
        two_regions_and_loss(),
        resident=Resident(1, 2, 3, 4, 5),
        device="cuda",
        reserve_bytes=6,
        optimizer_peak_bytes=7,
        outputs_held=False,
        batch="(8, 3)float32",
        model="ResNet",
        weights="(3, 8)float32",
        breaks=(GraphBreak("print", "model.py:3", (0, 2)),),
        outside=("nms",),
        outside_bytes=8,
        outside_calls=(("a call", 3),),
        parts=True,
        codegen="inductor",
        versions={"torch": "2.14.1"},
    )
    assert all(getattr(graph, field.name) != field.default for field in fields(graph)), "a field that keeps its default"
    again = StepGraph.from_json(through_text(graph.to_json()))  # type: ignore[arg-type]
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert again != replace(graph, reserve_bytes=8)


@pytest.mark.parametrize("name", HAND_MADE)
def test_schedules(name: str) -> None:
    regions = HAND_MADE[name]().regions
    schedule = Schedule(tuple(just_in_time(r, ()) for r in regions))
    assert Schedule.from_json(through_text(schedule.to_json())) == schedule  # type: ignore[arg-type]


def test_events_that_hand_gradients_over() -> None:
    (region,) = step(*chain().regions, grads_exist=True).regions
    schedule = Schedule((just_in_time(region, ()),))
    assert Deliver((3,)) in schedule.regions[0].backward
    assert Schedule.from_json(through_text(schedule.to_json())) == schedule  # type: ignore[arg-type]


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown event 'send'"):
        Schedule.from_json([{"kept": [], "forward": [["send", 3]], "backward": []}])


def test_cost_tables() -> None:
    table = CostTable({"a": OpCost(0.1 + 0.2, 3, "extrapolated"), "b": OpCost(1e-300, 0, "unknown")}, "cpu", 2)
    assert CostTable.from_json(through_text(table.to_json())) == table  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HAND_MADE)
def test_plans(name: str) -> None:
    plan = replace(plan_of(HAND_MADE[name]()), lower_bound_seconds=math.pi)
    text = plan.dumps()
    again = PlanData.loads(text)
    assert again == plan
    assert again.dumps() == text
    assert replay(again.graph, again.schedule, again.costs) == plan.timeline


def test_a_plan_file_is_two_lines() -> None:
    head, body, end = plan_of(chain()).dumps().split("\n")
    assert json.loads(head)["sha256"] == hashlib.sha256(body.encode()).hexdigest()
    assert end == ""


def flipped(text: str, position: int) -> str:
    return text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :]


def other_format(text: str) -> str:
    return text.replace(f'"gradstow_plan": {FORMAT}', f'"gradstow_plan": {FORMAT + 1}', 1)


def signed(body: str) -> str:
    """A body that its head vouches for."""
    head = {"gradstow_plan": FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return json.dumps(head) + "\n" + body + "\n"


DAMAGED: dict[str, tuple[Callable[[str], str], str]] = {
    "a flipped bit in the body": (lambda t: flipped(t, len(t) // 2), "checksum"),
    "a flipped bit near the end": (lambda t: flipped(t, len(t) - 10), "checksum"),
    "cut in the body": (lambda t: t[: len(t) // 2], "checksum"),
    "cut after the head": (lambda t: t.split("\n")[0], "checksum"),
    "cut in the head": (lambda t: t[:20], "cannot be used"),
    "more at the end": (lambda t: t + "{}", "checksum"),
    "another format": (other_format, f"its format is {FORMAT + 1}, this version reads {FORMAT}"),
    "empty": (lambda t: "", "cannot be used"),
    "a newline": (lambda t: "\n", "cannot be used"),
    "binary": (lambda t: "\x00\x01\x02\udcff" * 50, "cannot be used"),
    "not JSON": (lambda t: "hello\nworld", "cannot be used"),
    "another JSON file": (lambda t: '{"name": "x"}\n', "not a gradstow plan"),
    "JSON that is no object": (lambda t: "[1, 2]\n[3]", "not a gradstow plan"),
    "a head without a checksum": (lambda t: f'{{"gradstow_plan": {FORMAT}}}\n' + t.split("\n")[1], "sha256"),
    "an empty body": (lambda t: signed("{}"), "graph"),
    "a body of another kind": (lambda t: signed("[]"), "cannot be used"),
    "a body that is no JSON": (lambda t: signed("{"), "cannot be used"),
    "a storage of no kind": (lambda t: signed(t.split("\n")[1].replace('"gradient"', '"other"')), "other"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_plan_file_is_refused(name: str) -> None:
    damage, reason = DAMAGED[name]
    text = plan_of(batch_norm()).dumps()
    PlanData.loads(text)
    with pytest.raises(StalePlan, match=r"^plan\.json cannot be used: .*Plan again with gs\.plan and save it\.$") as e:
        PlanData.loads(damage(text), "plan.json")
    assert reason in str(e.value)
    assert isinstance(e.value, ValueError)


def test_every_flipped_bit_is_seen() -> None:
    text = plan_of(chain(1)).dumps()
    unseen = []
    for position in range(0, len(text), 7):
        try:
            PlanData.loads(flipped(text, position))
            unseen.append(position)
        except StalePlan:
            pass
    # the head's own blanks and the newlines at the end carry nothing
    assert all(text[p] in " \n" for p in unseen)
