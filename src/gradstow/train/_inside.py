"""The optimizer inside the backward: each gradient is applied and freed as soon as it is complete."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradstow._errors import GradstowError
from gradstow._stow import is_stowed
from gradstow.capture import stand_in
from gradstow.train._apply import apply_one, check_hooks, check_optimizer, working_bytes
from gradstow.train._clip import Clip, ClipResult, GradientClip

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def optimize_inside(
    model: torch.nn.Module, optimizers: Optimizers, clip: object = None, *, independent: bool = False
) -> Inside:
    """Let the optimizers apply each gradient inside the backward, as soon as it is complete, and free it.

    Equal bit for bit to ``optimizer.step()`` with ``foreach=False`` after the backward. Nothing is changed until
    ``with inside.window():`` is entered, and nothing is left behind after it. A backward that raises leaves those
    parameters changed whose gradients were complete: a step cannot be taken back, skipped or retried.

    Args:
        optimizers: one or several, without a parameter in common. Of torch's all but ``LBFGS``; timm's Lars and Lion.
        clip: None, ``PerParameter`` or ``PreviousNorm``.
        independent: says of any other optimizer that it updates each parameter by that one's gradient and state alone,
            and counts nothing in its groups.

    Memory: of the gradients only those that are complete together, with the optimizer's working memory for one
    parameter, instead of all of them.

    Raises:
        GradstowError: what needs all gradients at once, by name.
    """
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    if isinstance(model, DistributedDataParallel):
        raise GradstowError(
            "DistributedDataParallel averages gradients after they are complete, and inside the backward each would be "
            "applied before that. Step after the backward: optimizer_in_backward=False."
        )
    for optimizer in found:
        check_optimizer(optimizer, independent=independent)
    owners: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
    for optimizer in found:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(parameter, optimizer) is not optimizer:
                    raise GradstowError("two optimizers have a parameter in common, which one gradient cannot serve.")
    return Inside(model, found, check_inside(clip))


def check_inside(
    clip: object = None, *, micro_batches: int = 1, scaling: bool = False, retry: bool = False
) -> GradientClip | None:
    """The clipping, where all of this can be done while gradients are applied inside the backward.

    Raises:
        GradstowError: the first that cannot, and what to do instead.
    """
    out = "step after the backward: optimizer_in_backward=False"
    found = Clip.of(clip)
    if found is not None and not isinstance(found, GradientClip):
        raise GradstowError(
            f"{type(found).__name__} needs the norm of all gradients, and inside the backward each is applied and "
            "freed before the others are there. Use gs.train.PerParameter(max_norm), gs.train.PreviousNorm(max_norm) "
            f"which takes the norm of the window before, or {out}."
        )
    if micro_batches > 1:
        raise GradstowError(
            f"the window has {micro_batches} micro-batches, whose gradients must be added up before any is applied. "
            f"Give micro_batch=None and a budget, which plans the whole batch, or {out}."
        )
    if scaling:
        raise GradstowError(
            "fp16 with a scaled loss skips a step where any gradient is infinite, and inside the backward the first "
            f"ones are applied before the last ones are known. Use precision='bf16', or {out}."
        )
    if retry:
        raise GradstowError(
            "a step cannot be retried after running out of memory where part of its gradients are applied already. "
            f"Turn the retry off, or {out}."
        )
    return found


@dataclass(slots=True)
class Window:
    """One step. ``result``: its norm and limit, once the window is over; of no gradients the norm is 0."""

    result: ClipResult | None = None


class _NoLimit(GradientClip):
    """Only measures, so that what is not finite is known afterwards."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def working_bytes(self, parameter: torch.nn.Parameter) -> int:
        return 0

    def finish(self) -> ClipResult:
        return ClipResult(super().finish().norm, None)

    def _factor(self, norm: torch.Tensor) -> None:
        return None


