"""How each peer is put on a model, as people do by hand or by the library's own switch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from _cases import save_products
from peers._models import Model, WithLoss

Way = Callable[[WithLoss, Model], None]


class NotApplicable(Exception):
    """The model gives this way nothing to work with."""


class NotInstalled(Exception):
    """The package of this way cannot be imported."""


def nothing(_module: WithLoss, _spec: Model) -> None:
    """Plain eager."""


# ------------------------------------------------------------------------------------- torch.utils.checkpoint


def every_block(module: WithLoss, spec: Model, step: int = 1, **options: Any) -> None:
    for block in _blocks(module, spec)[::step]:
        block.forward = _checkpointed(block.forward, options)


def selective(module: WithLoss, spec: Model) -> None:
    """In every block, matrix products, convolutions and attention are kept."""
    every_block(module, spec, context_fn=partial(create_selective_checkpoint_contexts, save_products))


def sqrt_segments(module: WithLoss, spec: Model) -> None:
    """The first part of the chain runs all of it in sqrt(n) segments, the others hand their input on."""
    parts = _chain(module, spec)
    forwards = [part.forward for part in parts]

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = [partial(_one_tensor, forward, args, kwargs) for forward in forwards]
        return checkpoint_sequential(bound, math.isqrt(len(bound)), x, use_reentrant=False)

    parts[0].forward = run
    for part in parts[1:]:
        part.forward = lambda x, *args, **kwargs: x


def _one_tensor(forward: Callable[..., Any], args: Any, kwargs: Any, x: torch.Tensor) -> torch.Tensor:
    output = forward(x, *args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        kept = [list(a) if isinstance(a, list) else a for a in args]  # DenseNet's list grows afterwards
        return checkpoint(forward, *kept, use_reentrant=False, **options, **kwargs)

    return run


def _blocks(module: WithLoss, spec: Model) -> list[Any]:
    found = [m for m in module.model.modules() if type(m).__name__ in spec.blocks]
    if not found:
        raise NotApplicable(f"the model has no {' or '.join(spec.blocks)}")
    return found


def _chain(module: WithLoss, spec: Model) -> list[Any]:
    if spec.chain is None:
        raise NotApplicable("its blocks do not follow one another with one tensor between them")
    parts = _blocks(module, spec) if spec.chain == "" else list(_flat(module.model.get_submodule(spec.chain)))
    if math.isqrt(len(parts)) < 2:
        raise NotApplicable(f"a chain of {len(parts)} makes no segments")
    return parts


def _flat(part: nn.Module) -> Iterator[nn.Module]:
    """The parts of a Sequential, of Sequentials in it, too; classes of their own are one part."""
    for child in part.children():
        yield from _flat(child) if type(child) is nn.Sequential else (child,)


# --------------------------------------------------------------------------------------- switches of libraries


def own_switch(module: WithLoss, _spec: Model) -> None:
    """transformers' switch for checkpoints, torchvision's ``memory_efficient``."""
    model: Any = module.model
    if hasattr(model, "gradient_checkpointing_enable"):
        newest = getattr(model, "activation_checkpointing_enable", None)  # what the former is called since 5.40
        if newest is not None:
            newest({"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    switches: list[Any] = [m for m in model.modules() if hasattr(m, "memory_efficient")]
    if not switches:
        raise NotApplicable("its library has no switch for it")
    for part in switches:
        part.memory_efficient = True


# ------------------------------------------------------------------------------------------------- torch_remat


def remat(module: WithLoss, spec: Model) -> None:
    """A region per block that is computed again, all but what ``spec.keeps`` names."""
    library = _torch_remat()
    kept = itertools.count()
    for block in _blocks(module, spec):
        for part in block.modules():
            if type(part).__name__ in spec.keeps:
                part.forward = _kept(library, part.forward, f"kept {next(kept)}")
        block.forward = _region(library, block.forward)


def _torch_remat() -> Any:
    try:
        import torch_remat
    except ImportError as error:
        raise NotInstalled(str(error)) from error
    return torch_remat


def _region(library: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [list(a) if isinstance(a, list) else a for a in args]
        device = next((a.device for a in given if isinstance(a, torch.Tensor)), torch.device("cpu"))
        around = library.checkpoint(recompute_state_hooks=(_RandomNumbers(device),))
        shape: list[bool] = []  # which of several outputs are tensors: torch_remat takes no None

        def tensors(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not isinstance(output, tuple):
                return output
            shape[:] = [item is not None for item in output]
            return tuple(item for item in output if item is not None)

        output = around(tensors)(*given, **kwargs)
        if not shape:
            return output
        found = iter(output)
        return tuple(next(found) if there else None for there in shape)

    return run


def _kept(library: Any, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        output = library.region(forward, name, recompute=False)(*args, **kwargs)
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        library.recompute_needs_tensor(*(t for t in tensors if isinstance(t, torch.Tensor)))
        return output

    return run


class _RandomNumbers:
    """torch_remat leaves random numbers to its user."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def snapshot(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


# ----------------------------------------------------------------------------------------------- torch.compile


def compiled(module: WithLoss, spec: Model, budget: float = 1.0, solver: str = "dp", first: Way = nothing) -> None:
    """Model and loss, within a share of the activations that it would save by itself.

    The caches of graphs are off: their keys leave the solver out, and would give one solver the other's graph.
    """
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    first(module, spec)
    functorch.activation_memory_budget = budget
    functorch.activation_memory_budget_solver = solver
    functorch.enable_autograd_cache = False
    inductor.fx_graph_cache = False
    module.compile(dynamic=False)
