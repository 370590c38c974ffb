"""Values that wait on disk: the bytes that come back, and everything that can happen to the file."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradstow as gs
from equality import differences
from gradstow import _lossy
from gradstow._stow import is_stowed, plan_of
from gradstow.cost import bandwidth_of
from gradstow.errors import BudgetTooSmall, OffloadError, PolicyError
from gradstow.offload import _ops, arrived, check_place, fetch, send, sent, store_in
from gradstow.report import plan_json
from twins import assert_equal_twins, data, steps

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8]
LAYOUTS = {
    "empty": torch.empty(0, 3),
    "one": torch.tensor(7.0),
    "odd": torch.arange(1001.0),
    "pages": torch.randn(5000, 33, generator=torch.Generator().manual_seed(0)),
    "transposed": torch.arange(60.0).view(6, 10).t(),
    "channels last": torch.arange(630.0).view(2, 5, 7, 9).to(memory_format=torch.channels_last),
    "nan and inf": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.2)) for _ in range(4))
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(64)).train()


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    return model(data(128, 64, seed=step)).square().mean()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_come_back(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout].nan_to_num().to(dtype) if not dtype.is_floating_point else LAYOUTS[layout].to(dtype)
    store = store_in("disk")
    before = store.used_bytes
    leaving = send(x, "disk")
    view = sent(x, leaving).detach().view(1)
    del leaving
    assert store.used_bytes > before or x.numel() == 0
    for _ in range(2):
        got = fetch(view, "disk", list(x.shape), list(x.stride()), x.dtype, x.device)
        arrived(got)
        assert (got.shape, got.stride(), got.dtype) == (x.shape, x.stride(), x.dtype)
        assert torch.equal(got.nan_to_num(5), x.nan_to_num(5)) if dtype.is_floating_point else torch.equal(got, x)
    del view
    assert store.used_bytes == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_gives_back_what_it_took(layout: str) -> None:
    """On a CPU it only copies: streams are tested on CUDA."""
    x = LAYOUTS[layout]
    view = sent(x, send(x, "host"))
    got = fetch(view, "host", list(x.shape), list(x.stride()), x.dtype, x.device)
    arrived(got)
    assert got.stride() == x.stride()
    assert torch.equal(got.nan_to_num(5), x.nan_to_num(5))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_step_is_planned_for_an_accelerator_elsewhere(place: str) -> None:
    options: dict[str, Any] = {"loss": lambda out, _: out.square().mean(), "device": "cuda:t4"}
    plan = gs.plan(net(), data(4096, 64), policy={"linear": "offload"}, offload=place, **options)
    travels = plan.timeline.transfers
    assert travels
    assert {row.reason.partition(",")[0] for row in plan.rows if row.decision == "offload"} == {
        "waits in host memory" if place == "host" else "waits in a file"
    }
    if place == "host":
        with pytest.raises(OffloadError, match="in host memory anyway"):
            gs.stow(net(), plan=plan)
    nbytes = next(row.nbytes for row in plan.rows if row.decision == "offload")
    assert travels[0].end - travels[0].start >= nbytes / 16e9


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "disk"])
def test_streams_keep_the_order_of_an_accelerators_ops(place: str, device: str) -> None:
    """Memory is given up and written over at once, on both sides of the transfer, while copies are still queued."""
    big = [torch.full((1 << 24,), float(i), device=device) for i in range(4)]
    tickets = []
    for x in big:
        leaving = send(x, place)
        ticket = sent(x, leaving)
        x.fill_(-1.0)
        tickets.append(ticket)
    del big, x
    for i, ticket in enumerate(tickets):
        got = fetch(ticket, place, [1 << 24], [1], torch.float32, torch.device(device))
        arrived(got)
        assert torch.equal(got, torch.full_like(got, float(i)))


@pytest.mark.parametrize("policy", ["*=disk", "*=offload", "linear=offload,dropout=recompute"])
def test_equal_to_plain(policy: str) -> None:
    plan = plan_of(assert_equal_twins(net, steps(loss), policy))
    assert plan is not None
    assert {row.decision for row in plan.rows} >= {"offload"}
    assert plan.lossy == {}


def test_a_budget_chooses_what_to_offload(tmp_path: Path) -> None:
    plain = net()
    exact = gs.plan(plain, data(4096, 64), loss=lambda out, _: out.square().mean(), budget="45%")
    options: dict[str, Any] = {"loss": lambda out, _: out.square().mean(), "budget": exact.predicted_peak_bytes}
    more = gs.plan(plain, data(4096, 64), offload=f"disk:{tmp_path}", **options)
    assert more.predicted_seconds <= exact.predicted_seconds
    assert more.predicted_peak_bytes <= exact.predicted_peak_bytes


def test_forwards_without_backwards_pile_up_nothing() -> None:
    model, store = gs.stow(net(), policy="*=disk"), store_in("disk")
    loss(model, 0).backward()
    used, length = store.used_bytes, store.length
    for step in range(100):
        loss(model, step)
    assert store.used_bytes == used == 0
    assert store.length <= 2 * length
    loss(model, 0).backward()


def test_memory_is_given_up_before_its_writer_says_so() -> None:
    """The thread that writes must not hold what it has written: the next op takes that memory."""
    for _ in range(50):
        x = torch.ones(1 << 18)
        there = weakref.ref(x)
        ticket = sent(x, send(x, "disk"))
        del x
        assert there() is None
        got = fetch(ticket, "disk", [1 << 18], [1], torch.float32, torch.device("cpu"))
        arrived(got)
        there = weakref.ref(got)
        del got
        assert there() is None


def test_tickets_may_be_collected_while_a_slot_is_given_back() -> None:
    """A loss that is part of a cycle takes its tickets with it whenever the collector runs."""
    store, before = store_in("disk"), gc.get_threshold()
    for _ in range(20):
        cycle: list[Any] = [sent(x, send(x, "disk")) for x in (torch.ones(3000),)]
        cycle.append(cycle)
        del cycle
    gc.set_threshold(1)
    try:
        for _ in range(20):
            sent(torch.ones(10), send(torch.ones(10), "disk"))
            assert store.used_bytes >= 0
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert store.used_bytes == 0


def test_retained_graphs() -> None:
    def use(model: torch.nn.Module) -> Any:
        seen = []
        for step in range(3):
            model.zero_grad()
            value = loss(model, step)
            for _ in range(4):
                value.backward(retain_graph=True)
            seen += [(f"{n} {step}", p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None]
            del value
        return seen

    assert_equal_twins(net, use, "*=disk")
    assert store_in("disk").used_bytes == 0


def test_an_exception_between_forward_and_backward() -> None:
    def use(model: torch.nn.Module) -> Any:
        for step in range(3):
            with pytest.raises(RuntimeError, match="mine"):
                _fails(loss(model, step))
        value = loss(model, 3)
        value.backward()
        return [(n, p.grad) for n, p in model.named_parameters()]

    assert_equal_twins(net, use, "*=disk")
    assert store_in("disk").used_bytes == 0


def _fails(_value: torch.Tensor) -> None:
    raise RuntimeError("mine")


# ------------------------------------------------------------------------------------------------------ faults


def breaks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("gradstow.offload._store.os.pwrite", fail)


def test_a_full_disk_is_named_and_the_model_is_plain_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = net(), gs.stow(net(), policy="*=disk")
    with monkeypatch.context() as patch:
        breaks(patch, errno.ENOSPC)
        with pytest.raises(OffloadError, match=r"offload file in .* could not be written \(No space left on device\)"):
            loss(model, 0)
    assert not is_stowed(model)
    assert store_in("disk").used_bytes == 0
    found = []
    for trained in (plain, model):
        torch.manual_seed(1)
        found.append(steps(loss)(trained))
    assert [d for d in differences(*found) if "num_batches" not in d] == []


def damage(how: str) -> None:
    store = store_in("disk")
    if how == "truncated":
        os.ftruncate(store.file, 4096)
    else:
        os.pwrite(store.file, b"\1" * store.length, 0)


@pytest.mark.parametrize(("how", "words"), [("truncated", "too early"), ("overwritten", "holds other bytes")])
def test_a_damaged_file_is_named(how: str, words: str) -> None:
    model = gs.stow(net(), policy="*=disk")
    value = loss(model, 0)
    damage(how)
    with pytest.raises(OffloadError, match=words):
        value.backward()
    del value
    torch.manual_seed(1)
    model.zero_grad()
    model.load_state_dict(net().state_dict())
    got = steps(loss)(model)
    torch.manual_seed(1)
    assert differences(steps(loss)(net()), got) == []


def test_places_are_checked_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    x = data(64, 64)
    for folder in (tmp_path / "file", tmp_path / "missing"):
        model = gs.stow(net(), "50%", offload=f"disk:{folder}")
        with pytest.raises(OffloadError, match="is no folder"):
            model(x)
        assert not is_stowed(model)
    with pytest.raises(OffloadError, match=r"no file can be made in /proc"):
        gs.stow(net(), "50%", offload="disk:/proc")(x)
    with pytest.raises(OffloadError, match="the model is on xpu, and only values on a CPU or a CUDA device"):
        check_place("disk", "xpu")
    with pytest.raises(OffloadError, match="its values are in host memory anyway"):
        gs.plan(net(), data(8, 64), loss=lambda out, _: out.sum(), budget="50%", offload="host")
    check_place("host", "cuda")
    for wrong in ("disc", "disk:", "host:x", 5):
        with pytest.raises(PolicyError, match="is no place"):
            gs.stow(net(), "50%", offload=wrong)  # type: ignore[arg-type]


def test_a_budget_that_cannot_be_met_is_still_refused(tmp_path: Path) -> None:
    model = gs.stow(net(), 200_000, offload=f"disk:{tmp_path}")
    with pytest.raises(BudgetTooSmall):
        loss(model, 0)


CHILD = """
    import os, resource, signal, sys
    import torch
    import gradstow as gs
    folder, what = sys.argv[1:]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(3)))
    gs.stow(model.train(), policy="*=disk", offload=f"disk:{folder}")
    if what == "limited":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for step in range(3):
        torch.manual_seed(step)
        value = model(torch.randn(1024, 256)).square().mean()
        if what == "killed" and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        value.backward()
    print(sum(p.grad.double().sum().item() for p in model.parameters()))
