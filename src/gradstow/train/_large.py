"""Large batches: the learning rate grows with the batch, after a warm-up; LARS and LAMB come from timm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from gradstow._errors import GradstowError
from gradstow.train._groups import parameter_groups

Trained = torch.nn.Module | Iterable[Any]

_RULES = {"linear": 1.0, "sqrt": 0.5}


def scaled_lr(lr: float, batch_size: int, base_batch_size: int, *, rule: str = "linear") -> float:
    """The learning rate for ``batch_size`` samples per step, where ``lr`` is right for ``base_batch_size``.

    Args:
        rule: ``"linear"`` multiplies by the batch's growth (SGD), ``"sqrt"`` by its root (Adam, LAMB).

    Raises:
        GradstowError: a rate or a size that is not positive, or an unknown rule.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017; the root: Krizhevsky, One weird trick, 2014.
    """
    if not (math.isfinite(lr) and lr > 0) or batch_size < 1 or base_batch_size < 1:
        raise GradstowError(
            f"lr={lr!r}, batch_size={batch_size!r} and base_batch_size={base_batch_size!r} must all be positive. "
            "Give the rate that is known to work, and the batch size that it is known for."
        )
    if rule not in _RULES:
        raise GradstowError(f"the rule {rule!r} is unknown. Give one of {tuple(_RULES)}.")
    return float(lr * (batch_size / base_batch_size) ** _RULES[rule])


def linear_warmup(
    optimizer: torch.optim.Optimizer, steps: int, *, start: float | None = None, after: LRScheduler | None = None
) -> LRScheduler:
    """A schedule that raises the learning rate evenly from ``start`` times its value, then goes on with ``after``.

    Step it once per optimizer step, as ``TrainStep(scheduler=...)`` does. Every group keeps its own rate.

    Args:
        steps: optimizer steps until the whole rate is reached.
        start: the first step's share of the rate; None takes 1 / (steps + 1). For a rate scaled k times, 1 / k starts
            at the rate that it was scaled from.
        after: the schedule behind it, made for the same optimizer; it starts when the warm-up is over.

    Raises:
        GradstowError: ``steps`` under 1, a share that is not in (0, 1], or ``after`` of another optimizer.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise GradstowError(f"steps={steps!r} is no warm-up. Give the number of optimizer steps, such as 500.")
    share = 1 / (steps + 1) if start is None else start
    if not 0 < share <= 1:
        raise GradstowError(f"start={start!r} is not a share in (0, 1] of the learning rate. 0.1 is usual.")
    if after is not None and after.optimizer is not optimizer:
        raise GradstowError("after= schedules another optimizer than the warm-up. Make both for the same one.")
    warm = LinearLR(optimizer, start_factor=share, total_iters=steps)
    return warm if after is None else SequentialLR(optimizer, [warm, after], milestones=[steps])


def lars(trained: Trained, lr: float, *, weight_decay: float = 1e-4, **options: Any) -> torch.optim.Optimizer:
    """LARS (SGD whose rate follows each layer's ratio of weight norm to gradient norm), from ``timm.optim.Lars``.

    Args:
        trained: a model, grouped by ``parameter_groups`` so that norms and biases have neither decay nor that ratio, or
            parameters or groups as any optimizer takes them.
        options: for timm's class: ``momentum``, ``trust_coeff``, ``nesterov``, ...

    Memory: one buffer of the parameters' size with ``momentum``, else none.

    Raises:
        GradstowError: timm is not installed.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017.
    """
    return _from_timm("Lars", trained, lr, weight_decay, options)


def lamb(trained: Trained, lr: float, *, weight_decay: float = 0.01, **options: Any) -> torch.optim.Optimizer:
    """LAMB (Adam with such a ratio per layer), from ``timm.optim.Lamb``.

    It clips the global norm by itself: ``max_grad_norm=1.0`` is timm's default, None leaves that to ``TrainStep``.

    Args: as for ``lars``; ``options`` for timm's class: ``betas``, ``eps``, ``max_grad_norm``, ...

    Memory: two buffers of the parameters' size.

    Raises:
        GradstowError: timm is not installed.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020.
    """
    return _from_timm("Lamb", trained, lr, weight_decay, options)


def _from_timm(
    name: str, trained: Trained, lr: float, weight_decay: float, options: dict[str, Any]
) -> torch.optim.Optimizer:
    try:
        import timm.optim
    except ImportError as error:
        raise GradstowError(
            f"{name.upper()} comes from timm, which is not installed. Install the extra: pip install gradstow[vision]."
        ) from error
    parameters = parameter_groups(trained, weight_decay) if isinstance(trained, torch.nn.Module) else trained
    made: torch.optim.Optimizer = getattr(timm.optim, name)(parameters, lr=lr, weight_decay=weight_decay, **options)
    return made
