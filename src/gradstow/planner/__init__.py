"""StepGraph × CostTable → Plan. One solver per file; everything that a solver returns is replayed."""

from gradstow.planner._policies import POLICIES, check_policy
from gradstow.planner._solve import make_plan, plain_step_peak

__all__ = ["POLICIES", "check_policy", "make_plan", "plain_step_peak"]
