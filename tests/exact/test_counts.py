"""Ops that run are counted as integers: reruns are exactly the plan's, random ops run as often as in plain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradstow as gs
from models import CASES, Case

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Calls(TorchDispatchMode):
    """Counts calls by op; ``work`` without views, ``random`` only what draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()
        self.random = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {_storage(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        if func._schema.is_mutable or not made <= read:
            self.work[func._schema.name.removesuffix("_")] += 1
        self.random += torch.Tag.nondeterministic_seeded in func.tags
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def calls(case: Case, device: str, plan: gs.Plan | None) -> Calls:
    """The calls of the second step."""
    model, batch = case.model(device), case.data(device)
    if plan is not None:
        gs.stow(model, plan=plan)
    case.run(model, batch).backward()
    model.zero_grad(set_to_none=True)
    with Calls() as counted:
        case.run(model, batch).backward()
    return counted


@pytest.mark.parametrize("name", ["conv", "densenet", "transformer", "scattered"])
def test_reruns_are_exactly_the_plans(name: str, device: str) -> None:
    case = CASES[name]
    plans = [
        gs.plan(case.model(device), case.data(device), loss=case.loss, policy=policy)
        for policy in ("store-all", "recompute-all")
    ]
    stored, rerun = (calls(case, device, plan) for plan in plans)
    assert plans[0].rerun_ops == 0 < plans[1].rerun_ops
    assert difference(rerun.work, stored.work) == difference(planned_calls(plans[1]), planned_calls(plans[0]))


def difference(a: Counter[str], b: Counter[str]) -> dict[str, int]:
    return {name: a[name] - b[name] for name in a.keys() | b.keys() if a[name] != b[name]}


def planned_calls(plan: gs.Plan) -> Counter[str]:
    """All that is run and no view; encoding and decoding included."""
    found: Counter[str] = Counter()
    for moment in plan.timeline.moments:
        op = plan.graph.regions[moment.region].ops[moment.op]
        if not op.view:
            target = op.rerun.target if moment.recompute and op.rerun is not None else op.target
            found["::".join(target.split(".")[:2])] += 1
    return found


@pytest.mark.parametrize("name", ["conv", "transformer", "scattered"])
def test_random_ops_run_as_often_as_in_plain(name: str, device: str) -> None:
    case = CASES[name]
    plan = gs.plan(case.model(device), case.data(device), loss=case.loss, policy="recompute-all")
    plain = calls(case, device, None)
    assert calls(case, device, plan).random == plain.random > 0
