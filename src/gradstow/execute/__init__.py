"""Plan → code that runs inside the user's own training step."""

from gradstow.execute._executor import Executor, inner_error
from gradstow.execute._sources import Planned, Recorded, UnknownGraph

__all__ = ["Executor", "Planned", "Recorded", "UnknownGraph", "inner_error"]
