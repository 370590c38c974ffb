"""The models that the benchmarks share, and the ways to save memory that people write by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gradstow as gs
from gradstow._api import make_step
from gradstow._planning import plan_step
from gradstow._wanted import Wanted
from gradstow.capture import Step
from gradstow.cli._targets import build_target

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One model of the table. ``points`` are (MiB, time ratio to reach there); ``blocks`` are checkpointed."""

    target: str
    batch: int
    points: tuple[tuple[int, float], ...]
    blocks: tuple[str, ...]
    attn: str | None = None
    seq: int = 256


CASES = {
    "resnet50": Case(
        "torchvision:resnet50",
        8,
        ((575, 1.07), (514, 1.04), (466, 1.07), (458, 1.25), (416, 1.08), (316, 1.17), (249, 1.34)),
        ("Bottleneck",),
    ),
    "densenet121": Case("torchvision:densenet121", 4, ((255, 1.12), (249, 1.15), (222, 1.37)), ("_DenseLayer",)),
    "vit_b_16": Case("torchvision:vit_b_16", 4, ((388, 1.21), (360, 1.03), (358, 1.25)), ("EncoderBlock",)),
    "gpt2": Case("transformers:gpt2", 4, ((1138, 1.07), (1108, 1.18), (769, 1.22)), ("GPT2Block",), "sdpa"),
    "alexnet": Case("torchvision:alexnet", 64, ((375, 1.35),), ("Sequential",)),
    "vgg16": Case("torchvision:vgg16", 8, (), ()),
    "gpt2-eager": Case(
        "transformers:gpt2,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
        4,
        ((769, 1.1),),
        ("GPT2Block",),
        "eager",
    ),
    "gpt8": Case(
        str(Path(__file__).with_name("gpt8.py")) + ":make",
        8,
        ((142, 1.06), (90, 1.11), (65, 1.17), (58, 1.30), (50, 1.30)),
        ("Block",),
    ),
    "bert": Case("transformers:bert", 8, (), ("BertLayer",), seq=128),
}
WAYS = ("every block", "every second block", "sqrt segments", "selective")
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}


def build(case: Case, device: str = "cpu") -> tuple[torch.nn.Module, Any, Step, gs.Plan]:
    """The model, its batch, its training step, and the plan that stores everything (captured and priced)."""
    target = build_target(case.target, case.batch, attn=case.attn, seq=case.seq)
    model, batch = target.model.to(device), _to(target.batch, device)
    step = make_step(model, batch, target.loss, None, None, keep_output=False)
    return model, batch, step, plan_step(model, step, Wanted())


def checkpointed(model: torch.nn.Module, case: Case, way: str) -> None:
    """Put torch.utils.checkpoint around the model's blocks, as people do by hand."""
    blocks = [m for m in model.modules() if type(m).__name__ in case.blocks]
    if way == "sqrt segments":
        size = math.ceil(len(blocks) / math.isqrt(len(blocks)))
        for start in range(0, len(blocks), size):
            _one_segment(blocks[start : start + size])
        return
    options = {"context_fn": partial(create_selective_checkpoint_contexts, save_products)} if way == "selective" else {}
    for block in blocks[:: 2 if way == "every second block" else 1]:
        # DenseNet's own way: a plain checkpoint fails, since the list of features that it is given grows
        if hasattr(block, "memory_efficient") and way != "selective":
            block.memory_efficient = True
            continue
        block.forward = _wrapped(block.forward, options)  # type: ignore[method-assign]


def save_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _wrapped(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _one_segment(blocks: list[torch.nn.Module]) -> None:
    """The first block runs them all under one checkpoint, the others hand their input on."""
    forwards = [block.forward for block in blocks]

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            x = forward(x, *args, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return x

    blocks[0].forward = _wrapped(run, {})  # type: ignore[method-assign]
    for block in blocks[1:]:
        block.forward = lambda x, *args, **kwargs: x  # type: ignore[method-assign]


def _to(item: Any, device: str) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {k: _to(v, device) for k, v in item.items()}
    return type(item)(_to(v, device) for v in item)
