"""In what precision the forward runs, and that the loss is computed in float32."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradstow._errors import GradstowError
from gradstow.train._window import map_tensors

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Precision:
    """How the forward runs: parameters, gradients and the optimizer stay in their own dtype, float32 as a rule.

    Attributes:
        name: "fp32" (no autocast), "bf16" or "fp16".

    Under bf16 and fp16 the forward runs in ``torch.autocast``: matrix products and convolutions in the short type, what
    torch lists as sensitive in float32. BatchNorm, LayerNorm, GroupNorm and InstanceNorm take short inputs with float32
    weights, and keep their running and saved statistics in float32 (checked on CPU; on CUDA torch's list makes
    LayerNorm and GroupNorm run in float32 as a whole). The loss runs after the autocast block, on outputs cast up to
    float32; a loss that the model computes itself is as autocast makes it, and is then cast up.
    """

    name: str

    @staticmethod
    def of(value: str | Precision) -> Precision:
        """From a name.

        Raises:
            GradstowError: an unknown name.
        """
        if isinstance(value, Precision):
            return value
        if not isinstance(value, str) or value not in _DTYPES:
            raise GradstowError(f"the precision {value!r} is not known. Give one of {', '.join(_DTYPES)}.")
        return Precision(value)

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None without autocast."""
        return _DTYPES[self.name]

    def autocast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """The block in which the forward runs on "cpu" or "cuda"; it does nothing for fp32."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device, self.dtype)

    def cast_up(self, output: Any) -> Any:
        """The output for the loss: short floats as float32, at any depth of tuples, mappings and dataclasses."""
        if self.dtype is None:
            return output
        return map_tensors(output, as_float)


def as_float(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 where it is shorter."""
    return tensor.float() if tensor.dtype in _SHORT else tensor


def make_scaler(
    precision: Precision, device: str, given: torch.amp.GradScaler | Mapping[str, Any] | None
) -> torch.amp.GradScaler | None:
    """For fp16 torch's GradScaler with its own defaults (2**16, growth 2, backoff 0.5, interval 2000), else None.

    Raises:
        GradstowError: settings without fp16, or unknown ones.
    """
    if isinstance(given, torch.amp.GradScaler):
        return given if given.is_enabled() else None
    if precision.name != "fp16":
        if given is not None:
            raise GradstowError(
                f"scaler= was given with precision={precision.name!r}, whose gradients need no scaling. Leave it away, "
                'or train with precision="fp16".'
            )
        return None
    settings: dict[str, Any] = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5}
    try:
        settings |= {"growth_interval": 2000, **(given or {})}
        for name, number in settings.items():
            if isinstance(number, bool) or not 0 < number < math.inf:
                raise TypeError(f"{name} is {number!r}, which is no number above 0")
        return torch.amp.GradScaler(device, **settings)
    except (TypeError, AssertionError) as error:
        raise GradstowError(
            f"scaler={given!r} cannot be used: {str(error).rstrip('.')}. It takes init_scale, growth_factor, "
            "backoff_factor and growth_interval, or is a torch.amp.GradScaler."
        ) from error


def back_off(scaler: torch.amp.GradScaler) -> None:
    """What a GradScaler does after a bad window, also where only the loss was bad: a smaller scale, counting anew."""
    scale = scaler.get_scale() * scaler.get_backoff_factor()
    scaler.update(new_scale=scale)
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": 0})


def forget_unscaling(scaler: torch.amp.GradScaler) -> None:
    """After a window that broke off: the next one unscales again, by the same scale."""
    scaler.update(new_scale=scaler.get_scale())
