"""Op times by arithmetic, for what is too large and for devices elsewhere: bytes over bandwidth, FLOPs over rate."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from gradstow._errors import GradstowError
from gradstow.cost._inputs import Sizes, Undecodable, meta_call, sizes, tensors_in
from gradstow.ir import CostTable, OpCost

ARITHMETIC, TRANSFER = 0.6, 0.8  # shares of the data sheet's rates that real kernels reach
_LAUNCH = 5e-6  # seconds that every call takes at least
UNKNOWN = OpCost(0.0, 0, "unknown")


@dataclass(frozen=True, slots=True)
class Profile:
    """A device by its data sheet: floating-point operations per second by dtype, bytes per second, bytes.

    ``bus``: bytes per second between the device and its host, one way.
    """

    name: str
    half: float
    single: float
    bandwidth: float
    memory: int
    bus: float

    def rate(self, dtype: torch.dtype) -> float:
        if dtype in (torch.float16, torch.bfloat16):
            return ARITHMETIC * self.half
        return ARITHMETIC * (self.single / 2 if dtype is torch.float64 else self.single)


PROFILES: Mapping[str, Profile] = {
    p.name: p
    for p in (
        Profile("cuda:h200", 989e12, 67e12, 4.8e12, 141 * 10**9, 64e9),
        Profile("cuda:h100", 989e12, 67e12, 3.35e12, 80 * 10**9, 64e9),
        Profile("cuda:a100", 312e12, 19.5e12, 2.0e12, 80 * 10**9, 32e9),
        Profile("cuda:v100", 125e12, 15.7e12, 0.9e12, 32 * 10**9, 16e9),
        Profile("cuda:l4", 121e12, 30.3e12, 0.3e12, 24 * 10**9, 32e9),
        Profile("cuda:t4", 65e12, 8.1e12, 0.32e12, 16 * 10**9, 16e9),
        Profile("cuda:rtx4090", 165e12, 82.6e12, 1.0e12, 24 * 10**9, 32e9),
    )
}


def find_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        GradstowError: unknown, with the closest known ones.
    """
    if name in PROFILES:
        return PROFILES[name]
    near = difflib.get_close_matches(name, PROFILES, 2, 0.4) or list(PROFILES)
    raise GradstowError(f"there is no device profile {name!r}. Did you mean {' or '.join(near)}?")


def analytic_costs(signatures: Iterable[str], profile: Profile) -> CostTable:
    """A price for every signature from a profile; ops' own working memory is not known and counts as nothing."""
    return CostTable({text: _price(text, profile) for text in dict.fromkeys(signatures)}, profile.name)


def _price(signature: str, profile: Profile) -> OpCost:
    try:
        full = sizes(signature)
    except Undecodable:
        return UNKNOWN
    found = roofline(signature, full, TRANSFER * profile.bandwidth, profile.rate)
    return found if found.how == "unknown" or full.view else replace(found, seconds=found.seconds + _LAUNCH)


def roofline(
    signature: str, full: Sizes, bytes_per_second: float, flops_per_second: Callable[[torch.dtype], float]
) -> OpCost:
    """The longer of bytes over bandwidth and FLOPs over the rate.

    The working memory of such an op is not known and counted as none.
    """
    if full.outputs is None:
        return UNKNOWN
    if full.view:
        return OpCost(0.0, 0, "extrapolated")
    seconds = full.total_bytes / bytes_per_second
    try:
        call = meta_call(signature)
        with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
            call.run()
        if flops := counter.get_total_flops():
            floats = [t.dtype for t in tensors_in([call.args, call.kwargs]) if t.is_floating_point()]
            seconds = max(seconds, flops / flops_per_second(floats[0] if floats else torch.float32))
    except Exception:  # no right formula, or a dtype without matmul: bytes alone would be a guess
        return UNKNOWN
    return OpCost(seconds, 0, "extrapolated")


def _attention(query: Any, key: Any, *_args: Any, **_kwargs: Any) -> int:
    """Two products of queries, keys and values; shapes are (batch, heads, length, width)."""
    return int(4 * math.prod(query) * key[2])


def _attention_backward(_grad: Any, query: Any, key: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(10 * math.prod(query) * key[2])


# torch has formulas for the attention of accelerators only
_FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
