"""Costs of ops on disk, so that each is measured once per device, torch version and thread count."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradstow._errors import warn_user
from gradstow._signature import OPS_VERSION
from gradstow.cost._machine import device_name
from gradstow.cost._measure import fits, measure
from gradstow.ir import CostTable, OpCost

_FORMAT = 1
_MOST_ENTRIES = 20_000

_warned = False


def measured_costs(
    signatures: Iterable[str],
    device: str,
    limit_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> CostTable:
    """Costs of the ops: from the disk cache where it has them, measured and added to it where not.

    Arguments, units and errors are those of ``measure``. The cache is one JSON file per device name, torch
    version, thread count and numeric settings, in ``$GRADSTOW_CACHE_DIR`` or ``~/.cache/gradstow/costs``.
    One that cannot be read or written is left out, with one warning per process. Unknown costs are not
    kept; an extrapolated one is measured once a larger limit allows it.
    """
    unique = list(dict.fromkeys(signatures))
    key = cost_key(device)
    kept = _read(key)
    costs = {text: kept[name] for text in unique if (name := _digest(text)) in kept}
    stale = [t for t, cost in costs.items() if cost.how == "extrapolated" and fits(t, limit_bytes)]
    missing = [text for text in unique if text not in costs] + stale
    if not missing:
        return CostTable(costs, device_name(device), torch.get_num_threads())
    fresh = measure(missing, device=device, limit_bytes=limit_bytes, progress=progress)
    _add(key, {_digest(t): cost for t, cost in fresh.costs.items() if cost.how != "unknown"})
    found = {**costs, **fresh.costs}
    return CostTable({text: found[text] for text in unique}, fresh.device, fresh.threads)


def cost_key(device: str) -> dict[str, Any]:
    """All that costs hold for."""
    return {
        "format": _FORMAT,
        "device": device_name(device),
        "torch": torch.__version__,
        "ops": OPS_VERSION,
        "threads": torch.get_num_threads(),
        # These change which kernels run, and so both seconds and working memory.
        "settings": [
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.enabled,
        ],
    }


def _digest(signature: str) -> str:
    return hashlib.blake2b(signature.encode(), digest_size=16).hexdigest()


def _path(key: Mapping[str, Any]) -> Path:
    return cache_folder() / f"{_digest(json.dumps(key, sort_keys=True))}.json"


def cache_folder(kind: str = "") -> Path:
    """Where what was measured is kept for other processes, or a ``kind`` of other things beside it."""
    given = os.environ.get("GRADSTOW_CACHE_DIR")
    return Path(given, kind) if given else Path.home() / ".cache" / "gradstow" / (kind or "costs")


def _read(key: Mapping[str, Any]) -> dict[str, OpCost]:
    """Entries on disk, oldest first; none where there is no cache or it is damaged."""
    try:
        data = json.loads(_path(key).read_text())
        if data["key"] != key:
            raise ValueError("it belongs to another device or version")
        return {name: _entry(fields) for name, fields in data["costs"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        _warn("read", error)
        return {}


def _entry(fields: Any) -> OpCost:
    seconds, working, how = fields
    cost = OpCost(float(seconds), int(working), str(how))
    if not (math.isfinite(cost.seconds) and cost.seconds >= 0 and cost.working_bytes >= 0):
        raise ValueError(f"it holds the cost {fields!r}")
    if cost.how not in ("measured", "extrapolated"):
        raise ValueError(f"it holds a cost that is {cost.how!r}")
    return cost


def _add(key: Mapping[str, Any], fresh: Mapping[str, OpCost]) -> None:
    """Add to what is on disk now, which another process may have changed; the rename is atomic.

    Of two processes that write in the same instant one loses its entries, and measures them again later.
    """
    if not fresh:
        return
    merged = {name: cost for name, cost in _read(key).items() if name not in fresh}
    merged.update(fresh)
    newest = list(merged.items())[-_MOST_ENTRIES:]
    data = {"key": key, "costs": {name: [c.seconds, c.working_bytes, c.how] for name, c in newest}}
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data))
    except (OSError, RuntimeError) as error:
        _warn("written", error)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader sees a part of it."""
    handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _warn(verb: str, error: Exception) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warn_user(
        f"gradstow's cost cache cannot be {verb} ({type(error).__name__}: {error}); ops are measured again "
        "each time. Remove the file, or set GRADSTOW_CACHE_DIR to a folder that can be written."
    )
