"""What a training step is given, looked at before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradstow._errors import GradstowError
from gradstow._units import whole_number


def check_model(model: object) -> None:
    """Raises GradstowError where it is no module."""
    if not isinstance(model, torch.nn.Module):
        raise GradstowError(f"the model is a {type(model).__name__}, not a torch.nn.Module. Pass the module itself.")


def check_callable(**named: object) -> None:
    """Raises GradstowError for the first that is neither None nor can be called."""
    for name, item in named.items():
        if item is not None and not callable(item):
            raise GradstowError(f"{name}={item!r} cannot be called. Give a function, or leave it out.")


def optimizers_of(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """One or several as several.

    Raises:
        GradstowError: none, one twice, or something else.
    """
    found = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    fix = "Pass torch.optim.AdamW(model.parameters()), or a list of optimizers"
    if not found:
        raise GradstowError(f"optimizer={given!r} holds no optimizer, and a step needs one. {fix}.")
    _check_each("optimizer", given, found, ("step", "zero_grad", "param_groups", "state"), fix)
    if len({id(one) for one in found}) < len(found):
        raise GradstowError("one optimizer is given twice, and would step twice in each window. Give it once.")
    return found


def schedulers_of(given: Any) -> tuple[Any, ...]:
    """None, one or several as several.

    Raises:
        GradstowError: something else is among them.
    """
    if given is None:
        return ()
    found = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    fix = "Pass such as torch.optim.lr_scheduler.StepLR(optimizer, 30), a list of them, or None"
    _check_each("scheduler", given, found, ("step", "state_dict", "load_state_dict"), fix)
    return found


def _check_each(name: str, given: Any, found: tuple[Any, ...], needed: tuple[str, ...], fix: str) -> None:
    for one in found:
        if isinstance(one, type):
            raise GradstowError(f"the class {one.__name__} is no {name}, which is one made of it. Make one. {fix}.")
        if not all(hasattr(one, attribute) for attribute in needed):
            raise GradstowError(f"{name}={given!r} is no {name}. {fix}.")


def samples_of(name: str, given: object) -> int:
    """A number of samples as an int.

    Raises:
        GradstowError: it is none, or less than 1.
    """
    found = whole_number(given)
    if found is None or found < 1:
        raise GradstowError(f"{name}={given!r} is no number of samples. Give at least 1.")
    return found


def check_data(data: object) -> None:
    """Raises GradstowError where the place in the data can be neither counted nor saved."""
    if whole_number(data) is None and not (hasattr(data, "state_dict") and hasattr(data, "load_state_dict")):
        raise GradstowError(
            f"data={data!r} is no place in the data. Give a number that you count up, or a loader with state_dict and "
            "load_state_dict."
        )


def check_parts(parts: object) -> None:
    """Raises GradstowError where a window is not a list of micro-batches."""
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        raise GradstowError(
            f"step.window takes a list of micro-batches, not a {type(parts).__name__}. Put them into one: "
            "step.window([...]); or let step(batch) split a batch."
        )
    if not parts:
        raise GradstowError("a window without a micro-batch has nothing to train on. Give at least one.")
