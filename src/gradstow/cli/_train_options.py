"""Options of the commands that train, and the optimizers that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradstow.cli._input import InputError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("fp32", "bf16", "fp16")
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16 (with a scaled loss).")]


def check_precision(name: str) -> None:
    if name not in PRECISIONS:
        raise InputError(f"there is no precision {name!r}. Choose {', '.join(PRECISIONS)}.")


def micro_batch_of(text: str | None, budget: str | None) -> int | str | None:
    """A number, "auto" or "none"; by default "auto" under a budget."""
    if text is None:
        return None if budget is None else "auto"
    if text == "none":
        return None
    if text == "auto":
        if budget is None:
            raise InputError("--micro-batch auto chooses by the budget, and there is none. Add --budget.")
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--micro-batch {text} is no size. Give a number of samples, auto or none.")
    return int(text)


OPTIMIZERS = {"sgd": 0.05, "adamw": 1e-3, "lars": 1.0, "lamb": 5e-3}  # with their usual learning rates


def training_optimizer(name: str, model: torch.nn.Module, lr: float | None) -> Any:
    """The optimizer that an option names, with its usual learning rate where none is given."""
    import torch

    from gradstow.train._large import lamb, lars

    if name not in OPTIMIZERS:
        raise InputError(f"there is no optimizer {name!r} to train with. Choose {', '.join(OPTIMIZERS)}.")
    if lr is not None and not 0 < lr < float("inf"):
        raise InputError(f"--lr {lr} is no learning rate. Give a number above 0.")
    rate = OPTIMIZERS[name] if lr is None else lr
    if name == "lars":
        return lars(model, rate, momentum=0.9)
    if name == "lamb":
        return lamb(model, rate)
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=rate, momentum=0.9)
    return torch.optim.AdamW(trained, lr=rate)
