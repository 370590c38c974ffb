"""Sequences in which convolution, batch norm and activation are one node each time they stand in a row."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self

import torch
from torch import nn

from gradstow._errors import PolicyError
from gradstow.layers._conv import padded
from gradstow.layers._pieces import Piece, dimensions, kind_of, piece_at, watched
from gradstow.layers.ops import _conditions as conditions
from gradstow.layers.ops import _epilogue as epilogue
from gradstow.layers.ops._conv import Geometry, convolution, resolve_padding
from gradstow.layers.ops._conv_norm import conv_norm_act
from gradstow.layers.ops._epilogue import Activation
from gradstow.layers.ops._fold import folded, pays
from gradstow.layers.ops._linear import linear


class FusedSequential(nn.Sequential):
    """``torch.nn.Sequential`` that runs conv[, norm][, activation], norm[, activation] and linear, activation as one
    node each, and every other child plainly.

    Children, their names and the ``state_dict`` are those of the Sequential: its ``__class__`` can be swapped.

    A child is taken into a node only where it would do nothing else: exactly torch's class or a lean one of gradstow
    (no SyncBatchNorm, no parametrization, no class of your own), without hooks, not compiled on its own.

    Kept for the backward, per convolution with norm and activation: ``keep="input"`` (default): the input and two
    numbers per channel, bit-equal to torch's gradients; the convolution runs once more in the backward.
    ``keep="output"``: input and output, where the activation is LeakyReLU (slope above 0) or none and the norm's
    ``|bias| <= 16 |weight|``; nothing runs again, gradients are not bit-equal, and the output must not be changed in
    place. Other blocks do ``keep="input"``, and so do all while compiling (``torch.compile``, ``gs.stow``).
    Per convolution or linear layer with activation: see ``Conv2d``.

    With a norm in eval mode its convolution takes it in (``fold``) where nothing needs gradients, or the norm's own
    parameters do not; folded anew each time, so that it cannot be stale. The error is at most twice torch's own. Where
    they do, the block keeps its input, bit-equal to torch.

    Args:
        keep: "input" or "output"; can be set later.
        saves: "output" or "mask", of activations right behind a convolution or linear layer; can be set later.

    Raises:
        PolicyError: for another ``keep`` or ``saves``.
        ValueError: in training, for one value per channel, as in torch.
    """

    keep: str = "input"
    saves: str = "output"
    fold: bool = True

    def __init__(self, *args: Any, keep: str = "input", saves: str = "output") -> None:
        super().__init__(*args)
        if keep not in ("input", "output") or saves not in ("output", "mask"):
            raise PolicyError(f'keep={keep!r} is "input" or "output", saves={saves!r} is "output" or "mask".')
        self.keep, self.saves = keep, saves

    def forward(self, input: Any) -> Any:
        for piece in self.pieces():
            input = self._run(piece, input)
        return input

    def pieces(self) -> list[Piece]:
        """What runs together, in order, as far as the children decide it (some inputs and modes run plainly)."""
        children = list(self._modules.values())
        kinds = [kind_of(child) for child in children]
        found: list[Piece] = []
        at = 0
        while at < len(children):
            found.append(piece_at(children, kinds, at))
            at = found[-1].end
        return found

    def _run(self, piece: Piece, x: Any) -> Any:
        children = list(self._modules.values())[piece.first : piece.end]
        if self.gains(piece) and isinstance(x, torch.Tensor) and not watched():
            conv, norm = piece.conv, piece.norm
            if piece.linear is not None:
                return linear(x, piece.linear.weight, piece.linear.bias, piece.act, self._saves(piece))
            if norm is None:
                return _conv_act(x, conv, piece.act, self._saves(piece))
            if _fits(x, conv, norm):
                by_batch = norm.training or (norm.running_mean is None and norm.running_var is None)
                if not by_batch and conv is not None and self.fold and _should_fold(x, conv, norm):
                    return _folded(x, conv, norm, piece.act, self._saves(piece))
                if conditions.lean_runs(x, *_parameters(conv, norm)) and x.numel():
                    return _normed(x, conv, norm, by_batch, piece.act, self.keep)
        for child in children:
            x = child(x)
        return x

    def gains(self, piece: Piece) -> bool:
        """Whether one node keeps less than its children would. A convolution or linear layer and the output of the
        ReLU behind it are all that torch keeps, too, and its two nodes give up a gradient sooner than one can."""
        if piece.end - piece.first < 2:
            return False
        relu = piece.norm is None and piece.act is not None and piece.act.name == "relu"
        return not (relu and self.saves == "output")

    def _saves(self, piece: Piece) -> str:
        """ "mask" only where one bit says enough; there always for what torch keeps the input of: what comes behind
        may write over the output."""
        if piece.act is None or not epilogue.has_bits(piece.act):
            return "output"
        return self.saves if piece.act.name == "relu" else "mask"


def _fits(x: torch.Tensor, conv: Any, norm: Any) -> bool:
    """Whether torch's norm would take this input; what it refuses runs plainly, for its words."""
    if conv is not None:
        return x.dim() == conv.weight.dim()
    return x.dim() in dimensions(norm) and x.size(1) == norm.num_features


