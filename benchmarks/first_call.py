"""What planning costs: seconds of the first call, and the memory of planning a step that would not fit.

    python benchmarks/first_call.py            # each figure in a fresh process, about ten minutes
    python benchmarks/first_call.py --only compile inductor

Rows: the first training step of ResNet-50 (batch 8) and GPT-2 (4 x 256) with and without cached op timings
(rehearse, time ops, plan, lower), the same compiled, by torch.compile alone and with a plan, both without any cache,
and the peak resident memory of ``gs.plan`` for ResNet-50 at batch 1024.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from _rows import RESULTS, VERSIONS, versions, write

OUT = RESULTS / "first_call.csv"
FIELDS = ["what", "first_seconds", "later_seconds", "plain_step_peak_gib", "process_peak_gib", *VERSIONS]
JOBS = {
    "resnet50 batch 8, first call, op timings not cached": ("stow", "torchvision:resnet50", 8),
    "resnet50 batch 8, first call, op timings cached": ("stow", "torchvision:resnet50", 8),
    "gpt2 4x256, first call, op timings not cached": ("stow", "transformers:gpt2", 4),
    "gpt2 4x256, first call, op timings cached": ("stow", "transformers:gpt2", 4),
    "resnet50 batch 8, first step, torch.compile": ("compile", "torchvision:resnet50", 8),
    "resnet50 batch 8, first step, inductor at 80%": ("inductor", "torchvision:resnet50", 8),
    "gpt2 4x256, first step, torch.compile": ("compile", "transformers:gpt2", 4),
    "gpt2 4x256, first step, inductor at 80%": ("inductor", "transformers:gpt2", 4),
    "resnet50 batch 1024, gs.plan at 50%": ("plan", "torchvision:resnet50", 1024),
}


def main() -> None:
    if sys.argv[1:2] == ["work"]:
        print(json.dumps(work(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="jobs whose names contain one of these")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as cache:
        for number, (name, (kind, target, batch)) in enumerate(JOBS.items()):
            if not any(part in name for part in only):
                continue
            shared = kind in ("stow", "plan")
            folder = f"{cache}/{target.rsplit(':')[-1] if shared else number}"
            caches = {"GRADSTOW_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            environment = {**os.environ, **caches, "GRADSTOW_PLAN_CACHE": "0"}
            command = [sys.executable, __file__, "work", kind, target, str(batch)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            write(OUT, FIELDS, {"what": name, **found})


def work(kind: str, target_name: str, batch: int) -> dict[str, object]:
    import gradstow as gs
    from gradstow.cli._targets import build_target

    target = build_target(target_name, batch)
    model, loss = target.model.train(), target.loss
    start = time.perf_counter()
    if kind == "plan":
        plan = gs.plan(model, target.batch, loss=loss, budget="50%")
        first = time.perf_counter() - start
        found = {
            "first_seconds": round(first, 1),
            "plain_step_peak_gib": round(plan.plain_step_peak_bytes / 2**30, 2),
        }
    else:
        if kind == "compile":
            model.compile(dynamic=False)
        else:
            gs.stow(model, budget="60%" if kind == "stow" else "80%", codegen="eager" if kind == "stow" else kind)
        first = _step(model, target.batch, start)
        later = min(_step(model, target.batch, time.perf_counter()) for _ in range(2))
        found = {"first_seconds": round(first, 1), "later_seconds": round(later, 2)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "process_peak_gib": round(peak / 2**30, 2), **versions()}


def _step(model: object, batch: object, start: float) -> float:
    output = model(**batch) if isinstance(batch, dict) else model(batch[0])  # type: ignore[operator, index, arg-type]
    loss = output.loss if hasattr(output, "loss") else output.square().mean()
    loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
    return seconds


if __name__ == "__main__":
    main()
