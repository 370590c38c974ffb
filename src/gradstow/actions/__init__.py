"""What can be done with a value beside keeping it and making it again: one final class per file."""

from collections.abc import Iterable, Mapping

from gradstow._codes import CODES, EXACT
from gradstow.actions._bits import Bits
from gradstow.actions._lossy import Lossy, code_for
from gradstow.actions._narrow import Narrow
from gradstow.actions._offer import LAYOUTS, Action, Decode, Offers, layouts
from gradstow.actions._offload import Offload
from gradstow.actions._pool import PoolSizes
from gradstow.actions._relu import ReluBits
from gradstow.actions._sparse import SPARSE_OPS, Sparse

# in this order: once pooling does not read its input any more, its ReLU may be alone to read it
LOSSLESS: tuple[Action, ...] = (PoolSizes(), ReluBits(), Narrow(), Bits())
Codes = Mapping[str, Mapping[str, frozenset[str]]]  # region's fingerprint → code or place → names of ops


def named(names: Iterable[str]) -> tuple[Action, ...]:
    """Actions by their names, as a plan holds them."""
    exact = {action.name: action for action in LOSSLESS}
    return tuple(exact.get(name) or _chosen(name) for name in names)


def _chosen(name: str) -> Action:
    code, _, ops = name.rpartition("@")
    return kept_as(code, frozenset(ops.split(",")))


def kept_as(code: str, ops: frozenset[str]) -> Action:
    """What keeps the results of some ops as a code, or in another place."""
    if code in EXACT:
        return Sparse(code, ops)
    return Lossy(code, ops) if code in CODES else Offload(code, ops)


__all__ = [
    "LAYOUTS",
    "LOSSLESS",
    "SPARSE_OPS",
    "Action",
    "Codes",
    "Decode",
    "Offers",
    "code_for",
    "kept_as",
    "layouts",
    "named",
]