def _conv_act(x: torch.Tensor, conv: Any, act: Activation | None, saves: str) -> torch.Tensor:
    x, padding = padded(conv, x)
    return convolution(x, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups, act, saves)


def _parameters(*modules: Any) -> list[torch.Tensor | None]:
    return [parameter for m in modules if m is not None for parameter in (m.weight, m.bias)]


def _normed(x: torch.Tensor, conv: Any, norm: Any, by_batch: bool, act: Activation | None, keep: str) -> torch.Tensor:
    """The bookkeeping is that of torch's batch norm."""
    factor = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    tracked = not norm.training or norm.track_running_stats
    mean, var = (norm.running_mean, norm.running_var) if tracked else (None, None)
    weight = bias = geometry = None
    if conv is not None:
        x, padding = padded(conv, x)
        x, padding = resolve_padding(x, conv.weight, padding, conv.dilation)
        weight, bias, geometry = conv.weight, conv.bias, Geometry(conv.stride, padding, conv.dilation, conv.groups)
    numbers = (norm.weight, norm.bias, mean, var, factor, norm.eps)
    return conv_norm_act(x, geometry, weight, bias, *numbers, act, keep, by_batch)


def _should_fold(x: torch.Tensor, conv: Any, norm: Any) -> bool:
    """With gradients where the norm is frozen; its own would be rounded more than torch's. Without where it pays."""
    if norm.running_mean is None or norm.running_var is None or x.layout != torch.strided:
        return False
    if not conditions.lean_runs(x, *_parameters(conv, norm)):
        return pays(x, conv.weight, conv.stride)
    return not any(p is not None and p.requires_grad for p in (norm.weight, norm.bias))


def _folded(x: torch.Tensor, conv: Any, norm: Any, act: Activation | None, saves: str) -> torch.Tensor:
    statistics = (norm.running_mean, norm.running_var)
    weight, bias = folded(conv.weight, conv.bias, *statistics, norm.weight, norm.bias, norm.eps)
    x, padding = padded(conv, x)
    return convolution(x, weight, bias, conv.stride, padding, conv.dilation, conv.groups, act, saves)


@functools.cache
def fused_kind(old: Any) -> Any:
    """A class that is ``old`` in all but its forward: its name, methods and attributes stay."""

    def reduce(self: nn.Module, _protocol: Any = None) -> tuple[Any, ...]:  # pickle finds no class that was made here
        return _blank, (old,), self.__dict__.copy()

    names = {"__module__": old.__module__, "__qualname__": old.__qualname__, "__reduce_ex__": reduce}
    return type(old.__name__, (FusedSequential, old), names)


def _blank(old: Any) -> Any:
    kind = fused_kind(old)
    return kind.__new__(kind)


class _Block(FusedSequential):
    """A fused sequence of a fixed kind."""

    parts: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def fuse(cls, *modules: nn.Module, keep: str = "input") -> Self:
        """A block of these modules, which become its children "0", "1", ...

        Raises:
            PolicyError: where they are not of this block's kind, or one of them has hooks.
        """
        block = cls(*modules, keep=keep)
        found = block.pieces()
        parts = [name for name, part in zip(("conv", "norm", "act"), found[0][2:4] + found[0][5:], strict=True) if part]
        if len(found) != 1 or tuple(parts) != cls.parts:
            given = ", ".join(type(m).__name__ for m in modules)
            raise PolicyError(
                f"{cls.__name__} does not take {given}: it joins {', '.join(cls.parts)} of fitting sizes, each exactly "
                "of torch's class and without hooks. FusedSequential takes any modules."
            )
        return block


class ConvBNReLU(_Block):
    """Convolution, batch norm and activation (ReLU or any other one known to ``Linear``) as one node.

    ``ConvBNReLU.fuse(conv, bn, relu)`` holds the modules as children "0", "1", "2"; a Sequential of such modules, as
    torchvision's ``Conv2dNormActivation``, becomes one by swapping its ``__class__``. See ``FusedSequential``.
    """

    parts = ("conv", "norm", "act")


class ConvBN(_Block):
    """Convolution and batch norm as one node: keeps the input and two numbers per channel. See ``FusedSequential``."""

    parts = ("conv", "norm")


class BNReLU(_Block):
    """Batch norm and activation as one node: keeps the input or the output (``keep``). See ``FusedSequential``."""

    parts = ("norm", "act")
