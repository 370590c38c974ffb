"""Rows, text, JSON and picture of a plan made by hand, and of plans changed in one place."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradstow.errors import GradstowError
from gradstow.ir import (
    CostTable,
    GraphBreak,
    Op,
    OpCost,
    PlanData,
    Region,
    Resident,
    Schedule,
    StepGraph,
    Storage,
    StorageKind,
    Value,
    just_in_time,
)
from gradstow.report import Curve, Row, memory_picture, plan_json, plan_rows, plan_text, summarize

MIB = 2**20


def layers(count: int, *, pinned: str = "") -> Region:
    """``count`` times matmul and relu; the backward of each reads both. All activations are 1 MiB."""
    values = [Value("x", 0, (256, 1024), "float32"), Value("tangent", 1, (256, 1024), "float32")]
    storages = [Storage(MIB, StorageKind.RESIDENT), Storage(MIB, StorageKind.TANGENT)]
    ops: list[Op] = []

    def add(name: str, inputs: tuple[int, ...], *, backward: bool, module: str, pinned: str = "") -> int:
        kind = StorageKind.GRADIENT if backward else StorageKind.ACTIVATION
        storages.append(Storage(MIB, kind))
        values.append(Value(f"{name}_{len(values)}", len(storages) - 1, (256, 1024), "float32"))
        new = len(values) - 1
        target = f"aten.{name}.default"
        where = f"model.py:{10 + len(ops)}"
        ops.append(
            Op(f"{name}_{new}", target, inputs, (new,), backward, False, pinned,
               signature=name, module=f"module.{module}" if module else "", source=where)
        )  # fmt: skip
        return new

    at, pairs = 0, []
    for i in range(count):
        made = add("mm", (at,), backward=False, module=f"blocks.{i}.linear", pinned=pinned)
        at = add("relu", (made,), backward=False, module=f"blocks.{i}.act")
        pairs.append((made, at))
    gradient = 1
    for made, at in reversed(pairs):
        gradient = add("mm_backward", (gradient, made, at), backward=True, module="")
    return Region(
        "region 0", tuple(storages), tuple(values), tuple(ops),
        inputs=(0,), outputs=(pairs[-1][1],), tangents=(1,), tangent_mask=(True,),
        gradients=(gradient,), accumulated=(True,), added=(False,), fingerprint="f", held=True,
    )  # fmt: skip


COSTS = CostTable({"mm": OpCost(0.012), "relu": OpCost(0.0004), "mm_backward": OpCost(0.03)}, "cpu", 2)


def made_plan(region: Region, keep: Callable[[Op], bool], **changes: Any) -> PlanData:
    """The region's plan that keeps what ``keep`` says, by its op."""
    kept = [region.values[v].storage for op in region.ops if keep(op) for v in op.outputs]
    everything = range(len(region.storages))
    graph = StepGraph(
        (region,),
        Resident(parameters=3 * MIB, batch=MIB),
        batch="(256, 1024)float32 *",
        model="Tiny",
        versions={"torch": "2.14.1"},
    )
    plan = PlanData(
        graph,
        Schedule((just_in_time(region, kept),)),
        Schedule((just_in_time(region, everything, reuse=False),)),
        COSTS,
        budget="60%",
    )
    return replace(plan, **changes)


def keep_matmuls(op: Op) -> bool:
    return "mm" in op.target


