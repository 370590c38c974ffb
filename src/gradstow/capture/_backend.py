"""The bridge to torch.compile: how AOTAutograd is called, in the rehearsal and in the real step alike."""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor

from gradstow._ops import keep_mask, masked_scale
from gradstow.capture._compiled import decompositions as compiled_decompositions
from gradstow.capture._layouts import real_layouts
from gradstow.capture._randomness import no_frozen_numbers

aten = torch.ops.aten

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[[list[Any]], Any]]


def exact_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``native_dropout`` on CPU with eager's own numbers: eager multiplies by ``bernoulli / (1 - p)``.

    The traced op would multiply by the mask and by a scale that is rounded otherwise (unequal at p = 0.15).
    The mask stays a bool, so that keeping it costs one byte per element.
    """
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:  # eager draws no random numbers here
        return x * 0.0, torch.zeros_like(x, dtype=torch.bool)
    mask = keep_mask(x, 1 - p)
    return masked_scale(x, mask, keep_scale(1 - p, x.dtype)), mask


def exact_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    keep = 1 / scale if scale else 0.0
    return masked_scale(grad, mask, keep_scale(keep, grad.dtype))


def keep_scale(keep: float, dtype: torch.dtype) -> float:
    """What eager's ``bernoulli_(keep).div_(keep)`` holds where the mask is set, in ``dtype``."""
    if keep == 0:
        return 0.0
    with on_real_tensors():
        return float(torch.ones((), dtype=dtype).div_(keep).item())


@contextlib.contextmanager
def on_real_tensors() -> Iterator[None]:
    """Out of the modes in which torch traces."""
    with (
        torch._subclasses.fake_tensor.unset_fake_temporarily(),
        torch.utils._python_dispatch._disable_current_modes(),
    ):
        yield


def aot(
    fw_compiler: Compiler, bw_compiler: Compiler, partition_fn: Callable[..., Any], device: str, codegen: str = "eager"
) -> Any:
    """A Dynamo backend around AOTAutograd; a graph without gradients runs as it is."""
    decompositions: dict[Any, Any] = {}
    if codegen == "inductor":
        decompositions = compiled_decompositions()
    elif device == "cpu":
        decompositions = {
            aten.native_dropout.default: exact_dropout,
            aten.native_dropout_backward.default: exact_dropout_backward,
        }
    backend = aot_autograd(
        fw_compiler=fw_compiler,
        bw_compiler=bw_compiler,
        inference_compiler=run_plainly,
        partition_fn=partition_fn,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )

    def trace(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # compiled code is looked at before it runs, its backward too
        whole: Any = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with eagers_kernels() if codegen == "eager" else whole:
            return backend(module, inputs)

    return trace


# What torch would trace by Python formulas of its own, which round otherwise than the kernels that eager runs.
_FORMULAS = ("upsample", "hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss")


@contextlib.contextmanager
def eagers_kernels() -> Iterator[None]:
    """Inside, ops are traced as the kernels that eager runs for them."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    taken: list[tuple[Any, Any, Any]] = []
    for name in dir(aten):
        if not name.lstrip("_").startswith(_FORMULAS):
            continue
        packet = getattr(aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            taken += [(op, key, op.py_kernels.pop(key)) for key in keys if key in op.py_kernels]
            op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, formula in taken:
            op.py_kernels[key] = formula
            op._dispatch_cache.clear()


def run_plainly(module: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """A graph without gradients: nothing to plan."""

    def call(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        return module.forward(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark ``call`` as taking one list that it empties, so that nobody else holds the arguments."""

    def run(args: list[Any]) -> Any:
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def call_module(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """What is compiled, in the rehearsal and in the real step: the module's call, hooks included."""
    return module._call_impl(*args, **kwargs)


def fresh_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A twin with a code object of its own, so that Dynamo's caches of two models never mix."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=function.__code__.co_name)
    twin = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_IGNORE = (
    "ignore_logging_functions"
    if hasattr(torch._dynamo.config, "ignore_logging_functions")
    else "ignore_logger_methods"  # its name until torch 2.12
)


def _logging_functions() -> set[Any]:
    """Every logging method, those that libraries add to ``logging.Logger`` (``warning_once``) included."""
    kinds = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = {f for name, f in vars(logging.Logger).items() if name.startswith(kinds) and callable(f)}
    return methods | {warnings.warn}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No messages about graph breaks, which the plan's report lists, and about errors that come to the user anyway."""
    before = {name: logging.getLogger(name).level for name in _LOUD}
    for name, level in _LOUD.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


_LOUD = {"torch._dynamo": logging.ERROR, "torch._subclasses.fake_tensor": logging.CRITICAL}


@contextlib.contextmanager
def _answering(told: bool) -> Iterator[None]:
    """What a model that asks whether it is being compiled hears. Some take another way then than plain PyTorch does."""
    answers: Any = torch._dynamo.variables.torch.tracing_state_functions()
    asked = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling)
    before = {function: answers[function] for function in asked if function in answers}
    answers.update(dict.fromkeys(before, told))
    try:
        yield
    finally:
        answers.update(before)


@contextlib.contextmanager
def compile_settings(told: bool = False) -> Iterator[None]:
    """Dynamo's and AOTAutograd's settings while we compile or call compiled code.

    ``told``: a model that asks hears that it is being compiled.
    """
    dynamo = {
        "recompile_limit": 256,
        "accumulated_recompile_limit": 4096,
        "suppress_errors": False,
        "allow_rnn": True,  # graphs are cut around them
        "trace_numpy": False,  # traced NumPy would freeze its random numbers into constants
        # a warning in the model's forward must not cut the graph in two
        _IGNORE: _logging_functions() | set(getattr(torch._dynamo.config, _IGNORE)),
    }
    with (
        _quiet(),
        no_frozen_numbers(),
        _answering(told),
        real_layouts(),
        torch._dynamo.config.patch(**dynamo),
        inductor.patch(fallback_random=True),  # random ops that nobody reads move the stream, too
        # the backward runs outside of the user's autocast block, as PyTorch asks for; inside, it is refused
        torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False, backward_pass_autocast="off"),
    ):
        yield


def aten_names() -> frozenset[str]:
    """Names of all aten ops, without overloads: ``relu``, ``convolution``, ..."""
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return frozenset(name[1].split(".")[0] for name in names if name[0] == "aten")
