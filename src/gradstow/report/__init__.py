"""A plan, and what was measured, as rows, numbers, text, JSON and a picture: data first."""

from gradstow.report._frontier import FrontierRow, frontier_json, frontier_picture, frontier_rows, frontier_text
from gradstow.report._json import plan_json
from gradstow.report._picture import Curve, memory_picture
from gradstow.report._rows import Row, plan_rows
from gradstow.report._summary import Summary, summarize
from gradstow.report._text import plan_text

__all__ = [
    "Curve",
    "FrontierRow",
    "Row",
    "Summary",
    "frontier_json",
    "frontier_picture",
    "frontier_rows",
    "frontier_text",
    "memory_picture",
    "plan_json",
    "plan_rows",
    "plan_text",
    "summarize",
]
