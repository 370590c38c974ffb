"""The backend of ``torch.compile(model, backend="gradstow", options={"budget": "6GiB"})``: graphs planned alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gradstow._errors import BudgetTooSmall, PolicyError
from gradstow._plan import Plan
from gradstow._planning import plan_priced, price
from gradstow._units import format_bytes
from gradstow._wanted import Wanted
from gradstow.capture import compile_settings, on_real_tensors, tensors
from gradstow.execute import Executor, OverPlanned, Planned, graph_alone, inner_error
from gradstow.ir import Resident

_OPTIONS = ("budget", "policy", "effort", "codegen")
_TRIES = 4


def backend(module: fx.GraphModule, inputs: list[Any], options: Mapping[str, Any] | None = None) -> Any:
    """A backend of torch.compile that compiles a graph inside a memory budget.

    Options:
        budget: all live bytes while this graph trains, what goes into it (weights, batch) included: ``int`` bytes,
            ``"6GiB"``, or ``"60%"`` of what the graph's compiled step takes when everything is stored.
        policy, effort: as for ``gs.stow``.
        codegen: ``"inductor"`` (the default) or ``"eager"``.

    What is not in the graph (optimizer state, gradients that exist already, other graphs of the same model) is not
    counted: ``gs.stow(model, budget=..., codegen="inductor")`` plans the whole step.

    Raises:
        BudgetError, BudgetTooSmall, PolicyError: Dynamo reports them as BackendCompilerFailed, with their message.
    """
    wanted = _wanted(dict(options or {}))
    for _ in range(_TRIES):
        source = _Alone(inputs, wanted)
        executor = Executor(source, lambda _tensor: "an input of the graph", source.device, wanted.codegen)
        try:
            with compile_settings():
                return executor.compile(module, inputs)
        except Exception as error:
            inner = inner_error(error)
            if not isinstance(inner, OverPlanned):
                raise
            wanted = replace(wanted, margin=inner.excess.margin(wanted.margin))
    raise BudgetTooSmall(
        f"the compiled code of this graph needs {format_bytes(wanted.margin)} more than planned. Give a larger budget, "
        "or use options={'codegen': 'eager'}, whose peak is as planned."
    )


def _wanted(options: dict[str, Any]) -> Wanted:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown or "budget" not in options:
        what = f"{unknown[0]!r} is no option" if unknown else "there is no budget"
        raise PolicyError(
            f"{what} of torch.compile(backend='gradstow'). Give options={{'budget': '6GiB'}}, and {_OPTIONS[1:]}."
        )
    return Wanted.of(
        options["budget"],
        options.get("policy", "auto"),
        effort=options.get("effort", "normal"),
        codegen=options.get("codegen", "inductor"),
    )


class _Alone(Planned):
    """Plans each graph when it turns up."""

    told = True

    def __init__(self, inputs: list[Any], wanted: Wanted) -> None:
        super().__init__([], strict=False, alone=self._no_more)
        self.wanted = wanted
        found = [t for t in tensors(inputs) if t.dim() > 0] or list(tensors(inputs))
        self.device = found[0].device.type if found else "cpu"
        weights = sum(t.untyped_storage().nbytes() for t in found if isinstance(t, torch.nn.Parameter))
        total = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())
        self.resident = Resident(parameters=weights, batch=total - weights)

    def find(self, raw: fx.GraphModule, num_outputs: int, *, begun: bool) -> Any:
        graph = graph_alone(raw, num_outputs, self.device, self.wanted.codegen, steady=True)
        graph = replace(graph, resident=self.resident)
        with on_real_tensors():
            plan: Plan = plan_priced(price(graph, self.wanted), self.wanted)
        self.plans.append(plan)
        return plan.graph.regions[0], plan.schedule.regions[0]

    def _no_more(self, _region: Any) -> Any:
        raise AssertionError("every graph is planned when it turns up")
