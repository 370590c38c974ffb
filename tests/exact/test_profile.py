"""Profiles: their rows add up to the measured peak, and the views of them to the rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow.report import Held, saved_by_module
from gradstow.report._tree import module_tree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.norm(self.conv(x)))


class Network(nn.Module):
    """Four equal blocks, dropout, and a head that is used outside of any module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Parameter(torch.randn(8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.blocks(self.stem(x)).mean((2, 3))) @ self.head


def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def example() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Network(), (torch.randn(4, 3, 24, 24), torch.randint(0, 10, (4,)))


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
@pytest.mark.parametrize("keep_output", [True, False])
def test_the_rows_add_up_to_what_is_measured(optimizer: Any, keep_output: bool) -> None:
    model, batch = example()
    own = optimizer(model.parameters()) if optimizer else None
    found = gs.profile(model, batch, loss=loss_fn, optimizer=own, budget="85%", measure=True, keep_output=keep_output)
    for name, snapshot in (("plain", found.plain), ("planned", found.planned)):
        measured = found.measured[name].peak_bytes
        assert sum(row.nbytes for row in snapshot.rows) == snapshot.peak_bytes == sum(snapshot.parts.values())
        assert abs(snapshot.peak_bytes / measured - 1) < 0.01, name
    assert found.plain.peak_bytes == found.plan.plain_peak_bytes
    assert found.planned.peak_bytes == found.plan.predicted_peak_bytes < found.plain.peak_bytes


@pytest.mark.usefixtures("guessed_costs")
def test_what_is_saved_is_what_autograd_saves_in_each_module() -> None:
    model, batch = example()
    found = gs.profile(model, batch, loss=loss_fn, measure=True)
    saved = found.measured["plain"].saved
    assert saved is not None
    assert saved["blocks.0.act"] == 4 * 8 * 24 * 24 * 4
    assert saved_by_module(found.plan) == saved
    assert not any(p.grad is not None for p in model.parameters()), "the user's model took no step"


class Twice(nn.Module):
    """Two outputs: the loss saves the second, and the first is one that its own op saves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 16), nn.Linear(8, 16), nn.Tanh()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"a": self.act(self.a(x)), "b": self.b(x), "none": None}


@pytest.mark.usefixtures("guessed_costs")
def test_an_output_that_the_backward_reads_is_saved_too() -> None:
    found = gs.profile(
        Twice(), torch.randn(32, 8), loss=lambda out, _: out["a"].mean() + out["b"].square().mean(), measure=True
    )
    assert found.plain.parts.get("saved") is None, "the loop holds them anyway"
    assert saved_by_module(found.plan) == found.measured["plain"].saved == {"act": 2048, "b": 2048}
    data = found.to_json()
    assert data["saved"] == data["measured"]["plain"]["saved"]


class Shared(nn.Module):
    """Layers with several names, called by the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Tanh()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())])
        self.block = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(self.second(x))
        return result.square()


@pytest.mark.usefixtures("guessed_costs")
def test_a_layer_with_several_names_is_called_by_its_first() -> None:
    model, batch = Shared(), torch.randn(32, 8)
    found = gs.profile(model, batch, loss=lambda out, _: out.mean(), budget="100%", measure=True)
    names = {"first": 1024, "blocks.0.1": 1024}
    assert found.to_json()["saved"] == names == found.measured["plain"].saved
    assert {row.module for row in found.plain.rows} <= {name for name, _ in model.named_modules()}
    gs.stow(model, plan=found.plan)  # the same plan under any name
    model(batch).mean().backward()


