"""The report as one JSON document: the numbers at the top, then every row, then what travels."""

from __future__ import annotations

from typing import Any

from gradstow.ir import PlanData
from gradstow.report._rows import plan_rows
from gradstow.report._summary import summarize


def plan_json(plan: PlanData) -> dict[str, Any]:
    """What ``plan_text`` shows, and the rows that it leaves out, for ``json.dumps``."""
    rows = plan_rows(plan)
    return {
        **summarize(plan, rows).to_json(),
        "rows": [row.to_json() for row in rows],
        "transfers": transfers(plan),
    }


def transfers(plan: PlanData) -> list[dict[str, Any]]:
    """What goes elsewhere and comes back, in seconds from the start of the step, beside the ops."""
    found = []
    for t in plan.timeline.transfers:
        region = plan.graph.regions[t.region]
        op = region.ops[t.op]
        value = region.values[op.outputs[0] if t.back else op.inputs[0]]
        nbytes = region.storages[value.storage].nbytes
        found.append({"value": value.name, "bytes": nbytes, "back": t.back, "start": t.start, "end": t.end})
    return found
