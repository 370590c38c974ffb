"""Plans on disk: the same plan without planning, for the same question only, whatever lies in the folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradstow as gs
from gradstow import _plan_cache, _planning
from gradstow._api import make_step
from gradstow._plan import Plan
from gradstow._plan_cache import keep_plan, kept_plan, plan_key
from gradstow._planning import capture_step, plan_captured
from gradstow._wanted import Wanted
from gradstow.capture import Captured
from gradstow.cost import _cache, _kernels, _transfers, find_profile
from gradstow.errors import BudgetTooSmall, OffloadError
from gradstow.ir import CostTable, OpCost, StepGraph
from gradstow.planner import Effort, make_plan
from gradstow.planner._program import Stages
from graphs import costs_of
from models import CASES
from shapes import tower

CONV = CASES["conv"]
WANTED = Wanted.of("70%")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSTOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADSTOW_PLAN_CACHE")
    return tmp_path / "cache" / "plans"


@pytest.fixture(scope="module")
def captured(device: str) -> Captured:
    model, batch = CONV.model(device), CONV.data(device)
    return capture_step(model, make_step(model, batch, CONV.loss, None, None, True), WANTED)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The budgets for which something is planned, not read."""
    budgets: list[str] = []
    real: Callable[..., Plan] = _planning.make_plan

    def spy(*args: Any, **kwargs: Any) -> Plan:
        budgets.append(kwargs["budget"])
        return real(*args, **kwargs)

    monkeypatch.setattr(_planning, "make_plan", spy)
    return budgets


def priced(monkeypatch: pytest.MonkeyPatch, price: Callable[[str], float]) -> None:
    def guess(signatures: Iterable[str], device: str, *_: Any) -> CostTable:
        return CostTable({text: OpCost(price(text)) for text in signatures}, device)

    monkeypatch.setattr(_planning, "measured_costs", guess)


def small() -> tuple[str, Plan, CostTable]:
    """A plan that takes no time to make, and its name."""
    graph = tower(4)
    costs = costs_of(graph)
    plan = make_plan(graph, costs, step_budget=None, budget="", kind=Plan)
    assert isinstance(plan, Plan)
    return plan_key(graph, "", Wanted()), plan, costs


def read(key: str, costs: CostTable) -> Plan | None:
    return kept_plan(key, lambda texts: {text: costs.costs[text] for text in texts})


# -------------------------------------------------------------------------------------------- the same plan


CHILD = """
    import sys
    import gradstow as gs
    from gradstow import _planning
    from models import CASES

    def fails(*_, **__):
        raise AssertionError("planned")

    _planning.make_plan = _planning.measured_costs.__globals__["measure"] = fails
    case, device = CASES["conv"], sys.argv[2]
    stages = []
    plan = gs.plan(
        case.model(device), case.data(device), loss=case.loss, budget="85%", progress=lambda s, *_: stages.append(s)
    )
    plan.save(sys.argv[1])
    assert stages == ["rehearse", "rehearse", "known plan"], stages
"""


def test_a_second_process_does_not_plan(folder: Path, tmp_path: Path, device: str) -> None:
    plan = gs.plan(CONV.model(device), CONV.data(device), loss=CONV.loss, budget="85%")
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(gs.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "plan"), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan").read_text() == plan.dumps()


@pytest.mark.usefixtures("guessed_costs")
def test_what_was_planned_is_read(folder: Path, captured: Captured, planned: list[str]) -> None:
    first = plan_captured(captured, WANTED)
    assert set(planned) == {"70%"}
    planned.clear()
    stages: list[str] = []
    interruptible = replace(WANTED.effort, interruptible=True)  # as gs.plan asks
    for wanted in (WANTED, replace(WANTED, effort=interruptible, progress=lambda s, *_: stages.append(s))):
        again = plan_captured(captured, wanted)
        assert again == first
        assert again.dumps() == first.dumps()
    assert not planned
    assert stages[-1] == "known plan"
    assert "plan" not in stages
    plan_captured(captured, replace(WANTED, cached=False))
    assert planned, "else this test proves nothing"


@pytest.mark.usefixtures("guessed_costs")
def test_what_is_refused_or_interrupted_is_not_kept(
    folder: Path, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BudgetTooSmall):
        plan_captured(captured, Wanted.of(captured.common.resident.total + 1))

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stages, "solve", interrupt)
    plan = plan_captured(captured, replace(WANTED, effort=Effort(interruptible=True)))
    assert "interrupted" in plan.solver
    assert not folder.exists()


# ------------------------------------------------------------------------------------------------- the key


