"""``stow``: run a model's own training step by a plan, from its first training forward on."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradstow._errors import BudgetTooSmall, CaptureError, GradstowError, StalePlan
from gradstow._plan import Plan
from gradstow._units import Budget, format_bytes, parse_budget
from gradstow.capture import Step, batch_signature, capture, device_of, storage_key
from gradstow.cost import measured_costs
from gradstow.execute import Executor, inner_error
from gradstow.ir import CostTable, StepGraph
from gradstow.planner import check_policy, make_plan, plain_step_peak

Progress = Callable[[str, int, int], None]

_PLAIN: ContextVar[bool] = ContextVar("gradstow_plain", default=False)
_TIMING_LIMIT = 4 << 30  # bytes that timing one op may take where the budget does not say less
_HEADROOM = 0.1  # share of the free memory that "auto" leaves alone


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, every stowed model runs as plain PyTorch, forward and backward."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def plan_step(
    model: torch.nn.Module, step: Step, budget: Budget | None, policy: str, progress: Progress | None = None
) -> Plan:
    """Capture, price and plan one step. Allocates at most one op at a time."""
    say = progress or _silent
    check_policy(policy)
    _check_devices(model, (step.inputs, step.batch))
    say("rehearse", 0, 1)
    graph = capture(model, step)
    say("rehearse", 1, 1)
    limit = _TIMING_LIMIT
    if budget is not None and budget.total_bytes is not None:
        limit = min(limit, budget.total_bytes)
    costs = measured_costs(_signatures(graph), graph.device, limit, lambda done, total: say("time ops", done, total))
    say("plan", 0, 1)
    step_budget = _step_budget(graph, costs, budget)
    result = make_plan(
        graph,
        costs,
        step_budget=step_budget,
        budget="" if budget is None else str(budget),
        policy=policy,
        kind=Plan,
    )
    say("plan", 1, 1)
    assert isinstance(result, Plan)
    return result


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass


def _signatures(graph: StepGraph) -> list[str]:
    found: dict[str, None] = {}
    for region in graph.regions:
        for op in region.ops:
            if not op.view:
                found[op.signature] = None
            if op.rerun is not None:
                found[op.rerun.signature] = None
    return list(found)


def _step_budget(graph: StepGraph, costs: CostTable, budget: Budget | None) -> int | None:
    """The budget as bytes for the step, above what is resident."""
    if budget is None:
        return None
    if budget.percent is not None:
        return int(budget.percent / 100 * plain_step_peak(graph, costs))
    if budget.auto:
        return int((1 - _HEADROOM) * free_bytes(graph.device))
    assert budget.total_bytes is not None
    left = budget.total_bytes - graph.resident.total
    if left <= 0:
        raise BudgetTooSmall(
            f"the budget of {format_bytes(budget.total_bytes)} is less than what is resident before the step "
            f"starts: {format_bytes(graph.resident.total)} of parameters, buffers, gradients, optimizer state "
            "and batch. Give more than that, or use a smaller model or batch.",
            budget_bytes=budget.total_bytes,
            minimum_bytes=graph.resident.total,
        )
    return left


def free_bytes(device: str) -> int:
    """Memory that is free on the device now, in bytes."""
    if device == "cuda":
        free, _total = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise GradstowError('the free memory of this machine cannot be read, so budget="auto" is unknown. Give bytes.')


def _check_devices(model: torch.nn.Module, batch: Any) -> None:
    device = device_of(model)
    for item in tree_leaves(batch):
        if isinstance(item, torch.Tensor) and item.device.type != device and item.dim() > 0:
            raise CaptureError(
                f"the batch holds a tensor of shape {tuple(item.shape)} on {item.device.type}, and "
                f"{type(model).__name__} is on {device}. Move the batch: tensor.to({device!r})."
            )


def stow_model(
    model: torch.nn.Module,
    budget: Any,
    plan: Plan | None,
    policy: str,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress | None,
) -> torch.nn.Module:
    """See ``gs.stow``."""
    _check_stowable(model)
    check_policy(policy)
    if plan is not None and not isinstance(plan, Plan):
        raise StalePlan(f"plan= takes a gs.Plan, not {type(plan).__name__}. Load a file with gs.Plan.load(path).")
    if plan is not None and budget is not None:
        raise GradstowError("give either budget= or plan=, not both: a plan carries its own budget.")
    if plan is None and budget is None and policy == "auto":
        raise GradstowError('stow needs to know the memory allowed: stow(model, budget="6GiB"), or plan=, or policy=.')
    wanted = parse_budget(budget) if budget is not None else None
    if plan is not None:
        _check_plan(plan, model)
        wanted = parse_budget(plan.budget) if plan.budget else None
        policy = plan.policy
    model._compiled_call_impl = _Stowed(model, wanted, plan, policy, optimizer, progress)
    return model


def unstow_model(model: torch.nn.Module) -> torch.nn.Module:
    """See ``gs.unstow``."""
    if not is_stowed(model):
        raise GradstowError(f"this {type(model).__name__} is not stowed, so there is nothing to undo.")
    model._compiled_call_impl = None
    return model


def is_stowed(model: torch.nn.Module) -> bool:
    return isinstance(model._compiled_call_impl, _Stowed)


def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan that a stowed model ran last, or None before its first training forward."""
    stowed = model._compiled_call_impl
    return stowed.last if isinstance(stowed, _Stowed) else None