"""


def child(folder: Path, what: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), what]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(gs.__file__).parents[1],
    )


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    process = child(tmp_path, "killed")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    processes = [child(tmp_path, "plain") for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_grow_is_named(tmp_path: Path) -> None:
    process = child(tmp_path, "limited")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "OffloadError" in errors
    assert "could not be written (File too large)" in errors


def test_bandwidth_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidth_of.cache_clear()
    first = bandwidth_of("disk")
    bandwidth_of.cache_clear()

    def never(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("gradstow.cost._transfers._measured", never)
    assert bandwidth_of("disk") == first
    assert first.seconds(1 << 20, back=True) < first.seconds(1 << 24, back=True)
    assert "/s there" in str(first)


def test_a_copy_and_a_pickle_are_plain() -> None:
    model = gs.stow(net(), policy="*=disk")
    loss(model, 0).backward()
    assert not is_stowed(copy.deepcopy(model))


def test_the_timeline_shows_what_travels_beside_the_ops(tmp_path: Path) -> None:
    policy = {"linear": "offload"}
    plan = gs.plan(net(), data(4096, 64), loss=lambda out, _: out.square().mean(), policy=policy)
    travels = plan.timeline.transfers
    there, back = [t for t in travels if not t.back], [t for t in travels if t.back]
    assert len(there) == len(back) == sum(row.decision == "offload" for row in plan.rows) > 0
    assert all(a.end <= b.start for a, b in itertools.pairwise(travels)), "one after the other"
    assert max(t.end for t in there) <= min(t.start for t in back)
    assert plan.predicted_seconds == pytest.approx(sum(m.seconds + m.wait for m in plan.timeline.moments))
    whole = sum(t.end - t.start for t in travels)
    assert plan.timeline.wait_seconds < whole, "some of it is hidden behind ops"
    assert len(plan_json(plan)["transfers"]) == len(travels)
    assert "for what travels" in str(plan)


@pytest.mark.parametrize("code", ["disk", "int8"])
def test_a_saved_plan_runs_elsewhere(code: str, tmp_path: Path) -> None:
    place = f"disk:{tmp_path}" if code == "disk" else None
    policy = {"linear": "offload" if place else code, "dropout": "compress"}
    made = gs.plan(net(), data(128, 64), loss=lambda out, _: out.square().mean(), policy=policy, offload=place)
    made.save(tmp_path / "plan.json")
    loaded = gs.Plan.load(tmp_path / "plan.json")
    assert loaded.dumps() == made.dumps()
    assert loaded.timeline == made.timeline

    def train(**options: Any) -> Any:
        torch.manual_seed(0)
        _lossy.seed(0)
        return steps(lambda model, step: loss(model, 0))(gs.stow(net(), **options))

    torch.manual_seed(0)
    assert differences(train(plan=loaded), train(policy=policy, offload=place)) == []


class Broken(torch.nn.Module):
    """Two graphs, whose boundary stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


