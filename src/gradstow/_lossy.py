"""Operators that keep floats in fewer bytes, with an error that has a bound. Used only where the user asks for it.

``gradstow::encode_lossy`` turns a dense tensor into bytes, in the order of its memory; ``gradstow::decode_lossy`` makes
a tensor of them. Numbers are treated in groups of 128 neighbours:

- ``int8``, ``int4``, ``int2``: the range of a group's finite numbers is cut into 255, 15 or 3 equal steps, and a number
  is rounded up or down at random so that it is right on average; the lowest comes back exactly. A group keeps half of
  its lowest number and half of its step (float32; for float64 tensors float64). Where a group holds inf or NaN its
  step is negative, and the three highest codes stand for -inf, inf and NaN: the others get fewer steps.
- ``fp8``: 8-bit floats with 5 bits of exponent, each group scaled by a power of two; rounded to nearest.
- ``bf16``: rounded to nearest, finite numbers stay finite.

The random numbers come from a generator of our own, so that the user's random streams stay where they are. One draw of
64 groups is used for all groups of a tensor: each number is right on average, and drawing takes no time.

Working memory: some MiB, whatever the tensor's size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradstow._codes import CODES, GROUP, Code

_ROWS = 2048  # groups that are worked on at a time
_DRAWN = 64  # groups that a draw of random numbers is for
_TINY = {torch.float32: 1e-38, torch.float64: 1e-300}  # smaller steps are none: 1 / step must not overflow

_LIBRARY = torch.library.Library("gradstow", "FRAGMENT")
_LIBRARY.define("encode_lossy(Tensor x, str code) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("decode_lossy(Tensor data, str code, int[] size, int[] stride, ScalarType dtype) -> Tensor")


def code_nbytes(name: str, numel: int, dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in this code."""
    code, groups = CODES[name], -(-numel // GROUP)
    return groups * (GROUP * code.bits // 8 + code.statistics * _of_statistics(dtype).itemsize)


def seed(number: int) -> None:
    """Start the random numbers of lossy codes anew, on every device. A new process starts with seed 0."""
    _seeded.update(number=number)
    _generators.clear()


_seeded = {"number": 0}
_generators: dict[torch.device, torch.Generator] = {}


def _draw(device: torch.device, rows: int) -> torch.Tensor:
    """Numbers from 0 up to 1 for so many groups."""
    if device not in _generators:
        _generators[device] = torch.Generator(device).manual_seed(_seeded["number"])
    drawn = torch.rand((min(rows, _DRAWN), GROUP), generator=_generators[device], device=device)
    return drawn.repeat(-(-rows // len(drawn)), 1)[:rows]


def _of_statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _encode(x: torch.Tensor, name: str) -> torch.Tensor:
    code, numel, wide = CODES[name], x.numel(), _of_statistics(x.dtype)
    data = torch.empty(code_nbytes(name, numel, x.dtype), dtype=torch.uint8, device=x.device)
    flat, rows = x.as_strided((numel,), (1,)), -(-numel // GROUP)
    packed, statistics = _parts(data, code, rows, wide)
    noise = _draw(x.device, min(rows, _ROWS)) if code.of_range and rows else x.new_empty(0)
    for first in range(0, rows, _ROWS):
        part = slice(first, min(first + _ROWS, rows))
        block = _block(flat[first * GROUP : part.stop * GROUP]).to(wide)
        if code.of_range:
            _cut_range(block, code, noise[: len(block)], packed[part], statistics[part])
        elif code.statistics:
            _to_fp8(block, torch.finfo(x.dtype).max, packed[part], statistics[part])
        else:
            packed[part].view(torch.bfloat16).copy_(_to_bf16(block))
    return data


def _parts(data: torch.Tensor, code: Code, rows: int, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers' bytes and the statistics, a row for each group."""
    size = rows * GROUP * code.bits // 8
    statistics = data[size:].view(wide).view(rows, code.statistics)
    return data[:size].view(rows, GROUP * code.bits // 8), statistics


def _block(numbers: torch.Tensor) -> torch.Tensor:
    """Rows of whole groups; the last one is filled up with its own last number."""
    missing = -len(numbers) % GROUP
    if missing:
        numbers = torch.cat([numbers, numbers[-1:].expand(missing)])
    return numbers.view(-1, GROUP)


def _cut_range(
    block: torch.Tensor, code: Code, noise: torch.Tensor, packed: torch.Tensor, statistics: torch.Tensor
) -> None:
    low, high = torch.aminmax(block, dim=1, keepdim=True)
    step = high / code.levels - low / code.levels  # the range itself could overflow
    numbers = _rounded(block, low, step, code.levels, noise)
    special = (~step.isfinite()).view(-1)
    if special.any():
        odd = special.nonzero().view(-1)
        numbers[odd], low[odd], step[odd] = _with_special(block[odd], code, noise[odd])
    statistics[:, :1], statistics[:, 1:] = low / 2, step / 2
    _pack(numbers.to(torch.uint8), code.bits, packed)


def _rounded(
    block: torch.Tensor, low: torch.Tensor, step: torch.Tensor, levels: int, noise: torch.Tensor
) -> torch.Tensor:
    """Numbers from 0 to ``levels``; the lowest is 0 whatever the noise."""
    per_step = torch.where(step > _TINY[step.dtype], 1 / step, 0)
    above = torch.sub(block, low)
    if not above.isfinite().all():  # a range that is wider than the type
        return torch.addcmul(noise.to(block.dtype), block / 2 - low / 2, 2 * per_step).floor_().clamp_(0, levels)
    return torch.addcmul(noise.to(block.dtype), above, per_step).floor_().clamp_(0, levels)


def _with_special(
    block: torch.Tensor, code: Code, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups that hold inf or NaN: numbers, lowest ones, and negative steps."""
    finite, levels = block.isfinite(), code.levels - 3
    infinity = float("inf")
    low = torch.where(finite, block, infinity).amin(1, keepdim=True)
    high = torch.where(finite, block, -infinity).amax(1, keepdim=True)
    none = ~finite.any(1, keepdim=True)
    low, high = low.masked_fill(none, 0), high.masked_fill(none, 0)
    step = high / levels - low / levels if levels else torch.zeros_like(low)
    low = low if levels else low / 2 + high / 2  # a single number for all
    numbers = _rounded(torch.where(finite, block, low), low, step, levels, noise)
    for number, places in ((2, block == -infinity), (1, block == infinity), (0, block.isnan())):
        numbers.masked_fill_(places, code.levels - number)
    return numbers, low, -step


def _to_fp8(block: torch.Tensor, largest: float, packed: torch.Tensor, statistics: torch.Tensor) -> None:
    """Scaled so that the highest finite number of a group comes near to the type's own highest, 57344.

    ``largest``: the highest of the tensor's type, over which nothing may be rounded.
    """
    finite = block.isfinite()
    high = torch.where(finite, block, 0).abs().amax(1, keepdim=True)
    exponent = torch.frexp(high).exponent
    scale = torch.ldexp(torch.ones_like(high), (exponent - 15).clamp(min=-100))
    scaled = block / scale
    limit = torch.where(32768.0 * scale.double() > largest, 28672.0, float("inf"))  # the next number below 32768
    scaled = torch.where(finite, torch.copysign(torch.minimum(scaled.abs(), limit.to(scaled.dtype)), scaled), scaled)
    statistics.copy_(scale)
    packed.view(torch.float8_e5m2).copy_(scaled.to(torch.float32).to(torch.float8_e5m2))


def _to_bf16(block: torch.Tensor) -> torch.Tensor:
    short = block.to(torch.bfloat16)
    lost = short.isinf() & block.isfinite()
    largest = torch.finfo(torch.bfloat16).max
    return torch.where(lost, torch.copysign(torch.full_like(short, largest), short), short) if lost.any() else short


def _pack(numbers: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    if bits == 8:
        packed.copy_(numbers)
    elif bits == 4:  # a pair is read as one 16-bit number, whose low byte then gets both
        pairs = numbers.view(torch.int16)
        packed.copy_(pairs.bitwise_or(pairs.bitwise_right_shift(4)).bitwise_and_(0xFF))
    else:
        fours = numbers.view(torch.int32)
        halves = fours.bitwise_or(fours.bitwise_right_shift(6))
        packed.copy_(halves.bitwise_or(halves.bitwise_right_shift(12)).bitwise_and_(0xFF))


@functools.cache
def _spread(bits: int, device: torch.device) -> torch.Tensor:
    """For each byte the numbers in it, as float32."""
    numbers = torch.arange(256).unsqueeze(1)
    return ((numbers >> torch.arange(0, 8, bits)) & ((1 << bits) - 1)).float().to(device)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of each group."""
    if bits == 8:
        return packed.to(torch.float32)
    table = _spread(bits, packed.device)
    if bits == 4:  # a pair of float32 is looked up as one 64-bit number
        pairs = table.view(torch.int64).view(-1).index_select(0, packed.reshape(-1).int())
        return pairs.view(torch.float32).view(len(packed), GROUP)
    return table.index_select(0, packed.reshape(-1).int()).view(len(packed), GROUP)


def _decode(data: torch.Tensor, name: str, size: list[int], stride: list[int], dtype: torch.dtype) -> torch.Tensor:
    code, wide = CODES[name], _of_statistics(dtype)
    result = torch.empty_strided(size, stride, dtype=dtype, device=data.device)
    numel = result.numel()
    if data.numel() != code_nbytes(name, numel, dtype):
        raise ValueError(f"{data.numel()} bytes of {name} do not fit {numel} elements of {dtype}")
    flat, rows = result.as_strided((numel,), (1,)), -(-numel // GROUP)
    packed, statistics = _parts(data, code, rows, wide)
    for first in range(0, rows, _ROWS):
        part = slice(first, min(first + _ROWS, rows))
        target = flat[first * GROUP : part.stop * GROUP]
        if code.of_range:
            numbers = _from_range(packed[part], code, statistics[part])
        elif code.statistics:
            numbers = packed[part].view(torch.float8_e5m2).to(wide) * statistics[part]
        else:
            numbers = packed[part].view(torch.bfloat16)
        target.copy_(numbers.reshape(-1)[: len(target)])
    return result


def _from_range(packed: torch.Tensor, code: Code, statistics: torch.Tensor) -> torch.Tensor:
    half_low, half_step = statistics[:, :1], statistics[:, 1:]
    numbers = _unpack(packed, code.bits).to(statistics.dtype)
    block = torch.addcmul(half_low, numbers, half_step.abs()).mul_(2)  # by halves: a range may be wider than the type
    if block.dtype == torch.float64:  # nothing is wider to round in: the ends may come out one step beyond
        block.clamp_(-torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)
    if half_step.signbit().any():
        special = half_step.signbit()
        for number, value in ((2, -float("inf")), (1, float("inf")), (0, float("nan"))):
            block.masked_fill_(special & (numbers == code.levels - number), value)
    return block


_LIBRARY.impl("encode_lossy", _encode, "CompositeExplicitAutograd")
_LIBRARY.impl("decode_lossy", _decode, "CompositeExplicitAutograd")


def _encoded_shape(x: torch.Tensor, name: str) -> torch.Tensor:
    return x.new_empty(code_nbytes(name, x.numel(), x.dtype), dtype=torch.uint8)


def _decoded_shape(data: torch.Tensor, _name: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=data.device)


torch.library.register_fake("gradstow::encode_lossy", _encoded_shape, lib=_LIBRARY)
torch.library.register_fake("gradstow::decode_lossy", _decoded_shape, lib=_LIBRARY)
encode_lossy = torch.ops.gradstow.encode_lossy.default
decode_lossy = torch.ops.gradstow.decode_lossy.default
