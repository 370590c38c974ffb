"""``stow``: run a model's own training step by a plan, from its first training forward on."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from gradstow._coding import places_of
from gradstow._errors import CaptureError, GradstowError, StalePlan
from gradstow._plan import Plan
from gradstow._run import Run, Wishes
from gradstow._units import parse_budget
from gradstow._wanted import Wanted
from gradstow.capture import batch_signature, device_of, hide_parts, is_part, weights_signature
from gradstow.execute import inner_error
from gradstow.offload import check_place
from gradstow.planner import Policy

MAX_PLANS = 32
_PLAIN: ContextVar[bool] = ContextVar("gradstow_plain", default=False)


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside, every stowed model runs as plain PyTorch, forward and backward."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def stow_model(
    model: torch.nn.Module,
    wanted: Wanted,
    plan: Plan | Sequence[Plan] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    max_plans: int = MAX_PLANS,
) -> torch.nn.Module:
    """See ``gs.stow``."""
    _check_stowable(model)
    if isinstance(max_plans, bool) or not isinstance(max_plans, int) or max_plans < 1:
        raise GradstowError(f"max_plans={max_plans!r} keeps no plan. Give a number of at least 1.")
    plans = _plans(plan)
    check_alone(plans, wanted)
    if not plans and wanted.budget is None and wanted.policy == Policy():
        raise GradstowError('stow needs to know the memory allowed: stow(model, budget="6GiB"), or plan=, or policy=.')
    for one in plans:
        _check_plan(one, model)
    if plans:  # what they do not serve is planned in the same way
        budget = parse_budget(plans[0].budget) if plans[0].budget else None
        wanted = replace(wanted, budget=budget, policy=Policy.of(plans[0].policy), codegen=plans[0].graph.codegen)
    model._compiled_call_impl = _Stowed(model, Wishes(wanted, plans, optimizer), max_plans)
    return model


def _plans(given: Any) -> tuple[Plan, ...]:
    plans = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for plan in plans:
        if not isinstance(plan, Plan):
            raise StalePlan(f"plan= takes a gs.Plan, not {type(plan).__name__}. Load a file with gs.Plan.load(path).")
    return plans


def unstow_model(model: torch.nn.Module) -> torch.nn.Module:
    """See ``gs.unstow``."""
    if not is_stowed(model):
        raise GradstowError(f"this {type(model).__name__} is not stowed, so there is nothing to undo.")
    _make_plain(model)
    return model


def is_stowed(model: torch.nn.Module) -> bool:
    return isinstance(getattr(model, "_compiled_call_impl", None), _Stowed)


def runs_planned(model: torch.nn.Module) -> bool:
    """Whether a forward that was called here would run by a plan: stowed, training, and not inside ``gs.plain``."""
    return is_stowed(model) and _trains(model) and not _PLAIN.get()


def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan that a stowed model ran last, or None before its first training forward."""
    stowed = model._compiled_call_impl
    return stowed.last.last if isinstance(stowed, _Stowed) and stowed.last is not None else None


