"""The executable spec: two checks that walk the tables of rules for legal graphs and legal schedules.

For ourselves: what breaks a rule is a fault of capture or of a planner, never of the user.
"""

from __future__ import annotations

from gradstow.ir._graph import StepGraph
from gradstow.ir._graph_rules import GRAPH_RULES
from gradstow.ir._schedule import Schedule
from gradstow.ir._schedule_rules import SCHEDULE_RULES, broken_ids, follow


class SpecError(AssertionError):
    """A graph or a schedule breaks a rule.

    Attributes:
        rule: name of the rule.
        region: position of the region.
        offender: what breaks it, in words.
    """

    def __init__(self, rule: str, region: int, offender: str, says: str) -> None:
        super().__init__(f"region {region}: {offender} breaks the rule {rule!r}: {says}")
        self.rule, self.region, self.offender = rule, region, offender


def check_graph(graph: StepGraph) -> None:
    """Walk ``GRAPH_RULES`` for every region; costs are not looked at.

    Raises:
        SpecError: the first rule that is broken, where, and by what.
    """
    for name, rule in GRAPH_RULES.items():
        for r in range(len(graph.regions)):
            for offender in rule.broken(graph, r):
                raise SpecError(name, r, offender, rule.says)


def check_schedule(graph: StepGraph, schedule: Schedule) -> None:
    """Walk ``SCHEDULE_RULES`` for every region of a legal graph; bytes over time are ``replay``'s business.

    Raises:
        SpecError: the first rule that is broken, where, and by what.
    """
    regions, plans = len(graph.regions), len(schedule.regions)
    if regions != plans:
        raise SpecError("regions", min(regions, plans), f"{plans} region schedules", f"there are {regions} regions")
    for r, (region, plan) in enumerate(zip(graph.regions, schedule.regions, strict=True)):
        for offender in broken_ids(region, plan):
            raise SpecError("ids", r, offender, "ids are positions in the region's tables")
        followed = follow(region, plan, _held(graph, r))
        for name, rule in SCHEDULE_RULES.items():
            for offender in rule.broken(followed):
                raise SpecError(name, r, offender, rule.says)


def _held(graph: StepGraph, r: int) -> set[int]:
    """Storages of a region's outputs that the caller holds while the backward runs."""
    region = graph.regions[r]
    outputs = {region.values[v].storage for v in region.outputs if v >= 0}
    if region.held:
        return outputs
    later = {s.origin for other in graph.regions[r + 1 :] for s in other.storages}
    return {s for s in outputs if graph.outputs_held and (region.storages[s].origin or (r, s)) not in later}
