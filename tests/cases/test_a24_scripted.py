"""A24. ScriptModules are refused by name at entry."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs


def test_a_scripted_part_is_named() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    with pytest.raises(gs.errors.CaptureError, match="ScriptModule.*sub-module 1.*Python module"):
        gs.stow(model, "80%")
    model(torch.randn(2, 4)).sum().backward()
