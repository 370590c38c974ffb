"""Stop and go on: the same bits, also after SIGKILL; checkpoints are whole or not there."""

from __future__ import annotations

import copy
import fcntl
import os
import random
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
import kill_resume
from equality import differences
from gradstow.train._clip import AdaptiveClip
from gradstow.train._state import write_state
from gradstow.train._step import TrainStep

KILLS = int(os.environ.get("GRADSTOW_TEST_KILLS", "3"))


class Loader:
    """Knows its position."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def make(**options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    optimizers = [torch.optim.AdamW(model[:3].parameters(), 1e-2), torch.optim.SGD(model[4].parameters(), 0.1, 0.9)]
    first = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.1, total_steps=20)
    second = torch.optim.lr_scheduler.MultiStepLR(optimizers[1], [2, 4])
    options = {"scheduler": [first, second], "clip": AdaptiveClip(warmup=2), "precision": "fp16", **options}
    options.setdefault(
        "scaler", {"growth_interval": 2, "init_scale": 1024.0} if options["precision"] == "fp16" else None
    )
    return TrainStep(model, optimizers, loss=loss_of, **options)


def train(step: TrainStep, count: int) -> list[tuple[str, torch.Tensor]]:
    """Everything that came out, by name; data comes from all random streams."""
    seen = []
    for _ in range(count):
        x = torch.randn(12, 8) + random.random() + float(np.random.randn())
        if step.steps == 3:
            x = x * float("inf")
        result = step((x, torch.randint(0, 4, (12,))))
        seen.append(("result", torch.tensor([result.loss, result.grad_norm, result.clip_at or 0.0])))
        if isinstance(step.data, int):
            step.data += 1
    seen += [(n, t.clone()) for n, t in step.model.state_dict().items()]
    rates = [o.param_groups[0]["lr"] for o in step.optimizers]
    scale = 0.0 if step.scaler is None else step.scaler.get_scale()
    counters = torch.tensor([*rates, scale, step.steps, step.skipped_steps], dtype=torch.float64)
    return [*seen, ("counters", counters), ("random", torch.get_rng_state())]


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    step = make(precision=precision)
    random.seed(3)
    np.random.seed(3)
    train(step, 3)
    step.save(tmp_path / "run.pt")
    expected = train(step, 5)
    assert step.skipped_steps > 0, "a window was skipped on the way"

    other = make(precision=precision)
    train(other, 1)
    random.seed(99)
    np.random.seed(99)
    other.load(tmp_path / "run.pt")
    assert other.data == 3
    assert differences(expected, train(other, 5)) == []


def test_a_state_in_memory_can_be_loaded_twice() -> None:
    step = make(precision="fp32")
    random.seed(3)
    np.random.seed(3)
    train(step, 2)
    kept = copy.deepcopy(step.state_dict())
    expected = train(step, 3)
    for _ in range(2):
        step.load_state_dict(kept)
        assert differences(expected, train(step, 3)) == []


def test_numpy_keeps_its_half_drawn_pair(tmp_path: Path) -> None:
    step = make(precision="fp32")
    np.random.seed(1)
    random.seed(1)
    np.random.randn()
    random.gauss(0, 1)
    step.save(tmp_path / "run.pt")
    expected = np.random.randn(3).tolist(), random.gauss(0, 1)
    step.load(tmp_path / "run.pt")
    assert (np.random.randn(3).tolist(), random.gauss(0, 1)) == expected


def test_the_place_in_the_data(tmp_path: Path) -> None:
    loader = Loader()
    step = make(data=loader)
    loader.at = 17
    step.save(tmp_path / "run.pt")
    loader.at = 0
    step.load(tmp_path / "run.pt")
    assert loader.at == 17


def test_auto_keeps_the_size_of_the_saved_run(tmp_path: Path) -> None:
    def build(**options: Any) -> TrainStep:
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(16, 4))
        return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss_of, **options)

    batch = torch.randn(96, 16), torch.randint(0, 4, (96,))
    step = build(micro_batch="auto", budget="80%")
    step(batch)
    assert step.choice is not None
    state = copy.deepcopy(step.state_dict())
    assert state["fit"] == {
        "asked": "auto",
        "micro_batch": step.choice.micro_batch,
        "budget": "80%",
        "budget_bytes": step.choice.budget_bytes,
    }
    state["fit"]["micro_batch"] = 40  # as another machine with other op times may have chosen
    other = build(micro_batch="auto", budget="80%")
    other.load_state_dict(state)
    assert other(batch).micro_batches == 3
    assert other.choice is None
    other.save(tmp_path / "run.pt")
    changed = build(micro_batch=96)
    changed.load(tmp_path / "run.pt")
    assert changed.micro_batch == 96
    tighter = build(micro_batch="auto", budget="70%")
    tighter.load(tmp_path / "run.pt")
    assert tighter.micro_batch is None, "another budget: the next step chooses"


def test_adamw_goes_on_under_a_budget(tmp_path: Path) -> None:
    def build() -> TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
        return TrainStep(model, torch.optim.AdamW(model.parameters(), 0.01), loss=loss_of, budget="100%")

    batch = torch.randn(64, 16), torch.randint(0, 4, (64,))
    step = build()
    step(batch)
    step.save(tmp_path / "run.pt")
    step(batch)
    other = build()
    other.load(tmp_path / "run.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that is recorded may exceed the budget
        other(batch)
    assert differences([*step.model.state_dict().items()], [*other.model.state_dict().items()]) == []


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    rows = kill_resume.trials(KILLS, KILLS, int(os.environ.get("GRADSTOW_TEST_SEED", "0")), tmp_path)
    assert sum(len(row["killed_at"]) for row in rows) >= min(KILLS, 2)
    assert [row["differs"] for row in rows] == [[]] * len(rows)


def test_the_comparison_of_runs_sees_a_difference(tmp_path: Path) -> None:
    for name, loss, weight in (("a", "0x1p0", "1"), ("b", "0x1p1", "1"), ("c", "0x1p0", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "losses.jsonl").write_text(f'[0, "{loss}"]\n[1, "cut')
        (tmp_path / name / "final.json").write_text(f'{{"weight": "{weight}"}}')
    assert kill_resume.compare(tmp_path / "a", tmp_path / "a") == []
    assert kill_resume.compare(tmp_path / "a", tmp_path / "b") == ["a loss"]
    assert kill_resume.compare(tmp_path / "a", tmp_path / "c") == ["weight"]


# ------------------------------------------------------------------------------------------------ files


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    write_state({"number": 1}, path)
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    write_state({"number": 2}, link)
    assert link.is_symlink()
    assert torch.load(path) == {"number": 2}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(gs.errors.GradstowError, match="No space left on device. Choose another place"):
            write_state({"number": 3}, path)
    assert torch.load(path) == {"number": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.pt", "run.pt"]
    (tmp_path / ".run.pt.part").write_bytes(b"left over by a run that was killed" * 1000)
    write_state({"number": 4}, path)
    assert torch.load(path) == {"number": 4}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.pt", "run.pt"]
    with pytest.raises(gs.errors.GradstowError, match="it is a folder"):
        write_state({}, tmp_path)
    with pytest.raises(gs.errors.GradstowError, match="No such file or directory"):
        write_state({}, tmp_path / "missing" / "run.pt")


def test_what_is_not_yet_renamed_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order: content on the disk, then the rename, then the folder on the disk."""
    path, order = tmp_path / "run.pt", []
    real_sync, real_replace = os.fsync, os.replace

    def sync(file: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else f"content, seen: {path.exists()}")
        real_sync(file)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), real_replace(a, b)))
    write_state({"number": 1}, path)
    assert order == ["content, seen: False", "rename", "folder"]


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with (tmp_path / ".run.pt.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(gs.errors.GradstowError, match="another process is writing it"):
            write_state({}, path)
    write_state({"number": 1}, path)
    assert torch.load(path) == {"number": 1}


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    step = make()
    path = tmp_path / "run.pt"
    step.save(path)
    with pytest.raises(gs.errors.GradstowError, match="there is no checkpoint at"):
        step.load(tmp_path / "missing.pt")
    (tmp_path / "damaged.pt").write_bytes(path.read_bytes()[:-500])
    with pytest.raises(gs.errors.GradstowError, match="cannot be read"):
        step.load(tmp_path / "damaged.pt")
    with pytest.raises(gs.errors.GradstowError, match="no state of a TrainStep"):
        step.load_state_dict({"model": {}})
    one = TrainStep(step.model, step.optimizers[0], loss=loss_of)
    with pytest.raises(gs.errors.GradstowError, match="had 2 optimizers and this one has 1"):
        one.load(path)
    with pytest.raises(gs.errors.GradstowError, match="precision fp16"):
        make(precision="fp32").load(path)
    with pytest.raises(gs.errors.GradstowError, match="had one for clip="):
        make(clip=None).load(path)
    before = [(n, t.clone()) for n, t in step.model.state_dict().items()]
    with pytest.raises(gs.errors.GradstowError, match="clip"):
        make(clip=AdaptiveClip(deviations=3.0, warmup=2)).load(path)
    assert differences(before, [*step.model.state_dict().items()]) == []
    assert "TrainStep Sequential fp16, whole batches, 0 steps" in repr(step)


def _plain_step(kind: type[torch.optim.Optimizer], precision: str = "fp32") -> TrainStep:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return TrainStep(
        model, kind(model.parameters(), lr=0.1), loss=lambda out, _: out.square().mean(), precision=precision
    )


def test_what_was_made_otherwise_is_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = _plain_step(torch.optim.SGD)
    saved(torch.ones(3, 4))
    saved.save(tmp_path / "run.pt")
    for other, words in (
        (_plain_step(torch.optim.AdamW), "SGD"),
        (_plain_step(torch.optim.SGD, "bf16"), "precision fp32"),
    ):
        before = other.model.weight.detach().clone()
        with pytest.raises(gs.errors.GradstowError, match=words):
            other.load(tmp_path / "run.pt")
        assert torch.equal(other.model.weight, before)
    half = saved.state_dict()
    del half["random"]
    with pytest.raises(gs.errors.GradstowError, match="no state of a TrainStep"):
        saved.load_state_dict(half)


def test_a_flipped_byte_is_seen(tmp_path: Path) -> None:
    saved = _plain_step(torch.optim.SGD)
    saved.save(tmp_path / "run.pt")
    raw = bytearray((tmp_path / "run.pt").read_bytes())
    at = raw.find(saved.model.weight.detach().numpy().tobytes())
    assert at > 0
    raw[at] ^= 1
    (tmp_path / "run.pt").write_bytes(raw)
    with pytest.raises(gs.errors.GradstowError, match="damaged"):
        saved.load(tmp_path / "run.pt")