USES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[torch.nn.Module, int], torch.Tensor]]] = {
    "graph breaks": (Broken, loss),
    "bf16": (lambda: net().to(torch.bfloat16), lambda m, s: m(data(128, 64, seed=s).bfloat16()).square().mean()),
    "float64": (lambda: net().double(), lambda m, s: m(data(128, 64, seed=s).double()).square().mean()),
    "one sample": (lambda: net()[:4].train(), lambda m, s: m(data(1, 64, seed=s)).square().mean()),
}


@pytest.mark.parametrize("name", USES)
def test_other_uses_are_equal_to_plain(name: str) -> None:
    make, own = USES[name]
    assert_equal_twins(make, steps(own), "*=disk")


def test_autocast_and_accumulation_are_equal_to_plain() -> None:
    def use(model: torch.nn.Module) -> Any:
        seen = []
        for step in range(3):
            model.zero_grad()
            for micro in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    value = loss(model, 2 * step + micro)
                value.backward()
            seen += [(f"{n} {step}", p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None]
        return seen

    assert_equal_twins(net, use, "*=disk")


def test_a_failed_write_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        breaks(patch, errno.ENOSPC)
        for _ in range(3):
            with pytest.raises(OffloadError):
                loss(gs.stow(net(), policy="*=disk"), 0)
    gc.collect()
    assert _ops._values == {}
    assert store_in("disk").used_bytes == 0


def test_a_plan_and_other_wishes_exclude_each_other() -> None:
    plan = gs.plan(net(), data(128, 64), loss=lambda out, _: out.square().mean())
    wishes: list[dict[str, Any]] = [{"offload": "disk"}, {"lossy": "int8"}, {"policy": "*=int8"}, {"budget": "50%"}]
    for options in wishes:
        name = next(iter(options))
        with pytest.raises(gs.errors.GradstowError, match=f"together with {name}="):
            gs.stow(net(), plan=plan, **options)
        with pytest.raises(gs.errors.GradstowError, match=f"together with {name}="):
            gs.verify(net(), data(128, 64), plan=plan, **options)
