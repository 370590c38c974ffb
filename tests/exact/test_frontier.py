"""Time against peak: points are monotone, each plan runs, is equal, and keeps its peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradstow as gs
from equality import differences, train
from gradstow.planner import frontier
from models import Case, Transformer, measured_step, token_loss, tokens

WIDE = Case(lambda: Transformer(width=64, layers=2), lambda: tokens(32, 32), token_loss)


def test_points_are_monotone_and_run(device: str, tmp_path: Path) -> None:
    batch = WIDE.data(device)
    found = gs.frontier(WIDE.model(device), batch, loss=WIDE.loss, points=6, keep_output=False)
    rows = found.rows
    assert 4 <= len(rows) <= 6  # a plan that is the fastest at two budgets comes once
    peaks, seconds, bounds = ([getattr(r, name) for r in rows] for name in ("peak_bytes", "seconds", "bound_added"))
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert bounds == sorted(bounds)
    assert all(-1e-9 <= r.bound_added <= r.added + 1e-9 for r in rows)
    assert rows[-1].step_peak_bytes >= found.proven_step_peak_bytes
    expected = train(WIDE.model(device), WIDE, batch)
    measured = []
    for plan in found.plans:
        model = gs.stow(WIDE.model(device), plan=plan)
        assert differences(expected, train(model, WIDE, batch)) == []
        measured.append(measured_step(WIDE, model, batch, device))
        assert measured[-1] <= plan.predicted_step_peak_bytes
    assert measured == sorted(measured, reverse=True)
    assert json.loads(json.dumps(found.to_json()))["points"][0]["added"] == 0
    assert "no schedule is under" in str(found)
    assert found.save_picture(tmp_path / "f.svg").stat().st_size > 1000


def test_rules_and_what_may_be_used_hold_for_every_point(device: str) -> None:
    model, batch = WIDE.model(device), WIDE.data(device)
    for plan in gs.frontier(model, batch, loss=WIDE.loss, points=4, policy={"linear": "store"}).plans:
        assert "linear=store" in plan.policy
        reruns = [r.op for r in plan.rows if r.decision == "recompute"]
        assert not any(op in ("addmm", "mm") for op in reruns)
    assert len(gs.frontier(model, batch, loss=WIDE.loss, points=4, actions=("store",)).plans) == 1
    with pytest.raises(gs.errors.PolicyError, match="not a frontier"):
        gs.frontier(model, batch, loss=WIDE.loss, policy="sqrt")


def test_the_certificate(device: str) -> None:
    plan = gs.plan(WIDE.model(device), WIDE.data(device), loss=WIDE.loss, budget="70%")
    assert 0 < plan.lower_bound_seconds <= plan.predicted_seconds
    assert plan.gap == pytest.approx(plan.predicted_seconds / plan.lower_bound_seconds - 1)
    assert plan.minimum_peak_bound_bytes <= plan.minimum_peak_bytes <= plan.predicted_peak_bytes
    quick = gs.plan(WIDE.model(device), WIDE.data(device), loss=WIDE.loss, budget="70%", effort="quick")
    assert quick.predicted_step_peak_bytes <= 0.7 * quick.plain_step_peak_bytes
    with pytest.raises(gs.errors.PolicyError, match="no effort 'lots'"):
        gs.plan(WIDE.model(device), WIDE.data(device), loss=WIDE.loss, effort="lots")
    with pytest.raises(gs.errors.GradstowError, match="at least two points"):
        gs.frontier(WIDE.model(device), WIDE.data(device), loss=WIDE.loss, points=1)


def test_an_interrupt_gives_the_best_plan_so_far(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradstow.planner._program.Stages.solve", interrupted)
    plan = gs.plan(WIDE.model(device), WIDE.data(device), loss=WIDE.loss, budget="70%")
    assert plan.solver["interrupted"] is True
    assert plan.predicted_step_peak_bytes <= 0.7 * plan.plain_step_peak_bytes
    model = gs.stow(WIDE.model(device), "70%")  # in the middle of training Ctrl-C stops
    with pytest.raises(KeyboardInterrupt):
        WIDE.run(model, WIDE.data(device))


def test_an_interrupt_before_there_is_a_plan_stops(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    plan = gs.plan(WIDE.model(device), WIDE.data(device), loss=WIDE.loss)
    monkeypatch.setattr("gradstow.planner._search.greedy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        frontier(plan.graph, plan.costs, points=3)