def by_decision(rows: tuple[Row, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row.decision] = found.get(row.decision, 0) + 1
    return found


def test_rows_say_what_the_schedule_does() -> None:
    rows = plan_rows(made_plan(layers(3), keep_matmuls))
    assert [row.decision for row in rows] == ["store", "recompute"] * 2 + ["store", "output"]
    first, second = rows[:2]
    assert (first.op, first.module, first.source) == ("mm", "blocks.0.linear", "model.py:10")
    assert (first.nbytes, first.shape, first.dtype) == (MIB, (256, 1024), "float32")
    assert first.reason == "recompute costs 12.0 ms per 1.0 MiB"
    assert (first.seconds, first.reruns) == (0.012, 0)
    assert second.reason == "rerun costs 400 µs, frees 1.0 MiB"
    assert (second.seconds, second.reruns) == (0.0004, 1)


def test_everything_stored_has_no_recomputed_row() -> None:
    assert by_decision(plan_rows(made_plan(layers(3), lambda _op: True))) == {"store": 5, "output": 1}


def test_nothing_kept_reruns_all_but_the_output() -> None:
    plan = made_plan(layers(3), lambda _op: False)
    assert by_decision(plan_rows(plan)) == {"recompute": 5, "output": 1}
    assert plan.rerun_ops == summarize(plan).rerun_ops == sum(row.reruns for row in plan_rows(plan))


def test_a_pinned_op_gives_its_reason() -> None:
    rows = plan_rows(made_plan(layers(2, pinned="draws random numbers"), lambda _op: False))
    assert [(r.decision, r.reason) for r in rows if r.op == "mm"] == [("store", "draws random numbers")] * 2
    assert all(r.seconds == 0.0 for r in rows if r.op == "mm")


def test_an_unknown_cost_is_never_a_number() -> None:
    costs = CostTable({**COSTS.costs, "mm": OpCost(0.0, 0, "unknown")}, "cpu", 2)
    rows = plan_rows(made_plan(layers(2), keep_matmuls, costs=costs))
    assert {row.reason for row in rows if row.op == "mm"} == {"cost unknown"}


def test_an_output_that_the_loop_drops_is_like_any_other() -> None:
    dropped = replace(layers(2), held=False)

    def last_row(keep: Callable[[Op], bool]) -> Row:
        plan = made_plan(dropped, keep)
        return plan_rows(replace(plan, graph=replace(plan.graph, outputs_held=False)))[-1]

    assert last_row(lambda _op: True).decision == "store"
    assert last_row(keep_matmuls).decision == "recompute"


def test_a_value_that_the_backward_never_reads_is_free_and_not_in_the_table() -> None:
    region = layers(2)
    ops = tuple(replace(op, inputs=op.inputs[:2]) if op.backward else op for op in region.ops)
    plan = made_plan(replace(region, ops=ops), keep_matmuls)
    first = plan_rows(plan)[1]
    assert (first.op, first.decision, first.reason) == ("relu", "free", "not needed by the backward")
    assert "not needed" not in plan_text(plan)
    assert "not needed by the backward" in plan_text(plan, free=True)


def test_a_plain_region_is_listed_as_not_planned() -> None:
    plan = made_plan(replace(layers(2), name="loss", managed=False), lambda _op: True)
    assert summarize(plan).not_planned == {"loss": 4}
    assert "not planned  loss (4 ops): runs as plain PyTorch" in plan_text(plan)
    assert {row.reason for row in plan_rows(plan) if row.decision == "store"} == {"runs as plain PyTorch"}


def test_a_value_between_two_regions_is_one_row_of_its_maker() -> None:
    first, second = replace(layers(1), held=False), layers(1)
    crossing = first.values[first.outputs[0]].storage
    storages = (replace(second.storages[0], kind=StorageKind.BOUNDARY, origin=(0, crossing)), *second.storages[1:])
    ops = tuple(replace(op, inputs=(*op.inputs, 0)) if op.backward else op for op in second.ops)
    second = replace(second, name="region 1", storages=storages, ops=ops)
    plan = made_plan(first, keep_matmuls)
    pieces = Schedule((*plan.schedule.regions, just_in_time(second, [])))
    rows = plan_rows(replace(plan, graph=replace(plan.graph, regions=(first, second)), schedule=pieces))
    assert [(r.region, r.op, r.decision) for r in rows] == [
        ("region 0", "mm", "store"),
        ("region 0", "relu", "store"),
        ("region 1", "mm", "recompute"),
        ("region 1", "relu", "output"),
    ]
    assert rows[1].reason == "read by a later region"


def test_the_rows_bytes_add_up_to_the_activations() -> None:
    region = layers(4)
    rows = plan_rows(made_plan(region, keep_matmuls))
    assert sum(row.nbytes for row in rows) == sum(s.nbytes for s in region.storages if s.kind is StorageKind.ACTIVATION)
    shares = summarize(made_plan(region, keep_matmuls)).decisions
    assert sum(share.nbytes for share in shares.values()) == sum(row.nbytes for row in rows)
    assert sum(share.values for share in shares.values()) == len(rows)


def test_the_header_holds_the_predictions() -> None:
    plan = made_plan(layers(3), keep_matmuls, lower_bound_seconds=0.1)
    text = plan_text(plan)
    lines = dict(line.split(None, 1) for line in text.splitlines()[:3])
    assert text.startswith("Plan for Tiny on cpu, torch 2.14.1, policy auto\n")
    assert lines["batch"] == "float32[256, 1024]"
    assert lines["budget"] == "60%"
    assert "resident     4.0 MiB (parameters 3.0 MiB, batch 1.0 MiB)" in text
    step = f"{plan.predicted_step_peak_bytes / MIB:.1f} MiB predicted, {plan.plain_step_peak_bytes / MIB:.1f}"
    assert f"step peak    {step} MiB plain" in text
    assert "peak at      mm_backward (model.py:17), in the backward" in text
    assert "proven bound 100.0 ms" in text
    assert "graph breaks none" in text


def test_the_peak_of_an_optimizer_is_said() -> None:
    plan = made_plan(layers(2), keep_matmuls)
    heavy = replace(plan, graph=replace(plan.graph, optimizer_peak_bytes=100 * MIB))
    assert str(summarize(heavy).peak_at) == "optimizer.step"


def test_graph_breaks_are_said() -> None:
    plan = made_plan(layers(2), keep_matmuls)
    broken = replace(plan, graph=replace(plan.graph, breaks=(GraphBreak("call to .item()", "model.py:7"),)))
    assert "graph breaks call to .item() (model.py:7)" in plan_text(broken)


def test_repeated_layers_are_one_line() -> None:
    lines = [line.split() for line in plan_text(made_plan(layers(12), keep_matmuls)).splitlines()]
    assert ["1.0", "MiB", "×12", "store", "mm", "f32[256,1024]", "blocks.*.linear"] in [w[:7] for w in lines]
    assert ["1.0", "MiB", "×11", "recompute", "relu", "f32[256,1024]", "blocks.*.act"] in [w[:7] for w in lines]


def test_layers_that_differ_in_anything_are_not_collapsed() -> None:
    region = layers(4)
    ops = tuple(replace(op, module=op.module.replace("blocks.3", "head")) for op in region.ops)
    text = plan_text(made_plan(replace(region, ops=ops), keep_matmuls))
    assert "×3" in text
    assert "×4" not in text
    assert "head.linear" in text


def test_no_line_is_wider_than_120_columns() -> None:
    region = layers(3)
    ops = tuple(replace(op, module=f"{'deep.' * 30}{op.module}", target="aten." + "x" * 40 + ".y")
                for op in region.ops)  # fmt: skip
    plan = made_plan(replace(region, ops=ops), keep_matmuls)
    plan = replace(plan, graph=replace(plan.graph, breaks=(GraphBreak("why " * 60, ""),), model="M" * 200))
    assert max(len(line) for line in plan_text(plan).splitlines()) <= 120


def test_the_table_is_cut_and_says_what_it_leaves_out() -> None:
    region = layers(6)
    ops = tuple(replace(op, module=f"part{chr(97 + i)}") for i, op in enumerate(region.ops))
    plan = made_plan(replace(region, ops=ops), keep_matmuls)
    assert plan_text(plan, limit=4).endswith("\n... and 8 smaller values, 8.0 MiB")
    assert "smaller values" not in plan_text(plan, limit=None)


def test_json_holds_the_header_and_every_row() -> None:
    plan = made_plan(layers(3), keep_matmuls)
    data = json.loads(json.dumps(plan_json(plan)))
    assert data["predicted_step_peak_bytes"] == plan.predicted_step_peak_bytes
    assert data["resident"]["parameters"] == 3 * MIB
    assert data["decisions"]["store"] == {"values": 3, "bytes": 3 * MIB}
    assert data["peak_at"]["part"] == "backward"
    assert [row["decision"] for row in data["rows"]] == [row.decision for row in plan_rows(plan)]
    assert data["rows"][0]["bytes"] == MIB


CURVES = [Curve("plain", [(0.0, MIB), (1.0, 3 * MIB), (2.0, 0)]), Curve("planned", [(0.0, MIB), (2.5, 0)])]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = memory_picture(tmp_path / f"memory.{ending}", CURVES, budget_bytes=2 * MIB)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" if ending == "png" else path.stat().st_size > 5000


def test_a_picture_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "missing" / "memory.png", tmp_path / "memory.nonsense"):
        with pytest.raises(GradstowError, match="cannot be written"):
            memory_picture(path, CURVES)


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(GradstowError, match=r"pip install 'gradstow\[report\]'"):
        memory_picture(tmp_path / "memory.png", CURVES)


def test_names_cannot_command_a_terminal() -> None:
    from gradstow.report._profile_text import _cut
    from gradstow.report._text import _render, cut

    name = "a\x1b[31m\nb\u202ec"
    for text in (_cut(name, 40), cut(name, 40), _render(("", "", "", "", "", "x" * 20 + name), name)):
        assert text.isprintable()
        assert "[31m" in text
    assert _cut("×12 日本語 █", 40) == "×12 日本語 █"
