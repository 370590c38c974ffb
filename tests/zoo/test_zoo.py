"""Twenty-five models of the zoo, tried as ``make zoo`` does; and its table says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradstow.capture import OutputRef
from gradstow.capture._rerun import RerunCall
from zoo import _table, _timm
from zoo._attempt import attempt, build, names
from zoo._subject import NotBuilt

MODELS = (
    "torchvision:resnet18",
    "torchvision:mobilenet_v3_small",
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:squeezenet1_1",
    "torchvision:mnasnet0_5",
    "torchvision:lraspp_mobilenet_v3_large",
    "timm:lcnet_035",
    "timm:convnext_zepto_rms",
    "timm:cs3darknet_focus_s",
    "timm:cspnext_tiny",
    "timm:deit_tiny_patch16_224",
    "timm:cpubone_nano",
    "transformers:gpt2",
    "transformers:llama",
    "transformers:bert",
    "transformers:modernbert",
    "transformers:t5",
    "transformers:mixtral",
    "transformers:mamba2",
    "transformers:deberta_v2",
    "transformers:swin",
    "transformers:convnextv2",
    "transformers:wav2vec2",
    "transformers:sew",
    "transformers:convbert",
)


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_plain_within_its_budget(name: str) -> None:
    row = attempt(name, rounds=1)
    assert (row["outcome"], row["equal"], row["within"]) == ("equal", "yes", "yes"), row
    assert row["compared"] > 10
    assert row["rerun_ops"] > 0 or row["budget"] == "minimum"


def test_the_zoo_is_large() -> None:
    libraries = [name.partition(":")[0] for name in names()]
    assert libraries.count("torchvision") >= 86
    assert libraries.count("timm") >= 150
    assert libraries.count("transformers") >= 45
    assert {f"transformers:{n}" for n in ("wav2vec2", "longformer", "led", "detr", "xlm", "mask2former")} <= {*names()}
    assert len(set(names())) == len(names())
    assert set(MODELS) <= set(names())


def test_every_family_of_timm_is_there() -> None:
    """A new timm has new families: look for their smallest variants with ``python benchmarks/zoo --survey``."""
    rows = {row["family"]: row["model"] for row in _timm.table()}
    known = _timm.families()
    assert {family for family in known if rows.get(family) not in known[family]} == set()


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstow.capture import _region

    real = _region.rerun_call

    def wrong(node: Any, decode: Any = None) -> Any:
        call = real(node, decode)
        if call is None:
            return None
        last = OutputRef(1) if isinstance(call.args[-1], OutputRef) else 1.0
        return RerunCall(call.target, (*call.args[:-1], last), call.outputs)

    monkeypatch.setattr(_region, "rerun_call", wrong)
    row = attempt("torchvision:mnasnet0_5", rounds=1)
    assert (row["outcome"], row["equal"]) == ("different", "no")
    assert "gradient of" in row["note"]


def test_a_peak_over_the_budget_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradstow import _verify

    real = _verify.step_peak
    monkeypatch.setattr(_verify, "step_peak", lambda trainee, device: 3 * real(trainee, device))
    row = attempt("transformers:bert", rounds=1)
    assert (row["outcome"], row["within"]) == ("over budget", "no")
    assert "bytes over" in row["note"]


def test_what_the_library_cannot_do_is_not_gradstows() -> None:
    with pytest.raises(NotBuilt):
        build("transformers:nothing")
    row = attempt("transformers:nothing", rounds=1)
    assert row["outcome"] == "not built"


def test_the_table_keeps_the_newest_row_and_names_the_rest(tmp_path: Path) -> None:
    now = _table.of_now(1)
    order = ["timm:a", "timm:b", "timm:c"]
    rows: dict[str, Any] = {
        "timm:b": {"model": "timm:b", "outcome": "over budget", "note": "9 bytes over", "budget": "60%", **now},
        "timm:a": {
            "model": "timm:a",
            "outcome": "equal",
            "note": "",
            "budget": "minimum",
            "time_ratio": 1.23456,
            **now,
        },
        "timm:gone": {"model": "timm:gone", "outcome": "equal", **now},
    }
    path = tmp_path / "zoo.csv"
    _table.write(path, rows, order)
    read = _table.read(path)
    assert list(read) == ["timm:a", "timm:b"]
    assert read["timm:a"]["time_ratio"] == "1.235"
    assert _table.current(read["timm:a"], now)
    assert not _table.current({**read["timm:a"], "torch": "1.0"}, now)
    assert not _table.current({**read["timm:a"], "timm": "0.1"}, now)
    assert _table.silent(list(read.values())) == ["timm:b"]
    text = _table.summary(list(read.values()))
    assert "2 models: 1 equal, 1 over budget" in text
    assert "1 of 2 tried (50.0 %)" in text
    assert "over budget    timm:b: 9 bytes over" in text