def _check_stowable(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise GradstowError(f"stow takes a torch.nn.Module, not {type(model).__name__}.")
    for name, module in model.named_modules():
        where = f"its sub-module {name}" if name else "it"
        if isinstance(module._compiled_call_impl, _Stowed):
            raise GradstowError(f"{type(model).__name__} is stowed already ({where}). Call gs.unstow first.")
        if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule):
            raise CaptureError(
                f"{type(model).__name__} is compiled already ({where}), and gradstow captures it itself. "
                "Stow the original module, without torch.compile."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{type(model).__name__} holds a ScriptModule ({where}), which cannot be captured. "
                "Use the Python module that it was scripted from, or stow the other parts alone."
            )
    device_of(model)


def _check_plan(plan: Plan, model: torch.nn.Module) -> None:
    made = plan.graph.versions.get("torch", "")
    if made != torch.__version__:
        raise StalePlan(
            f"the plan was made with torch {made} and this is {torch.__version__}: graphs and op times differ. "
            "Plan again with gs.plan."
        )
    if plan.graph.model != type(model).__qualname__:
        raise StalePlan(
            f"the plan is for {plan.graph.model} and this model is {type(model).__qualname__}. "
            "Plan this model with gs.plan."
        )
    if plan.graph.device != device_of(model):
        raise StalePlan(
            f"the plan is for {plan.graph.device} and the model is on {device_of(model)}. "
            "Move the model, or plan again."
        )


@dataclass
class _Stowed:
    """Sits in the module's call slot (the one that ``Module.compile`` uses, which copies and pickles leave out)."""

    module: Any
    budget: Budget | None
    plan: Plan | None
    policy: str
    optimizer: torch.optim.Optimizer | None
    progress: Progress | None
    last: Plan | None = None
    _runs: dict[Any, tuple[Plan, Executor]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.module = weakref.ref(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: torch.nn.Module = self.module()
        idle = not module.training or not torch.is_grad_enabled() or _PLAIN.get()
        if idle or torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        try:
            self.last, executor = self._run(module, args, kwargs)
            return executor(module, args, kwargs)
        except Exception as error:
            cause = inner_error(error)
            if isinstance(cause, GradstowError):
                _make_plain(module)
                raise cause from cause.__cause__
            raise
        except KeyboardInterrupt:
            _make_plain(module)
            raise

    def _run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Plan, Executor]:
        key = _run_key(module, args, kwargs)
        with self._lock:
            if key not in self._runs:
                plan = self._plan_for(module, key, args, kwargs)
                self._runs[key] = (plan, Executor(plan.graph, plan.schedule, _Names(module)))
            return self._runs[key]

    def _plan_for(self, module: torch.nn.Module, key: Any, args: Any, kwargs: Any) -> Plan:
        if self.plan is not None and self.plan.graph.batch == key[0]:
            return self.plan
        step = Step(_call, (args, kwargs), optimizer=self.optimizer)
        return plan_step(module, step, self.budget, self.policy, self.progress)


def autocast_state(device: str) -> torch.dtype | None:
    """The dtype of the autocast block that we are in, or None."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


# Dynamo does not notice a hook that is added to code which it has compiled: another hook is another run.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _run_key(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """All that makes another graph or another peak: layouts, flags, existing gradients, autocast."""
    device = device_of(module)
    return (
        batch_signature((args, kwargs)),
        any(p.grad is not None for p in module.parameters()),
        tuple(p.requires_grad for p in module.parameters()),
        tuple(m.training for m in module.modules()),
        autocast_state(device),
        tuple(id(hook) for m in module.modules() for name in _HOOKS for hook in getattr(m, name).values()),
    )


def _call(model: Any, inputs: Any) -> Any:
    args, kwargs = inputs
    return model(*args, **kwargs)


def _make_plain(module: torch.nn.Module) -> None:
    """After an error of ours the model trains as plain PyTorch."""
    if is_stowed(module):
        module._compiled_call_impl = None


class _Names:
    """Names of a model's tensors, for messages: looked up only when something went wrong."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, tensor: torch.Tensor) -> str:
        module = self._module()
        if module is not None:
            for kind, items in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for name, item in items:
                    if item is tensor or storage_key(item) == storage_key(tensor):
                        return f"the {kind} {name}"
        return f"an input of shape {tuple(tensor.shape)}"