class Deep(nn.Module):
    """A name longer than a line, and more than ten layers that save as much."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
        self.add_module("a_long_name_" * 30, nn.Sequential(*layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layers in self.children():
            x = layers(x)
        return x


@pytest.mark.usefixtures("guessed_costs")
def test_no_line_is_longer_than_a_terminal_and_the_rest_is_counted() -> None:
    text = gs.profile(Deep(), torch.randn(64, 32), loss=lambda out, _: out.square().mean(), measure=True).text()
    assert max(map(len, text.splitlines())) <= 120
    saved = text.partition("saved for the backward, by the module")[2].splitlines()
    assert saved[1].split() == ["96.0", "KiB", "96.0", "KiB", "(all)"]
    assert saved[12].split() == ["16.0", "KiB", "16.0", "KiB", "2", "more"]


@pytest.mark.parametrize(
    ("names", "members"),
    [
        (range(12), "0…11"),
        (range(0, 12, 3), "0, 3, 6, 9"),
        (range(1, 25, 2), "1, 3, 5, 7 … 23"),
        ([10, 9, 11], "9…11"),
    ],
)
def test_layers_of_one_line_are_named(names: Iterable[int], members: str) -> None:
    rows = [Held("a value", "saved", 8, module=f"blocks.{name}.act") for name in names]
    (blocks,) = module_tree(rows).children
    (layers,) = blocks.children
    assert (layers.name, layers.times, layers.members) == ("*", len(rows), members)
    assert layers.to_json()["members"] == members
    assert layers.children[0].members == ""


def test_names_that_only_look_like_numbers_stay() -> None:
    rows = [Held("a value", "saved", 8, module=name) for name in ("²", "³")]
    assert [child.name for child in module_tree(rows).children] == ["²", "³"]


def test_gradients_that_exist_are_resident() -> None:
    model, batch = example()
    loss_fn(model(batch[0]), batch).backward()
    found = gs.profile(model, batch, loss=loss_fn, measure=True)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert found.plain.parts["gradients"] == gradients
    assert {row.module for row in found.plain.rows if row.part == "gradients"} >= {"stem", "blocks.3.conv"}
    assert abs(found.plain.peak_bytes / found.measured["plain"].peak_bytes - 1) < 0.01


@pytest.mark.usefixtures("guessed_costs")
def test_groups_and_modules_add_up_and_equal_blocks_are_one() -> None:
    model, batch = example()
    found = gs.profile(model, batch, loss=loss_fn)
    peak = found.plain.peak_bytes
    for what in ("op", "module", "source"):
        assert sum(found.plain.by(what).values()) == peak
    tree = found.to_json()["modules"]["plain"]
    assert tree["bytes"] == peak
    (blocks,) = [child for child in tree["children"] if child["name"] == "blocks"]
    assert sum(child["times"] for child in blocks["children"]) == 4
    assert any(child["name"] == "*" and child["times"] > 1 for child in blocks["children"])
    assert "blocks" in str(found)
    assert "×" in str(found)


@pytest.mark.usefixtures("guessed_costs")
def test_every_moment_by_parts_is_the_timeline() -> None:
    model, batch = example()
    data = gs.profile(model, batch, loss=loss_fn, budget="85%").to_json()
    for name, line in data["timelines"].items():
        sums = [sum(levels[i] for levels in line["parts"].values()) for i in range(len(line["bytes"]))]
        assert sums == line["bytes"]
        assert max(sums) == data["peaks"][name]["peak_bytes"]
        peak = sums.index(max(sums))
        alive = sum(life["bytes"] for life in line["lives"] if life["first"] <= peak <= life["last"])
        resident, working = data["plan"]["resident_bytes"], line["parts"].get("working", [0] * len(sums))[peak]
        assert alive + resident + working == max(sums)
        assert line["seconds"] == sorted(line["seconds"])


@pytest.mark.usefixtures("guessed_costs")
def test_an_optimizer_that_sets_the_peak() -> None:
    """One large weight, a tiny batch: the state's first step needs more than the backward."""
    model, batch = nn.Linear(512, 512), torch.randn(1, 512)
    found = gs.profile(
        model, batch, loss=lambda out, _: out.sum(), optimizer=torch.optim.AdamW(model.parameters(), foreach=True)
    )
    assert str(found.plain.at) == "optimizer.step"
    assert found.plain.peak_bytes == found.plan.plain_peak_bytes
    assert found.plain.parts["optimizer"] >= 2 * 512 * 512 * 4


@pytest.mark.usefixtures("guessed_costs")
def test_files(tmp_path: Path) -> None:
    model, batch = example()
    found = gs.profile(model, batch, loss=loss_fn, budget="85%", points=3)
    assert found.frontier is not None
    trace = json.loads(found.save_trace(tmp_path / "trace.json").read_text())
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert len(ops) == len(found.plan.plain_timeline.moments)
    levels = [sum(e["args"].values()) for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 2]
    assert max(levels) == found.planned.peak_bytes
    page = found.save_html(tmp_path / "page.html").read_text()
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == json.loads(json.dumps(found.to_json()))
    with pytest.raises(gs.errors.GradstowError, match="the page cannot be written to .*nowhere"):
        found.save_html(tmp_path / "nowhere" / "page.html")


def test_steps_for_another_device_are_not_measured() -> None:
    model, batch = example()
    with pytest.raises(gs.errors.GradstowError, match="cannot be measured here"):
        gs.profile(model, batch, loss=loss_fn, measure=True, device="cuda:h100")
