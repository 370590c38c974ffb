"""Graphs of the shapes that networks have: towers, residual chains, and skips across a U."""

from __future__ import annotations

from gradstow.ir import StepGraph
from graphs import MIB, Sketch, step


def tower(length: int = 8, size: int = MIB) -> StepGraph:
    """x → f1 → … → fn without weights: the backward of each reads its input and makes one gradient, x's at the end."""
    s = Sketch()
    x = s.resident(size, "x")
    acts = [x]
    for i in range(length):
        acts += s.op(f"f{i + 1}", (acts[-1],), (size,))
    grad = s.tangent(size, "t")
    for i in reversed(range(length)):
        (grad,) = s.op(f"b{i + 1}", (grad, acts[i]), (size,), backward=True)
    return step(s.done(acts[-1:], {x: grad}))


def residual(length: int = 3, size: int = MIB) -> StepGraph:
    """x → a1 = x + f1(x) → a2 = a1 + f2(a1) → …; gradients add up the same way."""
    s = Sketch()
    x = s.resident(size, "x")
    weights = [s.resident(size, f"w{i + 1}") for i in range(length)]
    sums = [x]
    for i, w in enumerate(weights):
        (f,) = s.op(f"f{i + 1}", (sums[-1], w), (size,))
        sums += s.op(f"a{i + 1}", (sums[-1], f), (size,))
    grad = s.tangent(size, "t")
    gradients: dict[int, int] = {}
    for i in reversed(range(length)):
        sizes = (size, size) if i else (size,)
        *rest, gradients[weights[i]] = s.op(f"b{i + 1}", (grad, sums[i], weights[i]), sizes, backward=True)
        if rest:
            (grad,) = s.op(f"s{i + 1}", (grad, rest[0]), (size,), backward=True)
    return step(s.done(sums[-1:], gradients))


def skip(size: int = MIB) -> StepGraph:
    """x → f1 → f2 → f3 → f4, which reads f1 as well, as the two arms of a U do."""
    s = Sketch()
    x = s.resident(size, "x")
    w1, w2, w3, w4 = (s.resident(size, f"w{i + 1}") for i in range(4))
    (f1,) = s.op("f1", (x, w1), (4 * size,))
    (f2,) = s.op("f2", (f1, w2), (size,))
    (f3,) = s.op("f3", (f2, w3), (size,))
    (f4,) = s.op("f4", (f3, f1, w4), (size,))
    t = s.tangent(size, "t")
    b4, across, g4 = s.op("b4", (t, f3, f1, w4), (size, 4 * size, size), backward=True)
    b3, g3 = s.op("b3", (b4, f2, w3), (size, size), backward=True)
    b2, g2 = s.op("b2", (b3, f1, w2), (4 * size, size), backward=True)
    (join,) = s.op("join", (b2, across), (4 * size,), backward=True)
    (g1,) = s.op("b1", (join, x, w1), (size,), backward=True)
    return step(s.done((f4,), {w1: g1, w2: g2, w3: g3, w4: g4}))
