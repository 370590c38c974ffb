"""Ways to train one model, one after the other on the same data, each timed in turn with plain PyTorch."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradstow._api import stow
from gradstow._stow import is_stowed, unstow_model
from gradstow._verify import Trainee, median_interval, seed
from gradstow.capture import find_loss, same_randomness
from gradstow.cli.bench._refused import Row, rows_of
from gradstow.cost import measure_peak

Call = Callable[[nn.Module, Any], Any]
Prepare = Callable[[nn.Module], Any]
Progress = Callable[[str, int, int], None]
PLAIN = "plain"


def nothing(_model: nn.Module) -> None: ...


@dataclass(frozen=True)
class Way:
    """One way to train: what is done to a copy of the model, and how that is called where not as usual.

    Attributes:
        like: the way whose losses it promises, bit for bit.
        at_least: the way to try with the smallest budget in bytes, where this one's budget is refused.
    """

    name: str
    prepare: Prepare = nothing
    call: Call | None = None
    like: str | None = None
    at_least: Callable[[int], Way] | None = None


def planned(
    name: str, budget: str | int, *, like: str | None = None, first: Prepare = nothing, call: Call | None = None
) -> Way:
    """Stowed under a budget, after ``first``; bytes are the smallest that there are."""

    def prepare(model: nn.Module) -> None:
        first(model)
        stow(model, budget)

    def again(smallest: int) -> Way:
        return planned(name, smallest, like=like, first=first, call=call)

    asked = isinstance(budget, str)
    return Way(f"{name}, {budget if asked else 'smallest'}", prepare, call, like, again if asked else None)


@dataclass
class Contest:
    """A model, its data, and how long each way is trained and timed.

    Attributes:
        batch: the batch of a step, by its number; all have one shape.
        loss: ``loss(output, batch)``, or None where the output has one.
        optimizer: made anew for each copy.
        judge: what a model is worth after training, or None.

    The first way is the one that the others are timed against. Memory: two copies of the model and its optimizer.
    """

    model: nn.Module
    batch: Callable[[int], Any]
    call: Call
    loss: Callable[[Any, Any], torch.Tensor] | None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    steps: int
    rounds: int
    judge: Callable[[nn.Module], float] | None = None
    losses: dict[str, list[float]] = field(default_factory=dict)
    promises: dict[str, str] = field(default_factory=dict)

    def run(self, ways: Sequence[Way], meter: Progress) -> Iterator[Row]:
        """One row for each way, in order, as it is measured; and after a refused one another, with the smallest budget.

        A row has: way, saved_bytes (alive between forward and backward, above what was alive before), step_peak_bytes,
        seconds, time_ratio and its 95 % interval, loss (of the last step), equal_to (the first row whose losses are the
        same in every step), equal (that is the first row), and accuracy where there is a judge; or refused.
        """
        rival: Trainee | None = None

        def measure(way: Way, done: int, total: int) -> Row:
            nonlocal rival
            tick = _Ticks(way.name, done, total, self.steps + self.rounds, meter)
            with same_randomness(), self._trainee(way) as trainee:
                row = self._train(way, trainee, tick)
                rival = rival or trainee
                return row | self._time(rival, trainee, tick)

        return rows_of(ways, measure)

    def kept_promises(self) -> bool:
        """Whether every way that ran has the losses that it promises."""
        return all(self.losses[one] == self.losses[other] for one, other in self.promises.items())

    @contextmanager
    def _trainee(self, way: Way) -> Iterator[Trainee]:
        twin = copy.deepcopy(self.model).train()
        way.prepare(twin)
        try:
            yield Trainee(twin, self.optimizer(twin), way.call or self.call, self.loss, self.batch(0))
        finally:
            if is_stowed(twin):
                unstow_model(twin)

    def _train(self, way: Way, trainee: Trainee, tick: Callable[[], None]) -> Row:
        losses = []
        for number in range(self.steps):
            trainee.batch = self.batch(number)
            seed(number)
            trainee.begin()
            if number < self.steps - 1:
                losses.append(float(trainee.finish()))
            else:  # measuring changes no number; the first step would be the wrong one, since it plans
                with measure_peak("cpu") as memory:
                    value = trainee.finish()
                losses.append(float(value))
            trainee.optimizer.step()
            tick()
        accuracy = {} if self.judge is None else {"accuracy": self.judge(trainee.model)}
        trainee.optimizer.zero_grad(set_to_none=True)
        same = next((name for name, other in self.losses.items() if other == losses), None)
        first = next(iter(self.losses), way.name)
        self.losses[way.name] = losses
        if way.like in self.losses:
            self.promises[way.name] = way.like
        return {
            "saved_bytes": _saved(trainee),
            "step_peak_bytes": memory.peak_bytes,
            "loss": losses[-1],
            "equal_to": same or ("itself" if way.name == first else "none"),
            "equal": same == first or way.name == first,
            **accuracy,
        }

    def _time(self, plain: Trainee, trainee: Trainee, tick: Callable[[], None]) -> Row:
        pairs = []
        for number in range(self.rounds):
            order = [plain, trainee] if number % 2 == 0 else [trainee, plain]
            took = {id(one): _seconds(one) for one in (order if plain is not trainee else [plain])}
            pairs.append((took[id(trainee)], took[id(plain)]))
            tick()
        ratios = [ours / theirs for ours, theirs in pairs]
        return {
            "seconds": statistics.median(ours for ours, _ in pairs),
            "time_ratio": statistics.median(ratios),
            "time_ratio_interval": median_interval(ratios),
        }


class _Ticks:
    """Counts the steps and rounds of one way, behind those of the ways before it."""

    def __init__(self, name: str, before: int, ways: int, each: int, meter: Progress) -> None:
        self._name, self._done, self._total, self._meter = name, before * each, ways * each, meter
        meter(name, self._done, self._total)

    def __call__(self) -> None:
        self._done += 1
        self._meter(self._name, self._done, self._total)


def _saved(trainee: Trainee) -> int:
    """What a forward leaves alive until its backward."""
    seed(0)
    with measure_peak("cpu") as memory:
        output = trainee.call(trainee.model, trainee.batch)
        loss = find_loss(output) if trainee.loss is None else trainee.loss(output, trainee.batch)
        del output
    del loss
    return memory.end_bytes


def _seconds(trainee: Trainee) -> float:
    """Of forward, loss and backward."""
    trainee.begin()
    start = time.perf_counter()
    trainee.finish()
    return time.perf_counter() - start
