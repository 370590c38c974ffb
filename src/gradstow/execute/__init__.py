"""Plan → code that runs inside the user's own training step."""

from gradstow.execute._executor import Executor, inner_error
from gradstow.execute._sources import Excess, OverPlanned, Planned, Recorded, UnknownGraph, graph_alone

__all__ = ["Excess", "Executor", "OverPlanned", "Planned", "Recorded", "UnknownGraph", "graph_alone", "inner_error"]
