"""How large micro-batches are, and by what plan the model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradstow._api import Forward, stow
from gradstow._errors import GradstowError, warn_user
from gradstow._stow import is_stowed
from gradstow._units import parse_budget, whole_number
from gradstow._wanted import Progress
from gradstow.train._choose import Choice, choose
from gradstow.train._coupled import check_splittable, coupled_now, may_couple
from gradstow.train._given import samples_of
from gradstow.train._precision import Precision
from gradstow.train._sized import joined
from gradstow.train._window import size_of, split

_UNSPLITTABLE = "the loss (splittable=False)"


class Fit:
    """Stows the model, chooses the micro-batch where asked to, and splits batches.

    Attributes:
        asked: what the user gave as micro_batch.
        micro_batch: the most samples of one micro-batch; None where batches are not split, or not yet known.
        choice: how "auto" chose.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        budget: int | str | None,
        micro_batch: int | str | None,
        batch_size: int | None,
        *,
        splittable: bool = True,
        allow_coupled: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.asked = model, _micro_batch_of(micro_batch, budget)
        self.batch_size = None if batch_size is None else samples_of("batch_size", batch_size)
        self.micro_batch = self.asked if isinstance(self.asked, int) else None
        self.choice: Choice | None = None
        self._budget = None if budget is None else parse_budget(budget)
        self._bytes: int | None = None  # the budget that a saved run came to
        self._optimizer = joined(optimizers)
        self._candidates = may_couple(model)
        self._splittable, self._allow_coupled = splittable, allow_coupled
        self._progress = progress
        self._waits = self.asked == "auto"
        self._said = self._said_plain = False
        if self._budget is not None and not self._waits:
            self.stow()

    def stow(self) -> None:
        """By the chosen plan, or by the budget alone."""
        assert self._budget is not None, "asked for only under one"
        if self.choice is not None:
            stow(self.model, plan=self.choice.plans, optimizer=self._optimizer, progress=self._progress)
        else:
            stow(self.model, self._bytes or str(self._budget), optimizer=self._optimizer, progress=self._progress)

    def ready(self, batch: Any, loss: Any, precision: Precision, forward: Forward | None) -> None:
        """Before the first window: choose. Plans on fake tensors; nothing of the step runs."""
        if not self._waits:
            self._say_where_plain()
            return
        self.choice = choose(
            self.model,
            batch,
            loss=loss,
            optimizer=self._optimizer,
            budget=self._budget,
            batch_size=self.batch_size,
            precision=precision,
            coupled=self.coupled(),
            forward=forward,
            progress=self._progress,
        )
        self.micro_batch = self.choice.micro_batch
        self._waits = False
        self.stow()

    def state_dict(self) -> dict[str, Any]:
        budget = None if self.choice is None else self.choice.budget_bytes
        return {
            "asked": self.asked,
            "micro_batch": self.micro_batch,
            "budget": str(self._budget),
            "budget_bytes": budget or self._bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the size that a saved run had, where it was asked for the same: other sums round otherwise."""
        if state["asked"] != self.asked:
            return
        if self._waits and state["budget"] != str(self._budget):
            return  # another budget: the first step chooses anew
        self.micro_batch = state["micro_batch"]
        if self._waits and self.micro_batch is not None:
            self._waits, self._bytes = False, state["budget_bytes"]
            self.stow()

    def again(self) -> None:
        """Ctrl-C in a forward leaves a stowed model plain: under a budget it is stowed again."""
        if self._budget is not None and not self._waits and not is_stowed(self.model):
            self.stow()

    def coupled(self) -> str:
        """What forbids splitting a batch, or ""."""
        if self._allow_coupled:
            return ""
        return coupled_now(self._candidates) if self._splittable else _UNSPLITTABLE

    def _say_which_dimension(self) -> None:
        """Once: what takes sequences first may be cut along them."""
        if self._said:
            return
        self._said = True
        for name, module in self.model.named_modules():
            if getattr(module, "batch_first", True) is False:
                warn_user(
                    f"gradstow: batches are split along their first dimension, and {type(module).__name__} {name} has "
                    "batch_first=False. Where the model's own input has time first, its samples are cut apart: put the "
                    "batch first, or use micro_batch=None."
                )
                return

    def _say_where_plain(self) -> None:
        """Once: a step that runs by no plan may take more than the budget."""
        if self._budget is None or self._said_plain:
            return
        if not is_stowed(self.model):
            why = "is not stowed any more (gs.unstow, or an error in its forward)"
            fix = "Make a new TrainStep, or stow it yourself: gs.stow(model, ...)"
        elif not self.model.training:
            why, fix = "is in eval mode, in which it runs as plain PyTorch", "Call model.train() first"
        else:
            return
        self._said_plain = True
        warn_user(
            f"gradstow: {type(self.model).__name__} {why}, so this step and those like it run outside of the budget of "
            f"{self._budget}. {fix}."
        )

    def parts(self, batch: Any) -> tuple[list[Any], list[int]]:
        """The micro-batches of a batch and their samples. A batch that is not to be split need not be splittable.

        Raises:
            GradstowError: something couples the samples.
        """
        if self.micro_batch is None:
            return [batch], [1]
        parts = split(batch, self.micro_batch)
        if len(parts) == 1:
            return parts, [1]
        check_splittable(self.coupled(), size_of(batch), self.micro_batch)
        self._say_which_dimension()
        return parts, [size_of(part) for part in parts]

    def shrink(self, sizes: Sequence[int]) -> bool:
        """Halve the micro-batches from here on, where that can be done."""
        largest = max(sizes)
        if largest < 2 or self.coupled():
            return False
        self.micro_batch = -(-largest // 2)
        return True


def _micro_batch_of(given: Any, budget: Any) -> int | str | None:
    if given is None:
        return None
    if not isinstance(given, str):
        number = whole_number(given)
        if number is not None and number > 0:
            return number
    if not isinstance(given, str) or given != "auto":
        raise GradstowError(
            f'micro_batch={given!r} means nothing. Give a number of samples, "auto", or None for no splitting.'
        )
    if budget is None:
        raise GradstowError(
            'micro_batch="auto" chooses the fastest size within a budget, and none was given. Give budget="6GiB", '
            "or the size."
        )
    return "auto"
