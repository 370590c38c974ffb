"""Ops that are made again in another form than they were first run: without side effects, or cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

from gradstow._ops import batch_norm_apply
from gradstow.actions import Decode

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OutputRef:
    """Stands in a rerun's arguments for the op's own output number ``index``, kept from the first run."""

    index: int


@dataclass(frozen=True, slots=True)
class RerunCall:
    """``target(*args)`` makes the op's outputs number ``outputs`` again.

    ``args`` hold nodes, constants and OutputRefs. A single output is returned bare, several as a tuple.
    ``code``: the one that an action made of it, or "".
    """

    target: Any
    args: tuple[Any, ...]
    outputs: tuple[int, ...]
    code: str = ""


def rerun_call(node: fx.Node, decode: Decode | None = None) -> RerunCall | None:
    """The other form of ``node``, or None where the op itself can run again."""
    if decode is not None:
        return RerunCall(decode.target, decode.args, (0,), decode.code)
    if node.target is not aten._native_batch_norm_legit.default:
        return None
    x, weight, bias, _mean, _var, training, momentum, eps = node.args
    val = x.meta["val"]
    # of another layout the kernel goes element by element, and rounds otherwise than with statistics folded in
    whole = val.is_contiguous(memory_format=suggest_memory_format(val))
    if whole and val.device.type == "cpu" and val.dtype in (torch.float32, torch.float64):
        return RerunCall(batch_norm_apply, (x, weight, bias, OutputRef(1), OutputRef(2)), (0,))
    target = aten._native_batch_norm_legit.no_stats
    return RerunCall(target, (x, weight, bias, training, momentum, eps), (0, 1, 2))
