"""Convolution, batch norm with the batch's statistics, and activation as one node.

torch keeps three tensors per such block: the convolution's input and output, and the activation's output. With
``keep="input"`` only the first one is kept, and the second made again in the backward by the same kernel. With
``keep="output"`` the first and the last one are, which the layers before and behind keep anyway: activation and norm
are inverted, as in Rota Bulò, Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs"
(CVPR 2018). The norm's backward kernel reads its input through ``(z - mean) * invstd`` only, and
``(u - bias) / weight`` is the same number for the norm's output u: so that kernel is given u, with other statistics.
"""

from __future__ import annotations

from typing import Any

import torch

from gradstow import _ops
from gradstow._errors import GradstowError, PolicyError
from gradstow.layers.ops import _bits, _conv
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _epilogue as epilogue
from gradstow.layers.ops._again import differentiable_again
from gradstow.layers.ops._conv import Geometry
from gradstow.layers.ops._epilogue import Activation

aten = torch.ops.aten
LIMIT = 16.0  # |bias / weight| of a norm's channel beyond which its output does not give back its input


def conv_norm_act(
    x: torch.Tensor,
    geometry: Geometry | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | Activation | None = None,
    keep: str = "input",
    training: bool = True,
) -> torch.Tensor:
    """``activation(batch_norm(conv(x)))``; without the convolution where ``geometry`` is None. In training with the
    batch's own statistics, and the running ones are moved as by torch. For inputs with elements that need gradients.

    Shapes: ``x`` (N, C, ...) with the batch; parameters as in torch.

    Kept for the backward: ``keep="input"``: ``x`` and in training two numbers per channel; bit-equal to torch.
    ``keep="output"``, in training: the result, one number per channel, and ``x`` where the convolution's weight needs a
    gradient. That takes an invertible activation (none, or leaky_relu with a slope above 0) and a norm with
    ``|bias| <= 16 |weight|`` in every channel; otherwise, and while compiling, ``keep="input"`` is done. Its gradients'
    error is a small multiple of torch's own (at most 20 times in the tests): bits of the normalised value are lost.

    Raises:
        PolicyError: for another ``keep``.
        ValueError: for one value per channel in training, as in torch.
        GradstowError: for a double backward through ``keep="output"`` where ``x`` is not kept.
    """
    if keep not in ("input", "output"):
        raise PolicyError(f'keep={keep!r} does not exist. Take "input" or "output".')
    act = epilogue.activation_of(activation)
    dtype = None if geometry is None else conditions.compute_dtype(x)
    inverted = keep == "output" and training and _inverts(act, norm_weight, norm_bias)
    statistics = (running_mean, running_var, training, momentum, eps)
    x = conditions.cast(x, dtype)
    return _ConvNorm.apply(x, weight, bias, norm_weight, norm_bias, *statistics, geometry, act, dtype, inverted)


def _inverts(act: Activation | None, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether a block's output gives back what it normalised. Reads numbers: on CUDA it waits for them."""
    if _bits.is_traced() or not (act is None or (act.name == "leaky_relu" and act.a > 0)):
        return False
    if weight is None:
        return True
    size = weight.detach().abs()
    enough = size > 0 if bias is None else (size > 0) & (bias.detach().abs() <= LIMIT * size)
    return bool(enough.all())


class _ConvNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        geometry: Geometry | None,
        act: Activation | None,
        dtype: torch.dtype | None,
        inverted: bool,
    ) -> torch.Tensor:
        z = x
        if geometry is not None and weight is not None:
            z = _conv.run_convolution(x, weight, bias, geometry, dtype)
        if training:
            _check_several(z)
        # torch's own choice of kernels; cuDNN's backward wants the reserve (empty elsewhere) and the number again
        u, mean, invstd, reserve, ctx.kernel = torch._batch_norm_impl_index(
            z, norm_weight, norm_bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
        )
        y = epilogue.activate_(u, act)
        ctx.eps, ctx.training, ctx.inverted = eps, training, inverted
        ctx.geometry, ctx.act, ctx.dtype = geometry, act, dtype
        parameters = (weight, bias, norm_weight, norm_bias)  # by reference
        if inverted:
            keeps_x = geometry is not None and ctx.needs_input_grad[1]
            ctx.layout = None if keeps_x else (x.shape, torch.empty_like(x, device="meta").stride())
            ctx.save_for_backward(x if keeps_x else None, *parameters, invstd, y)
        else:
            running = (None, None) if training else (running_mean, running_var)
            # a forward in training may move them before the backward comes: torch's backward then reads the moved
            # ones, and its activation has what the norm gave before
            seen = [t.clone() if t is not None and act is not None else None for t in running]
            ctx.tracked = None if running_mean is None else running_mean.dtype
            ctx.save_for_backward(x, *parameters, mean, invstd, reserve, *running, *seen)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        with conditions.without_autocast(g):
            if torch.is_grad_enabled() and not _bits.is_traced():
                found = _again(ctx, g)
            elif ctx.inverted:
                found = _gradients_from_output(ctx, g)
            else:
                found = _gradients_from_input(ctx, g)
            return *found, *(None,) * 9


