"""``verify``: the user's proof that the planned step gives plain PyTorch's numbers within its budget."""

from __future__ import annotations

import copy
import hashlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradstow._errors import CaptureError, GradstowError
from gradstow._plan import Plan
from gradstow._stow import is_stowed, plan_of, stow_model, unstow_model
from gradstow._units import format_bytes
from gradstow._wanted import Progress, Wanted
from gradstow.capture import check_loss, find_loss, same_randomness
from gradstow.cost import measure_peak

Call = Callable[[torch.nn.Module, Any], Any]
Loss = Callable[[Any, Any], torch.Tensor]

_SEED = 20260


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found.

    Attributes:
        equal: every compared tensor is equal to plain PyTorch's, bit for bit.
        inconclusive: plain PyTorch differs from itself, so nothing can be said.
        differences: names of what differs, in order of appearance.
        compared: how many tensors were compared.
        plain_peak_bytes, measured_peak_bytes, predicted_peak_bytes: step peaks (above what is resident).
        budget_bytes: the budget for the step, or None where the plan has no limit.
        gradient_error: where codes that are not exact were asked for, the norm of what all gradients of the first step
            differ by, as a part of plain PyTorch's; else None.
        time_ratio: median of planned time / plain time over interleaved rounds.
        time_ratio_interval: its 95 % bootstrap interval.
        rerun_ops: ops that run again in the backward.
        plan: the plan that was verified.
    """

    equal: bool
    inconclusive: bool
    differences: tuple[str, ...]
    compared: int
    plain_peak_bytes: int
    measured_peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int | None
    time_ratio: float
    time_ratio_interval: tuple[float, float]
    rerun_ops: int
    plan: Plan
    gradient_error: float | None = None

    @property
    def within_budget(self) -> bool:
        return self.budget_bytes is None or self.measured_peak_bytes <= self.budget_bytes

    @property
    def ok(self) -> bool:
        """Equal (where codes that are not exact were asked for: trained), conclusive and within the budget."""
        return (self.equal or bool(self.plan.lossy)) and not self.inconclusive and self.within_budget

    def to_json(self) -> dict[str, Any]:
        names = [n for n in self.__dataclass_fields__ if n != "plan"]
        return {name: getattr(self, name) for name in names} | {
            "within_budget": self.within_budget,
            "ok": self.ok,
            "budget": self.plan.budget,
            "lossy": self.plan.lossy,
            "model": self.plan.graph.model,
            "torch": torch.__version__,
        }

    def __str__(self) -> str:
        low, high = self.time_ratio_interval
        if self.inconclusive:
            verdict = "inconclusive: plain PyTorch differs from itself"
        else:
            verdict = "equal to plain PyTorch" if self.equal else "DIFFERENT from plain PyTorch"
            if self.plan.lossy and not self.equal:
                codes = ", ".join(f"{n} values kept as {code}" for code, n in self.plan.lossy.items())
                verdict = f"not equal to plain PyTorch, as asked for ({codes})"
        budget = "no limit" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        lines = [
            f"{self.plan.graph.model}: {verdict} ({self.compared} tensors compared, bit for bit)",
            f"step peak   plain {format_bytes(self.plain_peak_bytes)}, planned {format_bytes(self.measured_peak_bytes)}"
            f" (predicted {format_bytes(self.predicted_peak_bytes)}), budget {budget}: "
            + ("within" if self.within_budget else "OVER"),
            f"time ratio  {self.time_ratio:.3f} (95 % interval {low:.3f} to {high:.3f}), {self.rerun_ops} ops rerun",
        ]
        if self.gradient_error is not None:
            lines.append(f"gradients   of the first step differ by {100 * self.gradient_error:.2g} % of their norm")
        lines += [f"differs: {name}" for name in self.differences[:10]]
        return "\n".join(lines)


@dataclass
class Trainee:
    """One copy of the model with its optimizer and a way to run a step.

    ``micro_batches``: how often the gradients of a step are added up, each time of the whole batch. ``keep_output``:
    the loop still holds the model's output while the backward runs.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    call: Call
    loss: Loss | None
    batch: Any
    micro_batches: int = 1
    keep_output: bool = False

    def step(self) -> torch.Tensor:
        """The whole step: zero_grad, and all its micro-batches."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """zero_grad, and all micro-batches but the last."""
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.micro_batches - 1):
            self.finish()

    def finish(self) -> torch.Tensor:
        """One micro-batch: forward, loss, backward; without ``keep_output`` the output is dropped before the latter."""
        loss, _output = self.loss_of_forward()
        loss.backward()
        return loss.detach()

    def loss_of_forward(self) -> tuple[torch.Tensor, Any]:
        """The loss, and the output where the loop keeps it."""
        output = self.call(self.model, self.batch)
        loss = find_loss(output) if self.loss is None else self.loss(output, self.batch)
        if self.loss is None and loss is None:
            raise CaptureError(
                "the model's output holds no loss, and a real step needs one. Give loss=, or let the target's function "
                "return (model, batch, loss)."
            )
        check_loss(loss)
        assert loss is not None
        return loss, output if self.keep_output else None

    def train(self, steps: int, progress: Callable[[int], None]) -> list[tuple[str, str]]:
        """(name, digest) of everything that must be equal, in order."""
        found: list[tuple[str, str]] = []
        for number in range(steps):
            seed(number)
            loss = self.step()
            found.append((f"loss of step {number}", digest(loss)))
            for name, parameter in self.model.named_parameters():
                found.append((f"gradient of {name} in step {number}", digest(parameter.grad)))
            for name, buffer in self.model.named_buffers():
                found.append((f"buffer {name} after step {number}", digest(buffer)))
            found.append((f"RNG state after step {number}", _rng_digest()))
            self.optimizer.step()
            progress(number + 1)
        for name, parameter in self.model.named_parameters():
            found.append((f"parameter {name} after {steps} steps", digest(parameter)))
        return found


class Proof:
    """Plain PyTorch's numbers for a few steps, to hold any number of plans against.

    ``expected`` and ``again`` are two plain runs; they differ only where the model is not deterministic.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        call: Call,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        steps: int = 3,
        progress: Progress | None = None,
        micro_batches: int = 1,
    ) -> None:
        if steps < 1:
            raise GradstowError(f"verify needs at least one step, not steps={steps}.")
        self.model, self.batch, self.call, self.loss, self.optimizer = model, batch, call, loss, optimizer
        self.steps, self.micro_batches = steps, micro_batches
        self.say = progress or (lambda _stage, _done, _total: None)
        with same_randomness():
            self.plain = self.trainee()
            self.expected = self.plain.train(steps, lambda n: self.say("plain", n, steps))
            self.again = self.trainee().train(steps, lambda n: self.say("plain again", n, steps))
        self.plain_peak_bytes = -1

    def trainee(self) -> Trainee:
        """A fresh copy of the model with a fresh copy of the optimizer."""
        twin, optimizer = twins(self.model, self.optimizer)
        return Trainee(twin, optimizer, self.call, self.loss, self.batch, self.micro_batches)

    def check(self, plan: Plan, rounds: int = 5, inspect: Callable[[Trainee], None] | None = None) -> Verification:
        """Run the plan for the same steps, compare, measure both peaks and the time ratio.

        ``inspect`` gets the planned trainee before the timing, for measurements of one's own.
        """
        return self.check_stowed(lambda model: stow_model(model, Wanted(), plan), rounds, inspect)

    def check_stowed(
        self,
        stow: Callable[[torch.nn.Module], Any],
        rounds: int = 5,
        inspect: Callable[[Trainee], None] | None = None,
    ) -> Verification:
        """As ``check``, with whatever ``stow`` does to a twin: the plan is the one that its last step ran.

        The peaks are those of one more step, so that a model whose first step is recorded is measured as planned.
        """
        if rounds < 1:
            raise GradstowError(f"verify needs at least one round of timing, not rounds={rounds}.")
        with same_randomness():
            planned = self.trainee()
            stow(planned.model)
            got = planned.train(self.steps, lambda n: self.say("planned", n, self.steps))
            plan = plan_of(planned.model)
            if plan is None:
                raise GradstowError("no plan ran: one step alone is recorded only. Verify at least two, with steps=2.")
            differences = compare(self.expected, got)
            if self.plain_peak_bytes < 0:
                self.plain_peak_bytes = step_peak(self.plain, plan.graph.device)
            measured = step_peak(planned, plan.graph.device)
            if inspect is not None:
                inspect(planned)
            ratios = time_ratios(self.plain, planned, rounds, lambda n: self.say("time", n, rounds))
            error = self._gradient_error(stow) if plan.lossy else None
        if is_stowed(planned.model):
            unstow_model(planned.model)
        return Verification(
            equal=not differences,
            inconclusive=bool(compare(self.expected, self.again)),
            differences=differences,
            compared=len(got),
            plain_peak_bytes=self.plain_peak_bytes,
            measured_peak_bytes=measured,
            predicted_peak_bytes=plan.predicted_step_peak_bytes,
            budget_bytes=plan.step_budget_bytes,
            time_ratio=statistics.median(ratios),
            time_ratio_interval=median_interval(ratios),
            rerun_ops=plan.rerun_ops,
            plan=plan,
            gradient_error=error,
        )

    def _gradient_error(self, stow: Callable[[torch.nn.Module], Any]) -> float:
        """How far a first step's gradients are from plain PyTorch's, by their norms."""
        plain, planned = self.trainee(), self.trainee()
        stow(planned.model)
        for trainee in (plain, planned):
            seed(0)
            trainee.step()
        apart = whole = 0.0
        for ours, theirs in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
            if theirs.grad is not None and ours.grad is not None:
                expected, got = (g.to_dense() if g.is_sparse else g for g in (theirs.grad, ours.grad))
                apart += float((got - expected).abs().double().square().sum())
                whole += float(expected.abs().double().square().sum())
        return (apart / whole) ** 0.5 if whole else float(apart > 0)


