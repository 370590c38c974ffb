"""What the rooms exchange. Plain data, no torch."""

from gradstow.ir._cost import CostTable, OpCost
from gradstow.ir._deliver import applying, delivered_storages, deliveries
from gradstow.ir._events import just_in_time, write_events
from gradstow.ir._graph import (
    GraphBreak,
    Op,
    PlainForm,
    Region,
    Rerun,
    Resident,
    StepGraph,
    Storage,
    StorageKind,
    Value,
)
from gradstow.ir._plan import PlanData
from gradstow.ir._replay import Life, Moment, Timeline, replay
from gradstow.ir._schedule import Deliver, Event, Free, RegionSchedule, Run, Schedule
from gradstow.ir._spec import SpecError, check_graph, check_schedule

__all__ = [
    "CostTable",
    "Deliver",
    "Event",
    "Free",
    "GraphBreak",
    "Life",
    "Moment",
    "Op",
    "OpCost",
    "PlainForm",
    "PlanData",
    "Region",
    "RegionSchedule",
    "Rerun",
    "Resident",
    "Run",
    "Schedule",
    "SpecError",
    "StepGraph",
    "Storage",
    "StorageKind",
    "Timeline",
    "Value",
    "applying",
    "check_graph",
    "check_schedule",
    "delivered_storages",
    "deliveries",
    "just_in_time",
    "replay",
    "write_events",
]
