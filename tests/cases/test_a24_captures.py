"""A24. ScriptModules and steps that a CUDA graph captures are refused by name at entry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._stow import is_stowed


def test_a_scripted_part_is_named() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    with pytest.raises(gs.errors.CaptureError, match="ScriptModule.*sub-module 1.*Python module"):
        gs.stow(model, "80%")
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("before", [0, 1])
def test_a_step_that_a_cuda_graph_captures(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda.graph makes it look; on a machine without a GPU the rest of the step is plain."""
    model = gs.stow(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), policy="recompute-all")
    for _ in range(before):
        model(torch.randn(2, 4)).sum().backward()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with gs.plain():
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(gs.errors.CaptureError, match=r"CUDA graph is being captured.*Sequential.*gs\.plain"):
        model(torch.randn(2, 4))
    assert not is_stowed(model)
    model(torch.randn(2, 4)).sum().backward()
