"""Windows that cannot be applied, and windows that break off: nothing is left behind, and it is said."""

from __future__ import annotations

import copy
import gc
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from equality import Seen, differences, state
from gradstow._stow import is_stowed
from gradstow.train._clip import AdaptiveClip, PerParameter
from gradstow.train._snapshot import out_of_memory
from gradstow.train._step import StepResult, TrainStep

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
ERRORS: dict[str, Callable[[], BaseException]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(NO_MEMORY),
    "python": MemoryError,
    "other": lambda: ValueError("in the model"),
    "interrupt": KeyboardInterrupt,
}


class Trouble(torch.autograd.Function):
    """Raises in the forward or the backward, when its net says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: Net) -> torch.Tensor:
        ctx.net = net
        net.meet("forward", len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.net.meet("backward", len(grad))
        return grad, None


class Net(nn.Module):
    """BatchNorm or not, dropout, NumPy's and Python's randomness, a buffer that is replaced."""

    def __init__(self, norm: bool = True, noise: bool = True) -> None:
        super().__init__()
        self.noise = noise
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm: nn.Module = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("average", torch.zeros(()))
        self.trouble: dict[str, Any] = {}

    def meet(self, where: str, size: int) -> None:
        found = self.trouble.get(where)
        if found is not None and size > self.trouble.get("above", 0):
            if self.trouble.get("once", True):
                self.trouble.pop(where)
            raise found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + x.detach().mean() * 0.1
        noise = random.random() + np.random.rand() if self.noise else 1.0
        h = self.drop(self.norm(self.first(x)).relu()) * noise
        return self.last(Trouble.apply(h, self))


def data(count: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Without touching the random streams that are compared."""
    own = torch.Generator().manual_seed(seed)
    return torch.randn(count, 8, generator=own), torch.randint(0, 4, (count,), generator=own)


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def everything(step: TrainStep) -> Seen:
    """All that a window may change, gradients included."""
    seen = [*state(step.model, "now"), *step.model.state_dict().items()]
    for number, optimizer in enumerate(step.optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            seen += [(f"state {number} {index} {n}", torch.as_tensor(v).clone()) for n, v in entries.items()]
    words = [*random.getstate()[1], *np.random.get_state()[1].tolist()]  # type: ignore[union-attr]
    numbers = [step.steps, step.skipped_steps, *(s.last_epoch for s in step.schedulers)]
    scale = 0.0 if step.scaler is None else step.scaler.get_scale()
    clip = [] if step.clip is None else step.clip.state_dict().get("norms", [])
    seen += [("other randomness", torch.tensor(words)), ("counters", torch.tensor(numbers))]
    seen += [("scale", torch.tensor(scale)), ("history", torch.tensor(clip, dtype=torch.float64))]
    return [(name, None if t is None else t.clone()) for name, t in seen]


def make(norm: bool = True, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Net, TrainStep]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Net(norm, noise=options.get("budget") is None)  # numbers from NumPy make a new graph in each step
    made = optimizer(net.parameters(), 1e-2)
    rates = torch.optim.lr_scheduler.StepLR(made, 3)
    return net, TrainStep(net, made, loss=loss_of, scheduler=rates, **options)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def weights(model: nn.Module) -> Seen:
    return [(n, p.detach().clone()) for n, p in model.named_parameters()]


# -------------------------------------------------------------------------------------- skipped windows


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_window_that_is_not_finite_is_skipped_once(bad: float, precision: str) -> None:
    net, step = make(norm=False, precision=precision, clip=AdaptiveClip(warmup=1), micro_batch=2)
    x, y = data()
    step((x, y))
    spoilt = x.clone()
    spoilt[3, 2] = bad
    before = {name: t for name, t in everything(step) if t is not None}
    scale = 0.0 if step.scaler is None else step.scaler.get_scale()
    result = step((spoilt, y))
    assert result.skipped
    assert "nan" in result.skipped
    after = {name: t for name, t in everything(step) if t is not None}
    same = [n for n in before if n.startswith(("state", "first", "last", "norm", "history"))]
    assert len(same) > 6
    assert all(torch.equal(before[n], after[n]) for n in same)
    assert not any(n.startswith("gradient") for n in after)
    assert (step.steps, step.skipped_steps, step.schedulers[0].last_epoch) == (1, 1, 1)
    if step.scaler is not None:
        assert step.scaler.get_scale() == scale / 2
        assert step.scaler.state_dict()["_growth_tracker"] == 0
    assert step((x, y)).skipped is None


def test_a_bad_loss_alone_is_skipped_and_backs_off() -> None:
    net, step = make(norm=False, precision="fp16")
    step.loss = lambda output, batch: loss_of(output, batch) + float("nan") * 0
    before, scale = weights(net), step.scaler.get_scale()
    result = step(data())
    assert result.skipped == "the loss is nan"
    assert step.scaler.get_scale() == scale / 2
    assert differences(before, weights(net)) == []


def test_a_window_without_items_is_skipped() -> None:
    net, step = make(norm=False, micro_batch=2, precision="fp16")
    step.loss = lambda output, batch: (loss_of(output, batch) * float("nan"), 0)
    before = weights(net)
    result = step(data())
    assert result.skipped == "the loss counted no items"
    assert result.loss != result.loss
    assert step.scaler.get_scale() == 2.0**16
    assert differences(before, weights(net)) == []


def test_optimizers_without_gradients_are_passed_over() -> None:
    used, unused = nn.Linear(8, 4), nn.Linear(3, 3)
    model = nn.ModuleList([used, unused])
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (used, unused)]
    for precision in ("fp32", "fp16"):
        step = TrainStep(model, optimizers, loss=loss_of, forward=lambda m, b: m[0](b[0]), precision=precision)
        assert step(data()).skipped is None
    only = TrainStep(model, optimizers[1], loss=loss_of, forward=lambda m, b: m[0](b[0]))
    assert only(data()).skipped == "no parameter of the optimizer got a gradient"


