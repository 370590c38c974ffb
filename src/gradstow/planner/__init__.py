"""StepGraph × CostTable → Plan. One solver per file; everything that a solver returns is replayed."""

from gradstow.planner._frontier import frontier
from gradstow.planner._policies import POLICIES, Policy
from gradstow.planner._rules import ops_of_rules
from gradstow.planner._search import Effort
from gradstow.planner._solve import make_plan, optimizer_peak, plain_step_peak, smallest_peak, store_all_peak

__all__ = [
    "POLICIES",
    "Effort",
    "Policy",
    "frontier",
    "make_plan",
    "ops_of_rules",
    "optimizer_peak",
    "plain_step_peak",
    "smallest_peak",
    "store_all_peak",
]
