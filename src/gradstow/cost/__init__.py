"""What every op costs: seconds and working memory, measured alone, cached on disk; peaks of a whole step.

Called with op signatures by whoever plans; knows nothing of graphs, plans or models.
"""

from gradstow.cost._analytic import Profile, analytic_costs, find_profile
from gradstow.cost._cache import cache_folder, cost_key, measured_costs, write_whole
from gradstow.cost._kernels import kernel_costs
from gradstow.cost._live import Memory, memory
from gradstow.cost._measure import measure, timing_limit
from gradstow.cost._memory import PeakMemory, measure_peak, paused
from gradstow.cost._saved import saved_by_modules
from gradstow.cost._transfers import bandwidth_of, transfer_costs

__all__ = [
    "Memory",
    "PeakMemory",
    "Profile",
    "analytic_costs",
    "bandwidth_of",
    "cache_folder",
    "cost_key",
    "find_profile",
    "kernel_costs",
    "measure",
    "measure_peak",
    "measured_costs",
    "memory",
    "paused",
    "saved_by_modules",
    "timing_limit",
    "transfer_costs",
    "write_whole",
]
