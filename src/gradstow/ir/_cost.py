"""Seconds and working memory of every op, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradstow.ir._graph import Op


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one call.

    Attributes:
        seconds: wall time of the call, the least of a few runs (what else runs on the machine only adds).
        working_bytes: peak of the allocator while it runs, less its outputs.
        how: "measured", "extrapolated" (measured smaller, scaled up), or "unknown".
        transfer: seconds until what it makes is there, beside what else runs meanwhile; 0 for ops that compute.
    """

    seconds: float
    working_bytes: int = 0
    how: str = "measured"
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs by op signature. ``device`` and ``threads`` say where they hold."""

    costs: Mapping[str, OpCost] = field(default_factory=dict)
    device: str = ""
    threads: int = 0

    def run(self, op: Op) -> OpCost:
        """Cost of running the op as captured; views are free."""
        return _FREE if op.view else self.costs[op.signature]

    def plain(self, op: Op) -> OpCost:
        """The price of the op as plain PyTorch runs it."""
        return self.run(op) if op.plain is None else self.costs[op.plain.signature]

    def rerun(self, op: Op) -> OpCost:
        """Cost of running the op again in the backward."""
        return self.run(op) if op.rerun is None else self.costs[op.rerun.signature]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "threads": self.threads,
            "costs": {
                key: [c.seconds, c.working_bytes, c.how] + ([c.transfer] if c.transfer else [])
                for key, c in self.costs.items()
            },
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CostTable:
        costs = {key: OpCost(float(s), int(w), str(h), *more) for key, (s, w, h, *more) in data["costs"].items()}
        return CostTable(costs, data["device"], data["threads"])


_FREE = OpCost(0.0, 0, "measured")