def test_skipping_on_and_on_is_said() -> None:
    _, step = make(norm=False)
    x, y = data()
    for _ in range(19):
        step((x * float("nan"), y))
    with pytest.warns(UserWarning, match="the last 20 windows were all skipped"):
        step((x * float("nan"), y))


# -------------------------------------------------------------------------------- windows that break off


@pytest.mark.parametrize("budget", [None, "100%"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["cpu", "other", "interrupt"])
def test_an_error_leaves_everything_as_it_was(kind: str, where: str, budget: str | None) -> None:
    batches = [data(seed=n) for n in range(4)]
    runs = []
    for troubled in (False, True):
        net, step = make(budget=budget, clip=AdaptiveClip(warmup=1), optimizer=sgd)
        for number, batch in enumerate(batches):
            if troubled and number in (1, 2):
                before = everything(step)
                error = ERRORS[kind]()
                net.trouble = {where: error}
                with pytest.raises(type(error)) as raised:
                    step(batch)
                assert raised.value is error
                assert not hasattr(error, "__notes__")
                after = everything(step)
                assert [n for n in differences(before, after) if not n.startswith("gradient")] == []
                assert not any(p.grad is not None for p in net.parameters())
                assert is_stowed(net) == (budget is not None)
            step(batch)
        runs.append(everything(step))
    assert differences(*runs) == []


@pytest.mark.parametrize("kind", list(ERRORS))
def test_out_of_memory_is_told_apart(kind: str) -> None:
    assert out_of_memory(ERRORS[kind]()) == (kind in ("cuda", "cpu", "python"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert out_of_memory(raised.value)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_retry_with_half_the_size_is_a_fresh_step(where: str, kind: str) -> None:
    batch = data(6)
    net, step = make(norm=False, retry_oom=True)
    net.trouble = {where: ERRORS[kind](), "above": 3, "once": False}
    with pytest.warns(UserWarning, match="ran out of memory.*micro-batches of 3 samples, which all later"):
        result = step(batch)
    assert result.micro_batches == 2
    fresh, plain = make(norm=False, micro_batch=3)
    plain(batch)
    assert differences(everything(plain), everything(step)) == []
    assert step(batch).micro_batches == 2


def test_no_retry_where_it_is_not_allowed_or_does_not_help() -> None:
    for options in ({"norm": False}, {"norm": True, "retry_oom": True}, {"norm": False, "retry_oom": True, "count": 1}):
        count = options.pop("count", 6)
        net, step = make(**options)
        batch = data(count)
        net.trouble = {"forward": ERRORS["cpu"]()}
        with pytest.raises(RuntimeError, match="can't allocate"):
            step(batch)
        assert step(batch).micro_batches == 1
    net, step = make(norm=False, retry_oom=True)
    net.trouble = {"forward": ERRORS["cpu"](), "once": False}  # the second try fails, too
    before = everything(step)
    with pytest.warns(UserWarning, match="ran out of memory"), pytest.raises(RuntimeError, match="can't allocate"):
        step(data())
    assert differences(before, everything(step)) == []


def test_the_retry_begins_with_the_failed_tensors_gone() -> None:
    net, step = make(norm=False, retry_oom=True)
    alive: list[int] = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        alive.append(sum(issubclass(type(o), torch.Tensor) and o.shape == (999,) for o in gc.get_objects()))
        kept = torch.zeros(999)
        if len(alive) == 1:
            raise ERRORS["cpu"]()
        return loss_of(output, batch) + kept.sum()

    step.loss = loss
    with pytest.warns(UserWarning, match="ran out of memory"):
        step(data())
    assert alive[:2] == [0, 0]


def test_a_large_buffer_is_put_back_once_it_was_seen_to_be_written() -> None:
    class Large(Net):
        def __init__(self) -> None:
            super().__init__(norm=False)
            self.register_buffer("large", torch.zeros(300_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.large.add_(1)
            return super().forward(x)

    net = Large()
    step = TrainStep(net, torch.optim.SGD(net.parameters(), 0.1), loss=loss_of)
    net.trouble = {"backward": ValueError("first")}
    with pytest.raises(ValueError, match="first") as raised:
        step(data())
    assert "the buffers large were written before this error" in raised.value.__notes__[0]
    assert net.large[0] == 1
    step(data())
    net.trouble = {"backward": ValueError("second")}
    with pytest.raises(ValueError, match="second"):
        step(data())
    assert net.large[0] == 2


# --------------------------------------------------------------------------------- inside optimizer.step


class Failing:
    """Makes the n-th write of an optimizer's step fail, by a hook on the functions that it uses."""

    def __init__(self, optimizer: torch.optim.Optimizer, error: BaseException, after: bool) -> None:
        self._step, self._error, self._after = optimizer.step, error, after
        self._optimizer = optimizer
        optimizer.step = self  # type: ignore[assignment,method-assign]

    def __call__(self) -> None:
        self._optimizer.step = self._step  # type: ignore[method-assign]
        if self._after:
            self._step()
        else:
            for parameter in self._optimizer.param_groups[0]["params"]:  # as Adam does first
                self._optimizer.state[parameter]["step"] = torch.zeros(())
        raise self._error


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_step_that_had_written_nothing_is_undone(kind: Any, options: dict[str, bool]) -> None:
    for after in (False, True):
        net, step = make(norm=False, optimizer=lambda p, lr: kind(p, lr, **options), retry_oom=True)
        before = everything(step)
        error = ERRORS["cpu"]()
        Failing(step.optimizers[0], error, after)
        if after:
            with pytest.raises(RuntimeError, match="can't allocate") as raised:
                step(data())
            assert raised.value is error
            assert "inside optimizer.step" in error.__notes__[0]
            assert not any(p.grad is not None for p in net.parameters())
            continue
        step.retry_oom = False
        with pytest.raises(RuntimeError, match="can't allocate"):
            step(data())
        if "fused" in options:  # its kernels count no versions, so that nothing is known
            assert "after it may have written" in error.__notes__[0]
            continue
        assert not hasattr(error, "__notes__")
        assert differences(before, everything(step)) == []
        step.retry_oom = True
        Failing(step.optimizers[0], ERRORS["cpu"](), after)
        with pytest.warns(UserWarning, match="ran out of memory"):
            assert step(data()).micro_batches == 2


def test_real_allocations_that_fail_in_the_first_step_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, step = make(norm=False)
    before, real, calls = everything(step), torch.zeros_like, []

    def zeros_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            raise ERRORS["cpu"]()
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    with pytest.raises(RuntimeError, match="can't allocate") as raised:
        step(data())
    monkeypatch.undo()
    assert len(calls) == 4
    assert not hasattr(raised.value, "__notes__")
    assert differences(before, everything(step)) == []


def test_an_interrupt_inside_the_optimizer_comes_after_it(request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    net, step = make(norm=False)
    twin, other = make(norm=False)
    batch = data()
    step.optimizers[0].register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        step(batch)
    other(batch)
    assert step.steps == other.steps == 1
    assert not any(p.grad is not None for p in net.parameters())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_scheduler_that_fails_does_not_undo_the_step() -> None:
    net, step = make(norm=False)
    before = weights(net)
    step.schedulers[0].step = lambda: (_ for _ in ()).throw(ValueError("beyond the last epoch"))
    with pytest.raises(ValueError, match="beyond the last"):
        step(data())
    assert step.steps == 1
    assert differences(before, weights(net)) != []


def test_the_optimizer_inside_the_backward() -> None:
    net, step = make(norm=False, optimizer_in_backward=True, clip=PerParameter(1.0))
    result = step(data())
    assert isinstance(result, StepResult)
    assert result.skipped is None
    assert step.steps == 1
    net.trouble = {"backward": ValueError("in the middle")}
    with pytest.raises(ValueError, match="in the middle") as raised:
        step(data())
    assert "changed already" in raised.value.__notes__[0]
    with pytest.warns(UserWarning, match="has applied them"):
        step((data()[0] * float("inf"), data()[1]))
    _, split = make(norm=False, optimizer_in_backward=True, micro_batch=2)
    with pytest.raises(gs.errors.GradstowError, match="micro-batches"):
        split(data())
    with pytest.raises(gs.errors.GradstowError, match="retried"):
        make(norm=False, optimizer_in_backward=True, retry_oom=True)


def test_a_step_can_be_measured() -> None:
    net, step = make(norm=False, measure=True)
    measured = step(data(64)).peak_bytes
    assert measured is not None
    assert measured > sum(p.nbytes for p in net.parameters()) * 2
    assert copy.deepcopy(net) is not net