class Inside:
    """What ``optimize_inside`` gives. Forward and backward of a step run inside ``with inside.window() as window:``."""

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], clip: GradientClip | None
    ) -> None:
        self.model, self.optimizers, self.clip = model, tuple(optimizers), clip or _NoLimit()
        self._lock = threading.Lock()  # each device has a thread of autograd's own
        self._groups: dict[torch.nn.Parameter, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        self._applied: set[torch.nn.Parameter] = set()
        self._inside = False
        self._known: dict[tuple[Any, ...], int] = {}

    @contextlib.contextmanager
    def window(self) -> Iterator[Window]:
        """One forward and one backward, in which gradients are applied; what is left over is applied at its end.

        Raises:
            GradstowError: inside another window, a gradient that is there already, a step hook on an optimizer; in the
                backward, a parameter's second gradient.
        """
        if self._inside:
            raise GradstowError("this window is inside of another one. Finish the first one's backward before.")
        self._find_groups()
        window, hooks = Window(), [p.register_post_accumulate_grad_hook(self._apply) for p in self._groups]
        self._inside = True
        self.clip.begin()
        try:
            with self.stand_ins():
                yield window
            for parameter in [p for p in self._groups if p.grad is not None]:  # given by hand, not by a backward
                self._apply(parameter)
            window.result = self.clip.finish()
        except BaseException:
            for parameter in self._groups:
                parameter.grad = None
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self._inside = False
            self._groups, self._applied = {}, set()

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Let a stowed model, or ``gs.plan``, see that gradients are applied as soon as they are handed over.

        Each parameter has a ``.grad`` without memory that says so, until just before the real gradient arrives.
        """
        self._find_groups()
        stowed = any(map(is_stowed, self.model.modules()))
        shown = {p: stand_in(p, self._working(p)) for p in self._groups} if stowed or not self._inside else {}
        hooks = [p.register_hook(_make_room(p, grad)) for p, grad in shown.items()]
        for parameter, grad in shown.items():
            parameter.grad = grad
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, grad in shown.items():
                if parameter.grad is grad:
                    parameter.grad = None

    def working_bytes(self) -> int:
        """Bytes that applying one gradient takes at most, beside that and the optimizer's state."""
        self._find_groups()
        return max(map(self._working, self._groups), default=0)

    def _working(self, parameter: torch.nn.Parameter) -> int:
        optimizer, group = self._groups[parameter]
        options = tuple((name, value) for name, value in group.items() if isinstance(value, bool))  # amsgrad, nesterov
        key = optimizer, options, bool(group.get("momentum")), bool(group.get("weight_decay")), parameter.shape
        if key not in self._known:
            self._known[key] = working_bytes(optimizer, group, parameter) + self.clip.working_bytes(parameter)
        return self._known[key]

    def _find_groups(self) -> None:
        self._groups, self._applied = {}, set()
        for optimizer in self.optimizers:
            check_hooks(optimizer)
            for group in optimizer.param_groups:
                self._groups.update((p, (optimizer, group)) for p in group["params"] if p.requires_grad)
        there = sum(p.grad is not None for p in self._groups)
        if there:
            self._groups = {}
            raise GradstowError(
                f"{there} parameters have a gradient before the step began, which would be added to its own. Call "
                "optimizer.zero_grad() first."
            )

    def _apply(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        with self._lock:
            if parameter in self._applied:
                parameter.grad = None
                raise GradstowError(
                    f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one step, after its first "
                    "was applied. Add the losses up and call backward once, or step after the backward: "
                    "optimizer_in_backward=False."
                )
            self._applied.add(parameter)
            if parameter.grad is not None:
                self.clip.one(parameter)
                apply_one(*self._groups[parameter], parameter)
                parameter.grad = None


def _make_room(parameter: torch.nn.Parameter, stand_in: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(_gradient: torch.Tensor) -> None:
        if parameter.grad is stand_in:
            parameter.grad = None

    return hook
