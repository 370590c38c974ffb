"""What the user's own file raises is one line, with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradstow.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What main sets for the whole process is put back."""
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that there is something to restore
        monkeypatch.delenv(name)


BROKEN = """
import sys
import torch

def make(loss=None, forward=None):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    if forward is not None:
        model.forward = forward
    return model, torch.randn(32, 8), loss or (lambda output, batch: output.square().mean())

def in_the_loss():
    def loss(output, batch):
        raise KeyError("labels")
    return make(loss)

def in_the_model():
    def forward(x):
        raise ValueError("two\\nlines")
    return make(forward=forward)

def leaves():
    sys.exit(3)

def without_loss():
    return (*make()[:2], None)
"""


@pytest.fixture
def broken(tmp_path: Path) -> str:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    return str(path)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("in_the_loss", "the step failed in broken.py, line 13: KeyError: 'labels'"),
        ("in_the_model", "the step failed in broken.py, line 18: ValueError: two lines"),
        ("leaves", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("name", ["profile", "plan"])
def test_an_error_of_the_users_code_is_one_line(
    name: str, function: str, expected: str, broken: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([name, f"{broken}:{function}", "--json"]) == 2
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert expected in err.splitlines()[-1]
    assert json.loads(out)["error"] == "InputError"


def test_an_op_that_refuses_its_arguments_is_blamed_on_its_caller(tmp_path: Path) -> None:
    from gradstow.cli import _blame

    file = tmp_path / "own.py"
    file.write_text("import torch\n\ndef call():\n    torch.nn.functional.softmax(3)\n")
    names: dict[str, Any] = {"__name__": "own"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    _blame.remember(tmp_path / "target.py")
    with pytest.raises(AttributeError) as caught:
        names["call"]()
    assert "own.py, line 4: AttributeError" in str(_blame.blame(caught.value))
    names["__name__"] = "gradstow.somewhere"  # a defect of ours keeps its traceback
    with pytest.raises(AttributeError) as caught:
        names["call"]()
    assert _blame.blame(caught.value) is None


def test_a_real_step_without_a_loss_says_so(broken: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"{broken}:without_loss", "--measure"]) == 1
    assert "the model's output holds no loss" in capfd.readouterr().err
