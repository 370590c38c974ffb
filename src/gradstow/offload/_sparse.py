"""Floats many of which are zero, as one bit for each and the others one after the other. Exact.

``gradstow::encode_sparse`` has room for nine sixteenths of the numbers, so that the code's size is known before any
value is. Numbers are encoded in the order of memory until the room is full. ``gradstow::spill_sparse`` writes what is
left, as it is, to a file (to host memory, from an accelerator) and returns a ticket for it: a tensor with fewer zeros
than expected costs time, not memory. Where no file can be written it stays in memory, and a warning says so.
``gradstow::decode_sparse`` makes the tensor again.

The code: how many numbers are encoded, less their count (eight bytes, eight unused); the bits; the numbers. Only what
has no bit set is a zero, so that -0.0 comes back as it was. A code of nothing but zero bytes stands for a tensor of
which every second number is there, because it is what the cost table times decoding with.
"""

from __future__ import annotations

import torch

from gradstow._errors import warn_user
from gradstow._ops import pack_bits, unpack_bits
from gradstow.offload import _ops
from gradstow.offload._transfer import flat

_HEAD = 16  # bytes
_CHUNK = 1 << 18  # numbers, a multiple of 8: bounds the working memory
_HALF = 0b01010101
_KINDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACES = {"cpu": "disk"}

_LIBRARY = torch.library.Library("gradstow", "FRAGMENT")
# the tag says what a random op's says, not to be run again: what a code is made of is only made again from the code
_LIBRARY.define("encode_sparse(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("spill_sparse(Tensor x, Tensor code) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("decode_sparse(Tensor code, Tensor ticket, int[] size, int[] stride, ScalarType dtype) -> Tensor")

_said = False


def sparse_nbytes(numel: int, itemsize: int) -> int:
    """Bytes of the code of so many numbers."""
    return _start(numel) + _room(numel) * itemsize


def _room(numel: int) -> int:
    return -(-numel * 9 // 16)  # half of a ReLU's output is zero, give or take


def _start(numel: int) -> int:
    """Where the numbers begin: aligned for any type."""
    return _HEAD + -(-numel // 128) * 16


def _parts(code: torch.Tensor, numel: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(how many are encoded less ``numel``, bits, numbers), as views."""
    if code.numel() != sparse_nbytes(numel, kind.itemsize):
        raise ValueError(f"{code.numel()} bytes are no sparse code of {numel} numbers of {kind.itemsize} bytes")
    start = _start(numel)
    return code[:8].view(torch.int64), code[_HEAD : _HEAD + -(-numel // 8)], code[start:].view(kind)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order of memory, as integers."""
    return flat(x).view(_KINDS[x.element_size()])


def _encode(x: torch.Tensor) -> torch.Tensor:
    numel, memory = x.numel(), _flat(x)
    code = torch.empty(sparse_nbytes(numel, x.element_size()), dtype=torch.uint8, device=x.device)
    head, bits, numbers = _parts(code, numel, memory.dtype)
    used = done = 0
    while done < numel:
        chunk = memory[done : done + _CHUNK]
        there = chunk != 0
        found = chunk.masked_select(there)
        if used + len(found) > len(numbers):
            break
        numbers[used : used + len(found)] = found
        packed = pack_bits(there).bitwise_xor_(_HALF)
        bits[done // 8 : done // 8 + len(packed)] = packed
        used, done = used + len(found), done + len(chunk)
    head.fill_(done - numel)
    return code


def _spill(x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    numel = x.numel()
    left = -int(code[:8].view(torch.int64))
    if not left:
        return torch.zeros(1, dtype=torch.int64)
    _say(1 - left / numel)
    return _ops.put_away(_flat(x)[numel - left :], _PLACES.get(x.device.type, "host"))


def _decode(
    code: torch.Tensor, ticket: torch.Tensor, size: list[int], stride: list[int], dtype: torch.dtype
) -> torch.Tensor:
    result = torch.empty_strided(size, stride, dtype=dtype, device=code.device)
    numel, memory = result.numel(), _flat(result)
    head, bits, numbers = _parts(code, numel, memory.dtype)
    end, used = numel + int(head), 0
    for start in range(0, end, _CHUNK):
        target = memory[start : min(start + _CHUNK, end)]
        mask = unpack_bits(bits[start // 8 : -(-(start + len(target)) // 8)] ^ _HALF, [len(target)], [1])
        count = int(mask.sum())
        target.zero_().masked_scatter_(mask, numbers[used : used + count])
        used += count
    if end < numel:
        _ops.take_back(ticket, memory[end:])
    return result


def _say(share: float) -> None:
    """Once: the user should know why a step takes longer."""
    global _said
    if not _said:
        _said = True
        warn_user(
            f"a ReLU's output holds fewer zeros than its code counts on: {100 * share:.0f} % of it fit, and the rest "
            "waits in a file or on the host, which takes time. Numbers stay exact and the budget holds. Plan without "
            "such codes: actions=('store', 'recompute')."
        )


@torch.library.register_fake("gradstow::encode_sparse", lib=_LIBRARY)
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(sparse_nbytes(x.numel(), x.element_size()), dtype=torch.uint8)


@torch.library.register_fake("gradstow::spill_sparse", lib=_LIBRARY)
def _(x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.register_fake("gradstow::decode_sparse", lib=_LIBRARY)
def _(code: torch.Tensor, ticket: torch.Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=code.device)


for _name, _function in (("encode_sparse", _encode), ("spill_sparse", _spill), ("decode_sparse", _decode)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
encode_sparse = torch.ops.gradstow.encode_sparse.default
spill_sparse = torch.ops.gradstow.spill_sparse.default
decode_sparse = torch.ops.gradstow.decode_sparse.default
