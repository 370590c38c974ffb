"""``gradstow demo``: how it judges its runs, and the small demo from end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gradstow
from gradstow.errors import BudgetTooSmall, GradstowError

pytest.importorskip("typer")
pytest.importorskip("rich")

from gradstow.cli import _demo_run
from gradstow.cli._demo_report import Demo, Setting
from gradstow.cli._demo_run import Run, run_child
from gradstow.cli.demo import _limit, _need

MIB = 2**20
SRC = Path(gradstow.__file__).parents[1]
ALLOCATOR = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"
needs_everything = pytest.mark.skipif(
    not all(find_spec(name) for name in ("torchvision", "mlxtend", "matplotlib", "gradstow._api")),
    reason="the demo's packages are not all here",
)
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's private memory")


def trained(*bits: str, state: str = "s", peak: int = 100, seconds: float = 1.0) -> Run:
    run = Run(bits=list(bits), losses=[1.0] * len(bits), seconds=[seconds] * len(bits), training_bytes=3000 * MIB)
    run.told = {
        "ready": {"data_bytes": 1000 * MIB},
        "trained": {"state": state},
        "measured": {"step_peak_bytes": peak},
    }
    return run


def planned(**changes: Any) -> Run:
    told = {
        "predicted_step_peak_bytes": 500 * MIB,
        "predicted_peak_bytes": 500 * MIB,
        "plain_step_peak_bytes": 2000 * MIB,
        "plain_seconds": 1.0,
        "predicted_seconds": 1.1,
        "optimizer_state_bytes": 100 * MIB,
        "budget_step_bytes": 120,
        "rerun_ops": 3,
        "kind": "planned",
    }
    return Run(told={"planned": told | changes})


def demo(plain: Run, stowed: Run, limited: Run | None) -> Demo:
    setting = Setting("resnet50", 224, 26, 2, "60%")
    return Demo(setting, planned(), plain, limited, stowed, Path("memory.png"))


DIED = Run(code=1, errors=f"Traceback\n{ALLOCATOR}\n")


def test_what_is_as_promised_has_no_problems() -> None:
    found = demo(trained("a", "b"), trained("a", "b", seconds=1.5), DIED)
    assert found.equal
    assert found.problems() == []
    assert found.time_ratio == 1.5
    assert "equal bit for bit: yes" in str(found)
    assert "out of memory" in str(found)
    document = json.loads(json.dumps(found.to_json()))
    assert document["runs"]["plain under the limit"]["outcome"] == "out of memory"


@pytest.mark.parametrize(
    ("stowed", "limited", "problem"),
    [
        (trained("a", "c"), DIED, "same bits"),
        (trained("a"), DIED, "same bits"),
        (trained("a", "b", state="other"), DIED, "same bits"),
        (trained("a", "b", peak=121), DIED, "over the budget"),
        (trained("a", "b"), trained("a", "b"), "did not run out of memory"),
        (trained("a", "b"), Run(code=1, errors="KeyError: 'x'"), "otherwise: KeyError: 'x'"),
    ],
)
def test_what_is_not_as_promised_is_named(stowed: Run, limited: Run, problem: str) -> None:
    problems = demo(trained("a", "b"), stowed, limited).problems()
    assert len(problems) == 1
    assert problem in problems[0]


def test_no_losses_are_not_equal_losses() -> None:
    assert not demo(trained(), trained(), None).equal


def test_a_system_without_limits_is_said() -> None:
    found = demo(trained("a"), trained("a"), None)
    assert found.problems() == []
    assert "cannot limit" in str(found)


@pytest.mark.parametrize(
    ("run", "of_memory"),
    [
        (DIED, True),
        (Run(code=1, errors="MemoryError"), True),
        (Run(code=1, errors="RuntimeError: could not create a primitive"), True),
        (Run(code=-signal.SIGKILL), True),
        (Run(code=1, errors="ValueError: no"), False),
        (Run(code=0, errors=ALLOCATOR), False),
    ],
)
def test_the_end_for_want_of_memory_is_told_from_others(run: Run, of_memory: bool) -> None:
    assert run.out_of_memory == of_memory


def test_last_words_skip_native_frames() -> None:
    run = Run(code=1, errors=f"Traceback\n{ALLOCATOR}\nframe #0: c10::x\n\n")
    assert run.last_words == ALLOCATOR
    assert Run(code=-signal.SIGABRT, errors="").last_words == "ended by SIGABRT"


def test_the_limit_lies_between_the_two() -> None:
    assert _limit(planned(), trained("a")) == (1000 + 100 + 500 + 750) * MIB
    assert _limit(planned(plain_step_peak_bytes=600 * MIB), trained("a")) == (1000 + 100 + 500 + 384) * MIB
    with pytest.raises(GradstowError, match="no limit tells the two apart"):
        _limit(planned(predicted_peak_bytes=1900 * MIB), trained("a"))


def test_a_child_that_fails_shows_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GradstowError, match="failed: KeyError: 'x'"):
        _need(Run(code=1, errors="Traceback\nKeyError: 'x'\n"))
    assert "Traceback\nKeyError: 'x'" in capsys.readouterr().err
    refused = Run(code=3, told={"refused": {"error": "BudgetTooSmall", "message": "too small"}})
    with pytest.raises(BudgetTooSmall, match="too small"):
        _need(refused)


def test_a_child_that_cannot_start_is_seen() -> None:
    run = run_child(["--nonsense"], lambda told: None)
    assert run.code == 2
    assert "required: --data" in run.last_words


@needs_limits
def test_the_limit_binds_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_demo_run, "_SCRIPT", ["-c", GREEDY])
    free, limited = (run_child([], lambda told: None, limit) for limit in (None, 200 * MIB))
    assert free.finished
    assert free.highest_bytes > 400 * MIB
    assert limited.out_of_memory
    assert limited.last_words == "MemoryError"


GREEDY = """
import resource, sys, time
if "--limit" in sys.argv:
    limit = int(sys.argv[sys.argv.index("--limit") + 1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
block = bytearray(400 * 2**20)
time.sleep(0.3)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gradstow", "demo", "--quick", *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a suite that runs in the background ignores SIGINT, and its children would too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@needs_everything
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_child(kind: signal.Signals, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    process = start("--out", str(tmp_path / "memory.png"))
    try:
        deadline = time.monotonic() + 60
        children: list[Any] = []
        while not children and time.monotonic() < deadline:
            children = psutil.Process(process.pid).children()
            time.sleep(0.05)
        process.send_signal(kind)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert children
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "gradstow: interrupted"
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.slow
@needs_everything
@needs_limits
def test_the_small_demo_keeps_its_promises(tmp_path: Path) -> None:
    picture = tmp_path / "memory.png"
    process = start("--json", "--out", str(picture))
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    found = json.loads(output)
    plain, limited, stowed = (found["runs"][n] for n in ("plain", "plain under the limit", "gradstow"))
    assert found["equal"] is True
    assert found["problems"] == []
    assert plain["loss_bits"] == stowed["loss_bits"]
    assert plain["state_sha256"] == stowed["state_sha256"]
    assert re.fullmatch(r"-?0x1\.[0-9a-f]+p[+-]\d+", plain["loss_bits"][0])
    assert (plain["outcome"], limited["outcome"], stowed["outcome"]) == ("finished", "out of memory", "finished")
    assert stowed["limit_bytes"] == limited["limit_bytes"] < plain["training_bytes"]
    assert stowed["step_peak_bytes"] <= found["plan"]["budget_step_bytes"] < plain["step_peak_bytes"]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
