"""The command line: what it refuses and how, its exit codes, and that ``--json`` is one clean document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gradstow
from gradstow.cli import main
from gradstow.errors import BudgetTooSmall, CaptureError, GradstowError

pytest.importorskip("typer")
pytest.importorskip("rich")
if find_spec("gradstow._api") is None:
    pytest.skip("gradstow._api is not written yet", allow_module_level=True)

SRC = Path(gradstow.__file__).parents[1]
NOISY = """
import os
import torch

print("hello from the user's file")

def make():
    os.write(1, b"hello from below Python\\n")
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    return model, (torch.randn(32, 8), torch.randint(0, 4, (32,))), loss

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])

def fail():
    return 1 / 0

def wrong():
    return 7

def sized(batch=4):
    model = torch.nn.Linear(8, 4)
    return model, torch.randn(batch, 8), lambda output, batch: output.sum()
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What main sets for the whole process is put back."""
    for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that there is something to restore
        monkeypatch.delenv(name)


@pytest.fixture
def noisy(tmp_path: Path) -> str:
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return str(path)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "gradstow", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the line on stderr; nothing on stdout, no traceback, at most two lines."""
    code = main(list(arguments))
    caught = capsys.readouterr()
    assert caught.out == ""
    assert "Traceback" not in caught.err
    lines = caught.err.splitlines()
    assert len(lines) in (1, 2), caught.err
    assert lines[-1].startswith("gradstow: ")
    return code, lines[-1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["plan"], "Missing argument 'TARGET'"),
        (["plan", "torchvision:resnet18", "--batch", "many"], "--batch"),
        (["plan", "torchvision:resnet18", "--colour"], "--colour"),
        (["plan", "resnet18", "--batch", "2"], "torchvision:resnet50"),
        (["plan", "torchvison:resnet18", "--batch", "2"], "Did you mean torchvision:resnet18?"),
        (["plan", "nowhere.py:make"], "there is no file nowhere.py"),
        (["plan", "torchvision:resnet18", "--batch", "2", "--budget", "0.5"], "has no unit"),
        (["plan", "torchvision:resnet18", "--out", "no/where/plan.json"], "its folder does not exist"),
        (["verify", "torchvision:resnet18", "--steps", "0"], "compares nothing"),
        (["verify", "torchvision:resnet18", "--plan", "no-plan.json"], "cannot be read"),
        (["verify", "torchvision:resnet18", "--plan", "p", "--budget", "60%"], "exclude each other"),
        (["demo", "--budget", "lots"], "cannot be read"),
        (["demo", "--out", "no/where/picture.png"], "its folder does not exist"),
        (["demo", "--steps", "-1"], "at least 1 step"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "demo" and not all(find_spec(name) for name in ("torchvision", "mlxtend", "matplotlib")):
        pytest.skip("the demo's packages are not installed")
    code, line = refusal(capsys, *arguments)
    assert code == 2
    assert expected in line


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("torchvision:resnet5", "Close: resnet50"),
        ("torchvision:fasterrcnn_resnet50_fpn", "not an image classifier"),
        ("torchvision:resnet18,colour=1", "colour"),
        ("torchvision:resnet18,colour", "Write name,key=value"),
    ],
)
def test_an_unknown_vision_model(target: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    code, line = refusal(capsys, "plan", target, "--batch", "2")
    assert (code, expected in line) == (2, True), line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["transformers:gpt3"], "Close: "),
        (["transformers:gpt2,n_layr=1"], "no option 'n_layr'"),
        (["transformers:gpt2,n_layer=1,n_embd=32,n_head=2", "--seq", "2000"], "1024 positions"),
        (["transformers:llama,num_hidden_layers=2000"], "of parameters by default"),
    ],
)
def test_an_unknown_text_model(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    code, line = refusal(capsys, "plan", *arguments, "--batch", "1")
    assert (code, expected in line) == (2, True), line


def test_a_batch_size_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Add --batch N" in refusal(capsys, "plan", "torchvision:resnet18")[1]
    assert "0 is no batch size" in refusal(capsys, "plan", "torchvision:resnet18", "--batch", "0")[1]


def test_timm_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    code, line = refusal(capsys, "plan", "timm:convnext_tiny", "--batch", "2")
    assert code == 2
    assert "Run: pip install timm" in line


def test_a_file_that_fails_is_told_with_its_line(noisy: str, capsys: pytest.CaptureFixture[str]) -> None:
    for function, expected in (
        ("fail", "line 16: ZeroDivisionError: division by zero"),
        ("wrong", "must return (model, batch, loss)"),
        ("mak", "Close: make"),
    ):
        code = main(["plan", f"{noisy}:{function}"])
        assert code == 2
        assert expected in capsys.readouterr().err


def test_a_batch_that_has_no_effect_is_refused(noisy: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gradstow.cli._targets import build_target

    assert main(["plan", f"{noisy}:make", "--batch", "8"]) == 2
    assert "--batch 8 would have no effect" in capsys.readouterr().err
    assert build_target(f"{noisy}:sized", 6).batch.shape == (6, 8)
    assert build_target(f"{noisy}:sized").batch.shape == (4, 8)


def proof(ok: bool) -> Any:
    return SimpleNamespace(ok=ok, to_json=lambda: {"ok": ok})


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (proof(ok=True), 0),
        (proof(ok=False), 1),
        (BudgetTooSmall("too small", budget_bytes=1, minimum_bytes=2), 1),
        (CaptureError("cannot be captured"), 1),
        (GradstowError("something else"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    outcome: Any, code: int, noisy: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def verify(*_args: Any, **_kwargs: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(gradstow, "verify", verify)
    assert main(["verify", f"{noisy}:make", "--json"]) == code
    caught = capfd.readouterr()
    assert "Traceback" not in caught.err
    if isinstance(outcome, KeyboardInterrupt):
        assert caught.out == ""
        return
    document = json.loads(caught.out)
    if isinstance(outcome, BudgetTooSmall):
        assert document == {
            "error": "BudgetTooSmall", "message": "too small", "budget_bytes": 1, "minimum_bytes": 2,
        }  # fmt: skip
    elif isinstance(outcome, GradstowError):
        assert document == {"error": type(outcome).__name__, "message": str(outcome)}
    else:
        assert document == {"target": f"{noisy}:make", "ok": outcome.ok}


@pytest.mark.parametrize("name", ["plan", "profile", "frontier", "verify"])
def test_shared_options_arrive(name: str, noisy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def asked(**options: Any) -> Any:
        seen.update(options)
        raise GradstowError("enough")

    monkeypatch.setattr(gradstow, name, asked)
    rules = ["--policy", "sqrt", "--policy", "relu=store", "--lossy", "0.01", "--offload", "host", "--optimizer", "sgd"]
    assert main([name, f"{noisy}:sized", "--batch", "6", *rules]) == 1
    assert (seen["policy"], seen["lossy"], seen["offload"]) == ("sqrt,relu=store", 0.01, "host")
    assert (seen["batch"].shape, type(seen["optimizer"]).__name__) == ((6, 8), "SGD")
    assert main([name, f"{noisy}:make", "--lossy", "int4"]) == 1
    assert (seen["policy"], seen["lossy"], seen["optimizer"]) == ("auto", "int4", None)


def test_an_error_that_is_not_ours_keeps_its_traceback(noisy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(gradstow, "verify", verify)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["verify", f"{noisy}:make"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["profile", "{file}:make", "--html", "{file}"], "that is the file of"),
        (["plan", "{file}:make", "--out", "{file}"], "that is the file of"),
        (["frontier", "{file}:make", "--out", "{file}"], "that is the file of"),
        (["bench", "strategies", "{file}:make", "--csv", "{file}"], "that is the file of"),
        (["profile", "{file}:make", "--html", "one", "--trace", "./one"], "cannot both be written to one"),
        (["profile", "{file}:make", "--html", "a.svg", "--picture", "a.svg"], "cannot both be written to a.svg"),
        (["profile", "{file}:make", "--measure", "--cuda-snapshot", "{file}"], "that is the file of"),
        (["profile", "{file}:make", "--measure", "--trace", "one", "--cuda-snapshot", "one"], "cannot both be written"),
        (["bench", "batch-size", "--model", "{file}:make", "--csv", "{file}"], "that is the file of"),
        (["bench", "transformer", "--csv", "/dev/null"], "it is not a file"),
        (["profile", "{file}:make", "--html", "/dev/null"], "it is not a file"),
        (["plan", "{file}:make", "--out", "/dev/null"], "it is not a file"),
        (["frontier", "{file}:make", "--out", "frontier.gif"], "no kind of picture"),
        (["demo", "--quick", "--out", "demo.gif"], "no kind of picture"),
    ],
)
def test_outputs_that_would_destroy_or_fail_are_refused_first(
    arguments: list[str],
    expected: str,
    noisy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[0] == "demo" and not all(find_spec(name) for name in ("torchvision", "mlxtend", "matplotlib")):
        pytest.skip("the demo's packages are not installed")
    monkeypatch.chdir(tmp_path)
    code, line = refusal(capsys, *(part.format(file=noisy) for part in arguments))
    assert code == 2
    assert expected in line
    assert Path(noisy).read_text() == NOISY
    assert [file.name for file in tmp_path.iterdir()] == ["noisy.py"]


@pytest.mark.parametrize("arguments", [["frontier", "--out"], ["profile", "--picture"]])
def test_a_picture_without_its_extra_is_refused_first(
    arguments: list[str], noisy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, line = refusal(capsys, arguments[0], f"{noisy}:make", arguments[1], "picture.png")
    assert code == 2
    assert "pip install 'gradstow[report]'" in line


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from gradstow.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on the sizes of files")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_full_disk_costs_no_results_and_no_file(noisy: str, tmp_path: Path, as_json: bool) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "p.png"
    page.write_text("an older page")
    picture.write_text("an older picture")
    more = ["--json"] if as_json else []
    arguments = ["profile", f"{noisy}:make", "--html", str(page), "--picture", str(picture), *more]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gradstow: the page cannot be written to ")
    assert "Traceback" not in done.stderr
    if as_json:
        document = json.loads(done.stdout)
        assert document["peaks"]["plain"]["peak_bytes"] > 0
        assert document["files"] == {}
    else:
        assert "modules at the peak" in done.stdout
    assert page.read_text() == "an older page"
    assert picture.read_text() == "an older picture"
    assert not list(tmp_path.glob(".*part"))


def test_a_terminal_that_does_not_know_a_sign() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from gradstow.cli import main; main([]); print('×12 █')"],
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("?12 ?\n")


def test_plan_and_verify_print_one_json_document(noisy: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = command("plan", f"{noisy}:make", "--budget", "100%", "--out", str(plan), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["target"] == f"{noisy}:make"
    assert document["predicted_step_peak_bytes"] <= document["plain_step_peak_bytes"]
    assert {row["decision"] for row in document["rows"]} <= {"store", "recompute", "output", "free"}
    assert "hello from below Python" in done.stderr
    assert gradstow.Plan.load(plan).predicted_step_peak_bytes == document["predicted_step_peak_bytes"]

    proven = command("verify", f"{noisy}:make", "--plan", str(plan), "--steps", "1", "--json")
    assert proven.returncode == 0, proven.stderr
    assert json.loads(proven.stdout)["equal"] is True
    assert "USDT" not in proven.stderr


def test_frontier_prints_points_and_draws_them(noisy: str, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    done = command("frontier", f"{noisy}:make", "--points", "3", "--out", str(picture), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["points"][0]["added"] == 0
    assert document["proven_step_peak_bytes"] <= document["points"][-1]["step_peak_bytes"]
    assert picture.stat().st_size > 1000


def test_a_plan_for_a_device_elsewhere(noisy: str) -> None:
    done = command("plan", f"{noisy}:make", "--device", "cuda:h100", "--policy", "relu=recompute", "--effort", "quick")
    assert done.returncode == 0, done.stderr
    assert "priced for cuda:h100" in done.stdout
    assert "relu=recompute" in done.stdout
    unknown = command("plan", f"{noisy}:make", "--device", "cuda:h10")
    assert unknown.returncode == 1
    assert "Did you mean cuda:h100" in unknown.stderr


def test_a_budget_that_cannot_be_met_is_code_1(noisy: str) -> None:
    done = command("plan", f"{noisy}:make", "--budget", "1%")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gradstow: ")
    assert "Traceback" not in done.stderr


def test_text_goes_to_stdout(noisy: str) -> None:
    done = command("plan", f"{noisy}:make")
    assert done.returncode == 0, done.stderr
    assert "Plan for Sequential on cpu" in done.stdout
    assert "step peak" in done.stdout


def test_without_arguments_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_remedy_is_named(missing: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from gradstow.cli import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"needs {missing}" in done.stderr
    assert "pip install 'gradstow[cli]'" in done.stderr


def test_help_loads_no_torch() -> None:
    script = "import sys; from gradstow.cli import main; main(['plan', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=60)
    assert done.returncode == 0


def test_progress_waits_two_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gradstow.cli import _output

    with _output.Meter() as meter:
        meter("planning", 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_output, "_PATIENCE", 0.0)
    with _output.Meter() as meter:
        for done in range(3):
            meter("planning", done, 2)
        meter("plain", 0, 2)
    assert capsys.readouterr().err == "gradstow: planning ...\ngradstow: plain ...\n"


def test_torchvision_target_is_the_same_each_time() -> None:
    pytest.importorskip("torchvision")
    import torch

    from gradstow.cli._targets import build_target

    first, second = (build_target("torchvision:googlenet,num_classes=5", 2, image=64) for _ in range(2))
    assert torch.equal(first.batch[0], second.batch[0])
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert int(first.batch[1].max()) < 5
    assert first.loss is not None
    assert first.loss(first.model(first.batch[0]), first.batch).ndim == 0


@pytest.mark.parametrize(
    "name",
    ["gpt2,n_layer=1,n_embd=32,n_head=2", "bert,num_hidden_layers=1,hidden_size=32,num_attention_heads=2",
     "t5,num_layers=1,d_model=32,d_kv=8,d_ff=32", "vit,num_hidden_layers=1,hidden_size=24,num_attention_heads=2"],
)  # fmt: skip
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_transformers_targets_have_a_loss(name: str, attn: str) -> None:
    pytest.importorskip("transformers")
    from gradstow.cli._targets import build_target

    target = build_target(f"transformers:{name}", 2, seq=16, attn=attn)
    assert target.loss is None
    assert target.model(**target.batch).loss.requires_grad
    assert target.model.training
    assert target.model.config._attn_implementation == attn


def test_profile_prints_one_document_and_writes_its_files(noisy: str, tmp_path: Path) -> None:
    """The peaks are those of the page, which holds the same data."""
    files = {name: tmp_path / f"out.{end}" for name, end in (("html", "html"), ("trace", "json"), ("picture", "svg"))}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    done = command("profile", f"{noisy}:make", "--budget", "90%", "--measure", "--json", *options)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["files"] == {"page": str(files["html"]), "trace": str(files["trace"]), "picture": str(files["picture"])}
    assert data["peaks"]["planned"]["peak_bytes"] <= data["plan"]["resident_bytes"] + data["plan"]["step_budget_bytes"]
    assert set(data["measured"]) == {"plain", "planned"}
    assert f'"peak_bytes":{data["peaks"]["plain"]["peak_bytes"]}' in files["html"].read_text()
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["picture"].stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--points", "1"), "makes no frontier"),
        (("--depth", "-1"), "is no depth"),
        (("--html", "/nowhere/page.html"), "its folder does not exist"),
        (("--trace", "/"), "it is a folder"),
        (("--picture", "page.gif"), "no kind of picture"),
        (("--cuda-snapshot", "step.pickle"), "Add --measure"),
        (("--measure", "--cuda-snapshot", "/"), "it is a folder"),
        (("--measure", "--cuda-snapshot", "step.pickle"), "there is no CUDA device here"),
    ],
)
def test_profile_refuses_before_anything_takes_time(
    noisy: str,
    options: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, line = refusal(capsys, "profile", f"{noisy}:make", *options)
    assert code == 2
    assert words in line


@pytest.mark.parametrize(
    "name", ["demo", "profile", "plan", "frontier", "verify", "max-batch", "train"]
    + [f"bench {table}" for table in ("alexnet", "batch-size", "strategies", "transformer")]
)  # fmt: skip
def test_the_help_of_every_command_ends_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: gradstow {name} " in text


def test_the_help_lists_every_command_that_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    named = {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "}
    assert named == {"demo", "profile", "plan", "frontier", "verify", "max-batch", "train", "bench"}


def test_help_needs_no_torch() -> None:
    code = "from gradstow.cli import main; main(['--help']); import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True)
    assert done.returncode == 0
