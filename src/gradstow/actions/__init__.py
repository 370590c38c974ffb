"""What can be done with a value beside keeping it and making it again: one final class per file."""

from collections.abc import Iterable

from gradstow.actions._bits import Bits
from gradstow.actions._lossy import Codes, Lossy, code_for
from gradstow.actions._narrow import Narrow
from gradstow.actions._offer import Action, Decode, Offers
from gradstow.actions._pool import PoolSizes
from gradstow.actions._relu import ReluBits

# in this order: once pooling does not read its input any more, its ReLU may be alone to read it
LOSSLESS: tuple[Action, ...] = (PoolSizes(), ReluBits(), Narrow(), Bits())


def named(names: Iterable[str]) -> tuple[Action, ...]:
    """Actions by their names, as a plan holds them."""
    exact = {action.name: action for action in LOSSLESS}
    return tuple(exact.get(name) or Lossy.of(name) for name in names)


__all__ = ["LOSSLESS", "Action", "Codes", "Decode", "Lossy", "Offers", "code_for", "named"]