def _check_several(z: torch.Tensor) -> None:
    """torch's own error and words."""
    functional: Any = torch.nn.functional
    functional._verify_batch_size(z.size())


def _gradients_from_input(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, bias, norm_weight, norm_bias, mean, invstd, reserve, *both = ctx.saved_tensors
    running, seen = both[:2], both[2:]
    z = x
    if ctx.geometry is not None:
        z = _conv.run_convolution(x, weight, bias, ctx.geometry, ctx.dtype)
    if ctx.act is not None:
        u = _normalised(ctx, z, norm_weight, norm_bias, mean, invstd, *seen)
        g = epilogue.gradient_from_input(g, u, ctx.act)
        del u
    statistics = (norm_weight, *running, mean, invstd, ctx.training, ctx.eps, _norm_needs(ctx))
    if ctx.kernel == 0:
        g_z, g_weight, g_bias = aten.native_batch_norm_backward.default(g, z, *statistics)
    else:  # that of cuDNN or MIOpen
        g_z, g_weight, g_bias = aten._batch_norm_impl_index_backward.default(ctx.kernel, z, g, *statistics, reserve)
    del z, g
    return *_before_norm(ctx, g_z, x, weight), g_weight, g_bias


def _normalised(
    ctx: Any,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
) -> torch.Tensor:
    """The norm's output again, bit-equal: from the statistics where that is known to be, else as the first time."""
    if ctx.training and z.device.type == "cpu" and z.dtype in (torch.float32, torch.float64):
        return _ops.batch_norm_apply(z, weight, bias, mean, invstd)
    cudnn = torch.backends.cudnn.enabled
    running = (running_mean, running_var)
    if ctx.training and ctx.tracked is not None:  # their type decides how the kernel computes; these are thrown away
        running = (torch.zeros_like(mean, dtype=ctx.tracked), torch.ones_like(mean, dtype=ctx.tracked))
    return torch._batch_norm_impl_index(z, weight, bias, *running, ctx.training, 0.0, ctx.eps, cudnn)[0]


def _gradients_from_output(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, _, norm_weight, norm_bias, invstd, y = ctx.saved_tensors
    u = y
    if ctx.act is not None:
        g = epilogue.gradient_from_output(g, y, ctx.act)
        u = aten.leaky_relu.default(y, 1.0 / ctx.act.a)
    if norm_weight is None:
        mean, scale, factor = torch.zeros_like(invstd), torch.ones_like(invstd), invstd
    else:
        # (u - bias) / weight is the normalised value; the kernel multiplies by scale * factor = weight * invstd
        wide = norm_weight.to(invstd.dtype)
        mean = torch.zeros_like(wide) if norm_bias is None else norm_bias.to(invstd.dtype)
        scale, factor = wide.reciprocal(), wide.square() * invstd
    g_z, g_weight, g_bias = aten.native_batch_norm_backward.default(
        g, u, factor, None, None, mean, scale, True, ctx.eps, _norm_needs(ctx)
    )
    del u, g
    return *_before_norm(ctx, g_z, x, weight), g_weight, g_bias


def _norm_needs(ctx: Any) -> list[bool]:
    needed = ctx.needs_input_grad
    return [any(needed[:3]), needed[3], needed[4]]


def _before_norm(
    ctx: Any, g: torch.Tensor | None, x: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients for input, weight and bias from the one for the norm's input."""
    needed = ctx.needs_input_grad[:3]
    if g is None or ctx.geometry is None or weight is None:
        return g, None, None
    if x is None:
        x = g.new_empty_strided(*ctx.layout)  # not read: without the weight's gradient only its sizes are
    return _conv.convolution_gradients(g, x, weight, ctx.geometry, ctx.dtype, needed)


def _again(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients, differentiable."""
    x, *parameters = ctx.saved_tensors[:5]
    if x is None:
        raise GradstowError(
            'keep="output" does not keep the input of a norm alone or of a frozen convolution, which a double backward '
            '(create_graph=True) needs. Set keep="input" on this block.'
        )
    inputs = (x, *parameters)
    running = (None, None) if ctx.training else ctx.saved_tensors[8:10]
    return differentiable_again(_original(ctx, *running), inputs, ctx.needs_input_grad[:5], g)


def _original(ctx: Any, mean: torch.Tensor | None, var: torch.Tensor | None) -> Any:
    geometry, act, dtype, training, eps = ctx.geometry, ctx.act, ctx.dtype, ctx.training, ctx.eps

    def run(x: torch.Tensor, weight: Any, bias: Any, norm_weight: Any, norm_bias: Any) -> torch.Tensor:
        z = x if geometry is None else _conv.run_convolution(x, weight, bias, geometry, dtype)
        u = torch.nn.functional.batch_norm(z, mean, var, norm_weight, norm_bias, training, 0.0, eps)
        return epilogue.activate_(u, act)

    return run
