"""Where something was measured: machine, versions, date."""

from __future__ import annotations

from typing import Any

VERSIONS = ("device", "machine", "threads", "torch", "gradstow", "python", "date")


def versions(device: str = "cpu") -> dict[str, Any]:
    """What every row of results says about where it was measured, by the names in ``VERSIONS``."""
    import datetime
    import os
    import platform

    import torch

    import gradstow

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "gradstow": gradstow.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