def _check_stowable(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise GradstowError(f"stow takes a torch.nn.Module, not {type(model).__name__}.")
    for name, module in model.named_modules():
        where = f" (its sub-module {name})" if name else ""
        if isinstance(module._compiled_call_impl, _Stowed):
            raise GradstowError(f"{type(model).__name__} is stowed already{where}. Call gs.unstow first.")
        compiled = module._compiled_call_impl is not None and not is_part(module)
        if compiled or isinstance(module, torch._dynamo.OptimizedModule):
            raise CaptureError(
                f"{type(model).__name__} is compiled already{where}, and gradstow captures it itself. "
                "Stow the original module, without torch.compile."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{type(model).__name__} is or holds a ScriptModule{where}, which cannot be captured. "
                "Use the Python module that it was scripted from, or stow the other parts alone."
            )
    device_of(model)


def check_alone(plan: Plan | Sequence[Plan] | None, wanted: Wanted) -> None:
    """A plan carries its own budget, policy and codes.

    Raises:
        GradstowError: another is asked for beside it.
    """
    given = replace(wanted, progress=None)
    if not plan or given == Wanted():
        return
    names = [f.name for f in fields(Wanted) if getattr(given, f.name) != getattr(Wanted(), f.name)]
    raise GradstowError(
        f"plan= was given together with {' and '.join(f'{n}=' for n in names)}: a plan carries its own. Leave one "
        "away, or plan again with gs.plan."
    )


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
    if plan.graph.weights and plan.graph.weights != weights_signature(model):
        raise StalePlan(
            f"the plan is for a {plan.graph.model} whose parameters have other shapes or dtypes than this one's. "
            "Plan this model with gs.plan."
        )
    if plan.graph.device != device_of(model):
        raise StalePlan(
            f"the plan is for {plan.graph.device} and the model is on {device_of(model)}. "
            "Move the model, or plan again."
        )
    for place in places_of(plan):
        check_place(place, device_of(model))


@dataclass
class _Stowed:
    """Sits in the module's call slot (the one that ``Module.compile`` uses, which copies and pickles leave out)."""

    module: Any
    wishes: Wishes
    max_plans: int
    last: Run | None = None
    _runs: OrderedDict[Any, Run] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.module = weakref.ref(self.module)

    def __deepcopy__(self, _memo: Any) -> None:
        """Some modules (LSTM) copy their call slot: what they get is a plain model."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: torch.nn.Module = self.module()
        if _PLAIN.get() or torch.compiler.is_dynamo_compiling() or not _trains(module):
            return module._call_impl(*args, **kwargs)
        try:
            _refuse_graph_capture(module)
            self.last = self._run(module, args, kwargs)
            return self.last(module, args, kwargs)
        except Exception as error:
            cause = inner_error(error)
            if isinstance(cause, GradstowError):
                _make_plain(module)
                raise cause from cause.__cause__
            raise
        except KeyboardInterrupt:
            _make_plain(module)
            raise

    def _run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Run:
        key = _run_key(module, args, kwargs)
        with self._lock:
            if key not in self._runs:
                self._runs[key] = Run(module, self.wishes, self._met)
            self._runs.move_to_end(key)
            while len(self._runs) > self.max_plans:
                self._runs.popitem(last=False)
            return self._runs[key]

    def _met(self) -> int:
        """The largest step budget of any batch so far, in bytes."""
        plans = [run.last for run in self._runs.values() if run.last is not None]
        return max((plan.step_budget_bytes or 0 for plan in plans), default=0)


def _trains(module: torch.nn.Module) -> bool:
    """Not in eval mode, without gradients, or while all of it is frozen (a judge, while the other player learns)."""
    return module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _refuse_graph_capture(module: torch.nn.Module) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"a CUDA graph is being captured, and {type(module).__name__} is stowed: its plans are chosen on the host, "
            "step by step. Capture the step under `with gs.plain():`, or gs.unstow the model first."
        )


def autocast_state(device: str) -> torch.dtype | None:
    """The dtype of the autocast block that we are in, or None."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


# Dynamo does not notice a hook that is added to code which it has compiled: another hook is another run.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _run_key(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """All that makes another graph: layouts, flags, autocast, hooks."""
    device = device_of(module)
    return (
        batch_signature((args, kwargs)),
        tuple(p.requires_grad for p in module.parameters()),
        tuple(m.training for m in module.modules()),
        autocast_state(device),
        tuple(id(hook) for m in module.modules() for name in _HOOKS for hook in getattr(m, name).values()),
    )


def _make_plain(module: torch.nn.Module) -> None:
    """After an error of ours the model trains as plain PyTorch."""
    if is_stowed(module):
        module._compiled_call_impl = None
        hide_parts(module)
