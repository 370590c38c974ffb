"""A call of one op from its signature: with synthesised inputs to run it, or on meta to know its sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gradstow import _signature

_NOISE = 1 << 16


class Undecodable(Exception):
    """The signature is no call that can be made here."""


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments, ready to run."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that a call reads and makes.

    Attributes:
        input_bytes: of all inputs; expanded dimensions cost nothing.
        outputs: (shape, bytes made for it) of every output; None where it depends on data.
        view: whether the outputs are new views on inputs, so that no element is touched.
    """

    input_bytes: int
    outputs: tuple[tuple[tuple[int, ...], int], ...] | None
    view: bool = False

    @property
    def total_bytes(self) -> int:
        return self.input_bytes + sum(nbytes for _, nbytes in self.outputs or ())

    def fits(self, limit_bytes: int) -> bool:
        """Whether running the call surely stays within the limit.

        Where the outputs are unknown (data-dependent: nonzero) they are at most 8 bytes for each of at
        most 8 dimensions for each element, which may be a byte.
        """
        if self.outputs is None:
            return self.input_bytes * 64 <= limit_bytes
        return self.total_bytes <= limit_bytes


def real_call(signature: str, device: torch.device) -> Call:
    """The call on inputs that hold noise in (0, 1), or zeros where integers may be indices.

    Raises:
        Undecodable: for "" or a call that this torch, or this device, does not have.
    """

    def make(shape: list[int], stride: list[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
        where = device if kind == device.type else torch.device(kind)
        flat = torch.empty(storage_items(shape, stride), dtype=dtype, device=where)
        _fill(flat)
        return flat.as_strided(shape, stride)

    return _decode(signature, make)


def meta_call(signature: str) -> Call:
    """The call on meta tensors, which have sizes and no memory.

    Raises:
        Undecodable: as ``real_call``.
    """

    def make(shape: list[int], stride: list[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    return _decode(json.dumps(_devices_to_meta(_load(signature))), make)


def sizes(signature: str) -> Sizes:
    """Bytes of the call's tensors, found without running it.

    Raises:
        Undecodable: as ``real_call``.
    """
    call = meta_call(signature)
    inputs = list(tensors_in([call.args, call.kwargs]))
    input_bytes = sum(tensor.untyped_storage().nbytes() for tensor in inputs)
    try:
        result = call.run()
    except Exception:  # any op may lack a meta kernel, and says so with any error
        return Sizes(input_bytes, None)
    given = [tensor.untyped_storage() for tensor in inputs]
    made: list[torch.UntypedStorage] = []
    outputs = []
    for out in tensors_in(result):
        storage = out.untyped_storage()
        known = any(storage is other for other in (*given, *made))
        outputs.append((tuple(out.shape), 0 if known else storage.nbytes()))
        if not known:
            made.append(storage)
    returned = any(out is tensor for out in tensors_in(result) for tensor in inputs)
    return Sizes(input_bytes, tuple(outputs), view=bool(outputs) and not made and not returned)


def tensors_in(item: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from tensors_in(part)
    elif isinstance(item, dict):
        yield from tensors_in(list(item.values()))


def storage_items(shape: list[int], stride: list[int]) -> int:
    """Elements that a tensor of this layout really occupies; expanded dimensions cost nothing."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def forget_noise() -> None:
    """Give the memory of the noise back."""
    _noise.cache_clear()


def _decode(signature: str, make: Any) -> Call:
    _load(signature)
    try:
        function, args, kwargs = _signature.decode(signature, make)
    except Exception as error:  # no such op, no such dtype, no such device, no memory for the inputs
        raise Undecodable(f"{type(error).__name__}: {error}") from error
    return Call(function, args, kwargs)


def _load(signature: str) -> Any:
    try:
        return json.loads(signature)
    except ValueError as error:
        raise Undecodable(f"the signature {signature[:60]!r} is no JSON") from error


def _devices_to_meta(item: Any) -> Any:
    if isinstance(item, list):
        return [_devices_to_meta(part) for part in item]
    if not isinstance(item, dict):
        return item
    if item.get("torch", [""])[0] == "device":
        return {"torch": ["device", "meta"]}
    return {key: _devices_to_meta(part) for key, part in item.items()}


def _fill(flat: torch.Tensor) -> None:
    """Noise by doubling: a copy runs at memory speed, a generator does not."""
    if not (flat.is_floating_point() or flat.is_complex() or flat.dtype is torch.bool):
        flat.zero_()
        return
    done = min(_NOISE, flat.numel())
    flat[:done].copy_(_noise(flat.dtype, flat.device)[:done])
    while done < flat.numel():
        more = min(done, flat.numel() - done)
        flat[done : done + more].copy_(flat[:more])
        done += more


@lru_cache(maxsize=16)
def _noise(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Noise from a generator of its own, so that the global one is left alone."""
    values = torch.rand(_NOISE, generator=torch.Generator().manual_seed(0), device="cpu")
    values = values * 0.98 + 0.01
    return (values > 0.5 if dtype is torch.bool else values.to(dtype)).to(device)
