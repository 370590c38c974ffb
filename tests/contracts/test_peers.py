"""``benchmarks/peers``: what is compared, its rows on disk, who is ahead; and two peers on a tiny CNN."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peers import __main__ as harness
from peers import _ahead, _measure, _models, _numbers, _picture, _process, _settings, _table, _ways
from peers._settings import COMPILE, OURS, SMALLEST, Job

MIB = 1 << 20
NOW = _table.of_now(1, "cpu")


def row(peer: str, setting: str = "", peak: float = 100.0, ratio: float = 1.0, **changed: Any) -> dict[str, Any]:
    kind = "compiled" if peer in (COMPILE, OURS["compiled"]) else "eager"
    usual = {
        "model": "tiny_cnn", "batch": 16, "kind": kind, "peer": peer, "setting": setting, "outcome": "measured",
        "plain_peak_mib": 200.0, "peak_mib": peak, "ratio": ratio,
        "ratio_low": ratio - 0.05, "ratio_high": ratio + 0.05,
        "equal": "yes" if kind == "eager" else "", "note": "",
    }  # fmt: skip
    return {**usual, **NOW, **changed}


def keyed(*rows: dict[str, Any]) -> _table.Rows:
    return {_table.key(one): one for one in rows}


# ------------------------------------------------------------------------------------------- what is compared


def test_every_peer_is_there() -> None:
    eager = [job.key for job in _settings.peers_of("unet", "eager")]
    assert [peer for peer, _ in eager] == [
        "plain", "checkpoint", "checkpoint", "checkpoint_sequential", "selective", "torch_remat", "own switch",
    ]  # fmt: skip
    compiled = [setting for _, setting in (job.key for job in _settings.peers_of("unet", "compiled"))]
    assert compiled[0] == ""
    assert {f"budget {b} {s}" for b in ("0.75", "0.5", "0.25", "0.1") for s in ("dp", "ilp")} <= set(compiled)
    assert "budget 0" in compiled


def test_models_are_chosen_by_name() -> None:
    assert len(_models.chosen([])) == 17
    assert not {*_models.TINY} & {*_models.chosen([])}
    assert _models.chosen(["tiny_gpt"]) == ["tiny_gpt"]
    assert len(_models.chosen(["gpt2"])) == 4
    assert _models.chosen(["nothing"]) == []


def test_gradstow_follows_each_kind_of_peer() -> None:
    rows = [
        row("plain", peak=100.5),
        row("checkpoint", "every block", peak=50),
        row("selective", peak=100),
        row("own switch", peak=1, outcome="failed"),
        row(OURS["eager"], SMALLEST, peak=20),
        row(COMPILE, peak=40),
        row("checkpoint", "every block", peak=5, model="other"),
    ]
    eager = _settings.ours_of("tiny_cnn", "eager", rows, rounds=3)
    assert [(job.setting, job.budget) for job in eager] == [
        ("at checkpoint every block", 50 * MIB),
        ("at selective", 100 * MIB),  # and for plain, which needs hardly more
        (SMALLEST, 0),
    ]
    assert {(job.peer, job.rounds) for job in eager} == {("gradstow eager", 3)}
    compiled = _settings.ours_of("tiny_cnn", "compiled", rows)
    assert [(job.setting, job.budget) for job in compiled] == [("at torch.compile", 40 * MIB), (SMALLEST, 0)]


def test_peers_are_chosen_by_name() -> None:
    def named(*parts: str) -> set[str]:
        every = [*_settings.peers_of("unet", "eager"), *_settings.peers_of("unet", "compiled")]
        every.append(Job("unet", OURS["eager"], "at checkpoint every block", "eager"))
        return {_settings.label(*job.key) for job in every if harness.wanted(job, [*parts])}

    assert len(named()) == 19
    assert named("checkpoint") == {"checkpoint every block", "checkpoint every second block"}
    assert named("gradstow eager") == {"gradstow eager at checkpoint every block"}
    assert named("0.5 ilp", "plain") == {"torch.compile budget 0.5 ilp", "plain"}


def test_parts_of_a_chain_and_blocks() -> None:
    subject = _models.build("tiny_cnn")
    parts = _ways._chain(subject.module, subject.spec)
    assert [type(part).__name__ for part in parts] == ["Stage"] * 4 + ["AdaptiveAvgPool2d"]
    unet = _models.MODELS["unet"]
    with pytest.raises(_ways.NotApplicable, match="do not follow one another"):
        _ways.sqrt_segments(subject.module, unet)
    with pytest.raises(_ways.NotApplicable, match="no Double"):
        _ways.every_block(subject.module, unet)
    with pytest.raises(_ways.NotApplicable, match="no switch"):
        _ways.own_switch(subject.module, subject.spec)


# ------------------------------------------------------------------------------------------- numbers and times


def numbers_of(*gradients: torch.Tensor | None, digests: str = "a") -> _numbers.Numbers:
    return _numbers.Numbers([*gradients], (digests,), ("b",), 0.0)


def test_errors_are_relative_to_float64() -> None:
    exact = numbers_of(torch.tensor([3.0, 4.0], dtype=torch.float64), None)
    ours = numbers_of(torch.tensor([3.0, 4.0 + 5e-4]), None)
    assert _numbers.errors(ours, exact, exact, random=True) == {
        "error": pytest.approx(1e-4, rel=1e-2),
        "eager_error": 0,
    }
    assert numbers_of(None, None).error(exact) == float("inf")
    other = numbers_of(torch.tensor([4.0, 3.0]), None)
    assert "error" in _numbers.errors(ours, other, exact, random=False)
    found = _numbers.errors(ours, other, exact, random=True)
    assert "error" not in found
    assert "other random numbers" in found["note"]


def test_equality_needs_every_bit() -> None:
    ours = numbers_of(torch.ones(1))
    assert _numbers.compared(ours, numbers_of(torch.ones(1))) == {"equal": "yes", "buffers_equal": "yes"}
    assert _numbers.compared(ours, numbers_of(torch.ones(1), digests="c"))["equal"] == "no"


def test_the_interval_of_a_ratio_of_medians() -> None:
    assert _measure.ratio_interval([2.0] * 5, [1.0] * 5) == (2.0, 2.0)
    noisy = [1.0, 1.1, 0.9, 1.05, 3.0]
    low, high = _measure.ratio_interval([2 * x for x in noisy], noisy)  # both are slow in the same round
    assert (low, high) == pytest.approx((2.0, 2.0))
    low, high = _measure.ratio_interval(noisy, [1.0] * 5)
    assert low < 1.05 < high


# ------------------------------------------------------------------------------------------------ rows on disk


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    peak = 123456789 / MIB
    rows = keyed(
        row(OURS["compiled"], SMALLEST, error=3e-7),
        row(COMPILE, error=2e-7, ratio=1.23456),
        row("checkpoint", "every block", peak=peak, note="a, b"),
    )
    path = tmp_path / "new" / "peers.csv"
    _table.write(path, rows)
    read = _table.read(path)
    assert [key[1] for key in read] == ["checkpoint", COMPILE, OURS["compiled"]]
    block, compiled, ours = read.values()
    assert round(float(block["peak_mib"]) * MIB) == 123456789
    assert block["note"] == "a, b"
    assert (compiled["ratio"], compiled["error_ratio"], ours["error_ratio"]) == ("1.235", "1", "1.5")
    assert (block["error_ratio"], block["torch"], block["transformers"]) == ("", NOW["torch"], NOW["transformers"])
    _table.write(path, read)
    assert _table.read(path) == read


def test_only_what_was_measured_with_these_versions_is_done() -> None:
    job = Job("tiny_cnn", OURS["eager"], "at plain", "eager", budget=100 * MIB)
    done = row(OURS["eager"], "at plain", budget_mib="100")
    assert _table.is_done(job, keyed(done), NOW)
    assert not _table.is_done(job, {}, NOW)
    assert not _table.is_done(job, keyed({**done, "torch": "1.0"}), NOW)
    assert not _table.is_done(job, keyed({**done, "budget_mib": "90"}), NOW)  # the peer reaches another peak now
    failed = keyed({**done, "outcome": "failed"})
    assert _table.is_done(job, failed, NOW)
    assert not _table.is_done(job, failed, NOW, retry=("failed",))


# ------------------------------------------------------------------------------------------------ who is ahead


RACE = [
    row("plain", peak=200, ratio=1.0),
    row("checkpoint", "every block", peak=100, ratio=1.3),
    row("checkpoint", "every second block", peak=150, ratio=1.1),
    row("selective", peak=30, ratio=1.5),
    row("own switch", outcome="not applicable", note="its library has no switch for it"),
    row("torch_remat", outcome="failed", note="RuntimeError: no"),
    row(OURS["eager"], "at checkpoint every block", peak=99, ratio=1.12),
    row(OURS["eager"], SMALLEST, peak=40, ratio=1.4),
    row(COMPILE, peak=120, ratio=0.8, error_ratio="1"),
    row(OURS["compiled"], "at torch.compile", peak=120, ratio=0.95, error_ratio="1.1"),
]


def test_who_is_ahead() -> None:
    found = {verdict.peer.name: verdict for verdict in _ahead.verdicts(RACE)}
    assert {name: (verdict.ahead, verdict.by) for name, verdict in found.items()} == {
        "plain": ("peer", "-11 % time"),
        "checkpoint every block": ("gradstow", "+16 % time"),
        "checkpoint every second block": ("even", "-2 % time"),
        "selective": ("peer", "nothing as small"),
        "torch.compile": ("peer", "-16 % time"),
    }
    assert _ahead.counts(found.values()) == [
        "eager: gradstow ahead 1, even 1, peer ahead 2",
        "compiled: gradstow ahead 0, even 0, peer ahead 1",
    ]
    assert _ahead.smallest(RACE)[0] == (
        "tiny_cnn, eager: gradstow 40 MiB at ×1.40, selective 30 MiB at ×1.50: -33 % less"
    )


def test_the_table_in_both_forms() -> None:
    text, page = _ahead.text(RACE), _ahead.markdown(RACE)
    assert "tiny_cnn  eager     checkpoint every block         100  ×1.30 (1.25 to 1.35)  equal" in text
    assert (
        "| tiny_cnn | compiled | torch.compile | 120 | ×0.80 (0.75 to 0.85) | error ×1.00 | 120 | "
        "×0.95 (0.90 to 1.00) | error ×1.10 | peer | -16 % time |"
    ) in page
    for shown in (text, page):
        assert "tiny_cnn, torch_remat: failed: RuntimeError: no" in shown
        assert "own switch: its library has no switch for it (tiny_cnn)" in shown
        assert "compiled: gradstow ahead 0, even 0, peer ahead 1" in shown
    wrong = [row("plain", buffers_equal="no"), row(OURS["eager"], SMALLEST, equal="no")]
    assert "equal, not buffers" in _ahead.text(wrong)
    assert "DIFFERENT" in _ahead.text(wrong)
    wrong = [row(OURS["eager"], "at plain", peak=90, budget_mib="89.5"), row(OURS["eager"], "at x", budget_mib="100")]
    assert _ahead.over(wrong) == ["tiny_cnn, gradstow eager at plain: 524288 bytes over its budget"]


def test_a_picture_per_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = _picture.draw(tmp_path / "pictures", "tiny_cnn", RACE)
    assert path == tmp_path / "pictures" / "peers_tiny_cnn.svg"
    assert path.stat().st_size > 1000
    assert _picture.draw(tmp_path, "unet", RACE) is None


# ------------------------------------------------------------------------------------------------- the command


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    given = ["--out", str(folder / "peers.csv"), "--pictures", str(folder), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["peers", *arguments, *given])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name in ("PYTHONPATH", "HF_HUB_OFFLINE", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "")  # so that there is something to restore
        monkeypatch.delenv(name)
    return harness.main()


def test_measuring_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Job] = []

    def measured(job: Job, _timeout: float, _gib: float) -> dict[str, Any]:
        seen.append(job)
        if job.peer == "torch_remat":
            return row(*job.key, outcome="crashed", note="the process ended with code -11: no")
        peak = job.budget / MIB if job.budget else 10.0 * (1 + len(seen))
        return row(*job.key, peak=peak, budget_mib=peak if job.budget else None)

    monkeypatch.setattr(_process, "run_alone", measured)
    assert run(monkeypatch, tmp_path, "--only", "tiny_cnn", "--rounds", "2") == 0
    settings = [_settings.label(*job.key) for job in seen]
    assert settings[:2] == ["plain", "checkpoint every block"]
    assert settings.index("gradstow eager at plain") == len(_settings.EAGER)
    assert len(seen) == len(_settings.ORDER) + 6 + 1 + len(_settings.COMPILED) + 1
    assert {(job.rounds, job.device, job.threads) for job in seen} == {(2, "cpu", 1)}
    assert "torch_remat by hand: crashed" in capsys.readouterr().out

    seen.clear()
    assert run(monkeypatch, tmp_path, "--only", "tiny_cnn", "--resume") == 0
    assert not seen
    assert run(monkeypatch, tmp_path, "--only", "tiny_cnn", "--resume", "--retry") == 0
    assert [job.peer for job in seen] == ["torch_remat"]

    monkeypatch.setattr(_process, "run_alone", None)
    page = tmp_path / "table.md"
    assert run(monkeypatch, tmp_path, "--only", "tiny_cnn", "--table", str(page)) == 0
    assert page.read_text() in capsys.readouterr().out
    assert "| tiny_cnn | eager | plain |" in page.read_text()
    assert run(monkeypatch, tmp_path, "--only", "nothing") == 2


def test_two_peers_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--only", "tiny_cnn", "--peer", "checkpoint", "--rounds", "1")
    assert run(monkeypatch, tmp_path, *arguments) == 0
    rows = _table.read(tmp_path / "peers.csv")
    assert [(key[2], one["outcome"], one["equal"]) for key, one in rows.items()] == [
        ("every block", "measured", "yes"),
        ("every second block", "measured", "yes"),
    ]
    block, second = (float(one["peak_mib"]) for one in rows.values())
    assert block < second < float(rows["tiny_cnn", "checkpoint", "every block"]["plain_peak_mib"])
    assert (tmp_path / "peers_tiny_cnn.svg").exists()
