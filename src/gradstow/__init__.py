"""Train a PyTorch model inside a memory budget: the same numbers in less memory.

``import gradstow`` loads nothing: each public name imports its room, and with it torch, when it is
first used (PEP 562). No room may have the name of a public function, because importing a sub-package
binds it as an attribute here: the planner's folder is ``planner``, so ``gradstow.plan`` stays the function.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradstow import errors, layers, train
    from gradstow._api import frontier, plain, plan, profile, stow, unstow, verify
    from gradstow._plan import Plan
    from gradstow.cost import measure_peak, memory
    from gradstow.planner import Policy
    from gradstow.train import TrainStep, max_batch

    __version__: str

__all__ = [
    "Plan",
    "Policy",
    "TrainStep",
    "__version__",
    "errors",
    "frontier",
    "layers",
    "max_batch",
    "measure_peak",
    "memory",
    "plain",
    "plan",
    "profile",
    "stow",
    "train",
    "unstow",
    "verify",
]

_HOMES = {
    "Plan": "gradstow._plan",
    "Policy": "gradstow.planner",
    "TrainStep": "gradstow.train",
    "frontier": "gradstow._api",
    "max_batch": "gradstow.train",
    "measure_peak": "gradstow.cost",
    "memory": "gradstow.cost",
    "plain": "gradstow._api",
    "plan": "gradstow._api",
    "profile": "gradstow._api",
    "stow": "gradstow._api",
    "unstow": "gradstow._api",
    "verify": "gradstow._api",
}

_ROOMS = ("errors", "layers", "train")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    elif name in _ROOMS:
        found = import_module(f"gradstow.{name}")
    elif name == "__version__":
        found = _version()
    else:
        raise AttributeError(f"module 'gradstow' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gradstow")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
