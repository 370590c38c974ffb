"""A plan, and what was measured, as rows, numbers, text, JSON and a picture: data first."""

from gradstow.report._frontier import FrontierRow, frontier_json, frontier_picture, frontier_rows, frontier_text
from gradstow.report._json import plan_json
from gradstow.report._page import profile_page
from gradstow.report._picture import Curve, memory_picture
from gradstow.report._profile import Measured, profile_json, saved_by_module
from gradstow.report._profile_text import profile_text
from gradstow.report._rows import Row, plan_rows
from gradstow.report._snapshot import Held, Snapshot, Story
from gradstow.report._summary import Summary, summarize
from gradstow.report._text import plan_text
from gradstow.report._trace import trace_json

__all__ = [
    "Curve",
    "FrontierRow",
    "Held",
    "Measured",
    "Row",
    "Snapshot",
    "Story",
    "Summary",
    "frontier_json",
    "frontier_picture",
    "frontier_rows",
    "frontier_text",
    "memory_picture",
    "plan_json",
    "plan_rows",
    "plan_text",
    "profile_json",
    "profile_page",
    "profile_text",
    "saved_by_module",
    "summarize",
    "trace_json",
]
