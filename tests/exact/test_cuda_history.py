"""``gs.profile(cuda_snapshot=)``: records the real steps and nothing else, and is refused where it would be empty."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow.capture import cuda_history
from gradstow.errors import GradstowError

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """What torch would be asked for, in order."""
    made: Calls = []
    memory = torch.cuda.memory

    def dump(path: str) -> None:
        Path(path).write_text("a snapshot")
        made.append(("dump",))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **_: made.append(("record", enabled)))
    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    return made


def small() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return {"model": model, "batch": torch.randn(4, 8), "loss": lambda output, batch: output.sum()}


def test_it_is_recorded_then_written_then_stopped(calls: Calls, tmp_path: Path) -> None:
    with cuda_history(tmp_path / "step.pickle"):
        calls.append(("steps",))
    assert calls == [("record", "all"), ("steps",), ("dump",), ("record", None)]
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("step.pickle", "a snapshot")]


def test_it_is_written_after_an_error_too(calls: Calls) -> None:
    with pytest.raises(torch.OutOfMemoryError), cuda_history("step.pickle"):
        raise torch.OutOfMemoryError("full")
    assert calls == [("record", "all"), ("dump",), ("record", None)]


def test_recording_stops_where_the_file_cannot_be_written(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str) -> None:
        Path(path).write_text("a part")
        raise OSError(28, "No space left on device")

    Path("step.pickle").write_text("an older snapshot")
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    with (
        pytest.raises(GradstowError, match=r"cannot be written to step\.pickle: No space left"),
        cuda_history("step.pickle"),
    ):
        pass
    assert calls == [("record", "all"), ("record", None)]
    assert [file.read_text() for file in tmp_path.iterdir()] == ["an older snapshot"]


def test_a_profile_records_the_real_steps_alone(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstow import _api

    plan, measure = _api.plan_captured, _api.measure_steps
    monkeypatch.setattr(_api, "plan_captured", lambda *args: (calls.append(("plan",)), plan(*args))[1])
    monkeypatch.setattr(_api, "measure_steps", lambda *args: (calls.append(("steps",)), measure(*args))[1])
    monkeypatch.setattr(_api, "device_of", lambda _model: "cuda")
    found = gs.profile(**small(), measure=True, cuda_snapshot="step.pickle")
    assert calls == [("plan",), ("record", "all"), ("steps",), ("dump",), ("record", None)]
    assert found.measured["plain"].peak_bytes > 0
    calls.clear()
    gs.profile(**small(), measure=True)
    assert calls == [("plan",), ("steps",)]


@pytest.mark.parametrize(("measure", "words"), [(False, "Add measure=True"), (True, "Move model and batch to CUDA")])
def test_a_snapshot_that_would_be_empty_is_refused(measure: bool, words: str, calls: Calls) -> None:
    with pytest.raises(GradstowError, match=words):
        gs.profile(**small(), measure=measure, cuda_snapshot="step.pickle")
    assert calls == []


@pytest.mark.gpu
def test_a_real_snapshot_has_the_allocations(tmp_path: Path) -> None:
    step = small()
    step |= {"model": step["model"].cuda(), "batch": step["batch"].cuda()}
    gs.profile(**step, measure=True, cuda_snapshot=tmp_path / "step.pickle")
    found = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert any(event["action"] == "alloc" for events in found["device_traces"] for event in events)
