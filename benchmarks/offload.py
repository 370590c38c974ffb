"""What a disk adds: the same peak by recomputation, with a file, and with everything in the file.

    python benchmarks/offload.py                          # the 8-layer GPT at 65 MiB, ResNet-50 at 250 MiB
    python benchmarks/offload.py --place disk:/mnt/fast --rounds 9

Each plan is measured interleaved with plain PyTorch in one process, its losses and gradients compared bit for bit. Step
peaks in MiB; ratios are medians with a 95 % interval. Beside them the folder's bandwidth, how long transfers take, and
how much of that ops wait for: the rest is hidden behind them.
"""

from __future__ import annotations

import argparse

import gradstow as gs
from _cases import CASES, Case
from _measured import MIB, begun, measured
from _rows import VERSIONS, parse, versions, write
from gradstow._planning import plan_captured
from gradstow._units import Budget
from gradstow._wanted import Wanted
from gradstow.cost import bandwidth_of
from gradstow.planner import Policy

PEAKS = {"gpt8": 65, "resnet50": 250}
FIELDS = [
    "model", "batch", "budget_mib", "way", "plain_peak_mib", "predicted_peak_mib", "peak_mib", "predicted_ratio",
    "ratio", "ratio_low", "ratio_high", "rerun_ops", "compressed", "offloaded", "transfer_seconds", "wait_seconds",
    "step_seconds", "bandwidth", "equal", "rounds", *VERSIONS,
]  # fmt: skip


def main() -> None:
    parser = parse(__doc__, tuple(PEAKS), "offload.csv", rounds=7)
    parser.add_argument("--place", default="disk")
    arguments = parser.parse_args()
    for name in arguments.models:
        run(name, CASES[name], arguments)


def run(name: str, case: Case, arguments: argparse.Namespace) -> None:
    captured, proof, plain_peak = begun(case, arguments.device)
    budget = Budget(total_bytes=captured.graph().resident.total + PEAKS[name] * MIB)
    common = {"model": name, "batch": case.batch, "budget_mib": PEAKS[name], **versions(arguments.device)}
    common["plain_peak_mib"] = plain_peak
    ways = {
        "store and recompute": Wanted(budget, actions=("store", "recompute")),
        "and compress": Wanted(budget),
        "and offload": Wanted(budget, offload=arguments.place),
        "every saved value offloaded": Wanted(policy=Policy(rules=(("*", "offload"),)), offload=arguments.place),
    }
    for way, wanted in ways.items():
        plan = plan_captured(captured, wanted)
        assert isinstance(plan, gs.Plan)
        row = {
            **common,
            "way": way,
            **measured(proof, plan, arguments.rounds, arguments.device),
            "offloaded": sum(row.decision == "offload" for row in plan.rows),
            "transfer_seconds": sum(t.end - t.start for t in plan.timeline.transfers),
            "wait_seconds": plan.timeline.wait_seconds,
            "step_seconds": plan.plain_seconds,
            "bandwidth": str(bandwidth_of(arguments.place)),
        }
        write(arguments.out, FIELDS, row)


if __name__ == "__main__":
    main()