CHANGED: dict[str, Any] = {
    "budget": Wanted.of("60%").budget,
    "policy": Wanted.of("70%", "relu=store").policy,
    "actions": ("store", "recompute"),
    "lossy": "int8",
    "offload": "disk",
    "effort": Effort(rounds=0),
    "profile": find_profile("cuda:t4"),
    "codegen": "inductor",
    "margin": 1,
    "cached": False,
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", [f.name for f in fields(Wanted) if f.name != "progress"])
def test_all_that_is_wanted_is_part_of_the_key(name: str) -> None:
    graph, other = tower(4), replace(WANTED, **{name: CHANGED[name]})
    assert plan_key(graph, "", WANTED) == plan_key(graph, "", replace(WANTED, progress=print))
    assert plan_key(graph, "", other) != plan_key(graph, "", WANTED)


def other_than(item: Any) -> Any:
    if isinstance(item, bool):
        return not item
    if isinstance(item, int):
        return item + 1
    if isinstance(item, tuple):
        return (*item, item[0]) if item else (1,)
    return {"x": "y"} if isinstance(item, dict) else "other" if isinstance(item, str) else replace(item, batch=9)


@pytest.mark.usefixtures("folder")
def test_all_of_the_step_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tower(4)
    monkeypatch.setattr("gradstow.cost._cache.device_name", lambda device: "a machine")
    changed = [replace(graph, **{f.name: other_than(getattr(graph, f.name))}) for f in fields(StepGraph)]
    region = graph.regions[0]
    for f in fields(region):
        changed.append(replace(graph, regions=(replace(region, **{f.name: other_than(getattr(region, f.name))}),)))
    keys = [plan_key(one, "", WANTED) for one in [graph, *changed]] + [plan_key(graph, "a fact", WANTED)]
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("folder")
def test_where_and_with_what_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return plan_key(tower(4), "", WANTED)

    first = key()
    for target, value in (
        ("torch.__version__", "0"),
        ("torch.get_num_threads", lambda: 99),
        ("torch.are_deterministic_algorithms_enabled", lambda: True),
        ("gradstow.cost._cache.device_name", lambda _: "another"),
        ("gradstow._plan_cache._own_files", lambda: "another gradstow"),
        ("gradstow._plan_cache.version", lambda _: "another solver"),
        ("gradstow._plan_cache._FORMAT", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            assert key() != first, target
    assert key() == first


@pytest.mark.usefixtures("folder")
def test_what_is_planned_anew_always(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tower(4)
    anew = [Wanted.of("auto"), Wanted.of("70%", effort="quick"), Wanted.of("70%", effort="thorough")]
    assert [plan_key(graph, "", w) for w in [*anew, replace(WANTED, cached=False)]] == [""] * 4
    assert plan_key(graph, "", Wanted.of("auto", profile=find_profile("cuda:t4"))), "its memory is on the data sheet"
    monkeypatch.setenv("GRADSTOW_PLAN_CACHE", "0")
    assert plan_key(graph, "", WANTED) == ""


def test_other_costs_are_another_plan(
    folder: Path, captured: Captured, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of any way that was tried, also where the plan itself has no such op."""
    priced(monkeypatch, lambda text: 1e-5)
    plan = plan_captured(captured, WANTED)
    (file,) = folder.iterdir()
    decisive = json.loads(file.read_text().split("\n")[1])["costs"]
    assert decisive.keys() > plan.costs.costs.keys()
    elsewhere = min(decisive.keys() - plan.costs.costs.keys())
    for changed in (elsewhere, min(plan.costs.costs)):
        priced(monkeypatch, lambda text, changed=changed: 2e-5 if text == changed else 1e-5)  # type: ignore[misc]
        for tried in (True, False):
            planned.clear()
            plan_captured(captured, WANTED)
            assert bool(planned) == tried
    assert [*folder.iterdir()] == [file]


@pytest.mark.usefixtures("guessed_costs")
def test_a_place_of_another_speed_or_that_is_gone(
    folder: Path, captured: Captured, planned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    wanted = Wanted.of("70%", {"relu": "offload"}, offload=f"disk:{place}")
    for speed, anew in ((1e9, True), (1e9, False), (1e6, True), (1e6, False)):
        monkeypatch.setattr(_transfers, "bandwidth_of", lambda *_, s=speed: _transfers.Bandwidth(s, s))
        planned.clear()
        plan_captured(captured, wanted)
        assert bool(planned) == anew
    place.rmdir()
    with pytest.raises(OffloadError, match="is no folder"):
        plan_captured(captured, wanted)


def test_the_speed_that_prices_kernels_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each process would have other costs of compiled code."""
    kernel = '["gradstow.kernel",[{"T":[[8],[1],"float32","cpu"]}],{"makes":[]}]'
    found = []
    for rate in (1e9, 2e9):
        monkeypatch.setattr(_transfers, "bandwidth", lambda _device, rate=rate: rate)
        _transfers.bandwidth_within.cache_clear()
        found.append(_kernels.kernel_costs([kernel], "cpu")[kernel])
    _transfers.bandwidth_within.cache_clear()
    assert found[0] == found[1]


# --------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("region", "regiom", 1),
        lambda text: text.partition("\n")[2],
        lambda text: "\x00\xff" * 9,
        lambda text: "null\nnull\nnull",
    ],
)
def test_a_damaged_file_is_replaced(folder: Path, damage: Callable[[str], str]) -> None:
    key, plan, costs = small()
    keep_plan(key, plan, costs.costs)
    (file,) = folder.iterdir()
    good = file.read_text()
    file.write_text(damage(good), encoding="latin-1")
    assert read(key, costs) is None
    keep_plan(key, plan, costs.costs)
    assert file.read_text() == good
    assert read(key, costs) == plan


def test_a_foreign_file_is_ignored(folder: Path) -> None:
    key, plan, costs = small()
    keep_plan(key, plan, costs.costs)
    other = plan_key(tower(5), "", Wanted())
    os.rename(folder / f"{key}.plan", folder / f"{other}.plan")
    assert read(other, costs) is None
    sealed = _plan_cache._seal(other, "{}\nno plan")
    (folder / f"{other}.plan").write_text(f"{sealed}\n{{}}\nno plan")
    assert read(other, costs) is None


@pytest.mark.usefixtures("guessed_costs")
@pytest.mark.parametrize("what", ["no folder", "read-only", "full"])
def test_a_folder_that_takes_nothing_changes_nothing(
    what: str, folder: Path, captured: Captured, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28 if what == "full" else 30, "refused")

    if what == "no folder":
        folder.parent.write_text("a file where the folder should be")
    else:
        monkeypatch.setattr(_cache.os, "replace" if what == "full" else "utime", refuse)
        monkeypatch.setattr(_cache.tempfile, "mkstemp", _cache.tempfile.mkstemp if what == "full" else refuse)
    with warnings.catch_warnings(action="error"):
        first = plan_captured(captured, WANTED)
        planned.clear()
        assert plan_captured(captured, WANTED) == first
    assert planned
    assert what == "no folder" or [*folder.iterdir()] == []


def test_a_folder_that_can_only_be_read_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, plan, costs = small()
    keep_plan(key, plan, costs.costs)

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(_plan_cache.os, "utime", refuse)
    assert read(key, costs) == plan


@pytest.mark.parametrize("bound", ["plans", "bytes"])
def test_the_least_recently_used_leave(bound: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, costs = small()
    keep_plan("a", plan, costs.costs)
    size = (folder / "a.plan").stat().st_size
    monkeypatch.setattr(_plan_cache, *(("_MOST_PLANS", 3) if bound == "plans" else ("_MOST_BYTES", 3 * size + 9)))

    def aged() -> None:
        """Clocks of file systems are coarse."""
        for path in folder.iterdir():
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))

    (folder / "killed.tmp").write_text("x" * size)
    for key in "bc":
        aged()
        keep_plan(key, plan, costs.costs)
    assert {path.name for path in folder.iterdir()} == {"b.plan", "c.plan"} | (
        {"killed.tmp"} if (folder / "killed.tmp").exists() else {"a.plan"}
    )
    for key in "de":
        aged()
        assert read("b", costs) == plan
        aged()
        keep_plan(key, plan, costs.costs)
    assert {path.name for path in folder.iterdir()} == {"b.plan", "d.plan", "e.plan"}
    monkeypatch.setattr(_plan_cache, "_MOST_BYTES", size - 1)
    keep_plan("f", plan, costs.costs)
    assert not (folder / "f.plan").exists(), "it alone is too much"


def _write_many(plan: Plan, costs: CostTable) -> None:
    for number in range(40):
        keep_plan(f"{number % 4}", plan, costs.costs)


def test_two_processes_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write and remove the same files."""
    _, plan, costs = small()
    monkeypatch.setattr(_plan_cache, "_MOST_PLANS", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside torch's idle threads
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=_write_many, args=(plan, costs)) for _ in range(2)]
        for writer in writers:
            writer.start()
    while any(writer.is_alive() for writer in writers):
        assert all(read(key, costs) in (None, plan) for key in "0123")
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    keep_plan("last", plan, costs.costs)
    assert len([*folder.iterdir()]) == 2
    assert {path.suffix for path in folder.iterdir()} == {".plan"}
    assert read("last", costs) == plan


def test_no_other_test_reads_plans() -> None:
    """Each plans for itself: none passes by what another one planned."""
    assert os.environ["GRADSTOW_PLAN_CACHE"] == "0"
    assert plan_key(tower(4), "", WANTED) == ""