def twins(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A copy of the model that trains, and one of its optimizer: SGD with momentum where there is none."""
    twin, own = copy.deepcopy((model, optimizer))
    twin.train()
    if own is None:
        own = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    return twin, own


def seed(number: int) -> None:
    """Start the random streams of Python, NumPy and torch: some models mask with NumPy, or skip layers."""
    torch.manual_seed(_SEED + number)
    random.seed(_SEED + number)
    np.random.seed(_SEED + number)


def compare(expected: list[tuple[str, str]], got: list[tuple[str, str]]) -> tuple[str, ...]:
    """Names of what differs; comparing nothing, or only absent tensors, is a difference in itself."""
    if not expected or all(value == "None" for _, value in expected):
        return ("nothing was compared",)
    if [name for name, _ in expected] != [name for name, _ in got]:
        return ("the compared names differ",)
    return tuple(name for (name, a), (_, b) in zip(expected, got, strict=True) if a != b)


def digest(tensor: torch.Tensor | None) -> str:
    """Text that is equal exactly where ``torch.equal`` is, with NaN equal to NaN and None to None."""
    if tensor is None:
        return "None"
    value = tensor.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    value = value.cpu()
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.is_floating_point():
        value = torch.where(value.isnan(), torch.full_like(value, float("nan")), value + 0.0)
    raw = value.contiguous().view(-1).view(torch.uint8).numpy()
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    return hashlib.blake2b(raw.tobytes() + kind.encode(), digest_size=16).hexdigest()


def _rng_digest() -> str:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    others = repr((random.getstate(), np.random.get_state()))  # 624 numbers: numpy leaves none out under 1000
    return " ".join([*map(digest, states), hashlib.blake2b(others.encode(), digest_size=16).hexdigest()])


def step_peak(trainee: Trainee, device: str) -> int:
    """Of the step's last micro-batch."""
    seed(0)
    trainee.begin()
    with measure_peak(device) as memory:
        trainee.finish()
    trainee.optimizer.zero_grad(set_to_none=True)
    return memory.peak_bytes


def time_ratios(plain: Trainee, planned: Trainee, rounds: int, progress: Callable[[int], None]) -> list[float]:
    ratios = []
    for number in range(rounds):
        order = (plain, planned) if number % 2 == 0 else (planned, plain)
        seconds = {id(t): _seconds(t) for t in order}
        ratios.append(seconds[id(planned)] / seconds[id(plain)])
        progress(number + 1)
    return ratios


def _seconds(trainee: Trainee) -> float:
    """Of the step's last micro-batch."""
    trainee.begin()
    _wait()
    start = time.perf_counter()
    trainee.finish()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def median_interval(samples: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the same samples give the same interval."""
    draws = np.random.default_rng(0).choice(np.asarray(samples), size=(2000, len(samples)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)
