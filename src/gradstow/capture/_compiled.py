"""What Inductor does to a joint graph: its decompositions, its joint-graph passes, its layouts of convolutions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from gradstow._ops import keep_mask
from gradstow.capture._fuse import val_of

aten = torch.ops.aten
_CALLED_WITH = "gradstow_called_with"
_TENSORS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}  # how many of their arguments lie so


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table, with dropout that draws eager's own mask, and that Inductor can fuse."""
    importlib.import_module("torch._inductor.lowering")  # max-pooling's decomposition asks it, and does not import it
    from torch._inductor.decomposition import select_decomp_table  # takes a second, and only compiled code needs it

    return {
        **select_decomp_table(),
        aten.native_dropout.default: _dropout,
        aten.native_dropout_backward.default: _dropout_backward,
    }


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:  # eager draws no random numbers here
        return x * 0.0, torch.zeros_like(x, dtype=torch.bool)
    mask = keep_mask(x, 1 - p)
    return torch.where(mask, x * (1 / (1 - p)), x * 0.0), mask


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.where(mask, grad * scale, grad * 0.0)


def joint_passes(joint: fx.GraphModule) -> fx.GraphModule:
    """Inductor's passes over a joint graph, which it would run before partitioning it."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    return joint_graph_passes(joint)


def note_layouts(module: fx.GraphModule) -> None:
    """Note at convolutions the layouts in which compiled code will call them: another kernel, of another price."""
    from torch._inductor.graph import GraphLowering

    if not GraphLowering.decide_layout_opt(module, is_inference=False):
        return
    for node in module.graph.nodes:
        count = _TENSORS.get(node.target, 0)
        vals = [val_of(item) for item in node.args] if count else []
        if count and vals[0].dim() == 4:
            last = [val.contiguous(memory_format=torch.channels_last) for val in vals[:count]]
            node.meta[_CALLED_WITH] = [*last, *vals[count:]]


def called_with(node: fx.Node) -> Any:
    """Its arguments in the layouts noted for it, or None. (What is made of a node has a copy of its notes.)"""
    return node.meta.get(_CALLED_WITH) if node.target in _TENSORS else None
