"""The report as one JSON document: the numbers at the top, then every row."""

from __future__ import annotations

from typing import Any

from gradstow.ir import PlanData
from gradstow.report._rows import plan_rows
from gradstow.report._summary import summarize


def plan_json(plan: PlanData) -> dict[str, Any]:
    """What ``plan_text`` shows, and the rows that it leaves out, for ``json.dumps``."""
    rows = plan_rows(plan)
    return {**summarize(plan, rows).to_json(), "rows": [row.to_json() for row in rows]}
