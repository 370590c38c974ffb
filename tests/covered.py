"""How much of each package the tests reach, from ``coverage json``: fails under the limit, or where nothing is found.

Lines and branches are judged apart: ``coverage report --fail-under`` knows only their mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

LIMIT = 95.0
PACKAGES = ("src/gradstow/ir/", "src/gradstow/planner/", "src/gradstow/actions/")


def shares(report: Mapping[str, Any], package: str) -> dict[str, float]:
    """Percent of lines and of branches that ran in a package's files; 0 where it has none."""
    files = [file["summary"] for name, file in report["files"].items() if package in name.replace("\\", "/")]
    counted = {"lines": ("covered_lines", "num_statements"), "branches": ("covered_branches", "num_branches")}
    return {
        what: 100.0 * sum(f[ran] for f in files) / max(sum(f[there] for f in files), 1)
        for what, (ran, there) in counted.items()
    }


def too_low(report: Mapping[str, Any]) -> list[str]:
    """What is under the limit, in words."""
    return [
        f"{package}: {share:.1f} % of {what}, under {LIMIT:.0f} %"
        for package in PACKAGES
        for what, share in shares(report, package).items()
        if share < LIMIT
    ]


def main() -> int:
    report = json.load(sys.stdin)
    for package in PACKAGES:
        print(package, ", ".join(f"{share:.1f} % of {what}" for what, share in shares(report, package).items()))
    low = too_low(report)
    for line in low:
        print(f"coverage: {line}. See `coverage report -m`.", file=sys.stderr)
    return int(bool(low))


if __name__ == "__main__":
    sys.exit(main())
