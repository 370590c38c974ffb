"""Code generation by Inductor: a planned graph becomes compiled kernels, whose memory is known before they run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradstow._signature import encode
from gradstow.ir import OpCost

Price = Callable[[Sequence[str]], Mapping[str, OpCost]]

_numbers = itertools.count()
_CHOICES = 1  # raise it when Inductor is asked to choose otherwise
_NEAR = 6  # nodes between two that may become one loop without one reading the other's result
_ALLOCATORS = ("empty_strided_cpu", "empty_strided_cpu_pinned", "empty_strided_cuda", "empty_strided_xpu")
_NO_CALLS = (torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default)
_CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment", "assert_tensor_metadata")


@dataclass
class Compiled:
    """Compiled kernels of one graph, which take one list and empty it.

    ``source`` is the text that calls them, ``inputs`` fakes of what it gets.
    """

    code: Callable[[list[Any]], Any]
    source: str
    inputs: list[Any]
    _boxed_call: ClassVar[bool] = True  # how AOTAutograd learns of it

    def __call__(self, args: list[Any]) -> Any:
        return self.code(args)


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], *, backward: bool, free: Collection[int] = ()
) -> Compiled:
    """Compile a planned graph.

    ``inputs``: fakes in the layouts that really come. What the graph returns has the layouts that its nodes have, but
    for the positions ``free``, whose layouts Inductor chooses.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    output = module.graph.output_node()
    given = list(output.args[0])
    fixed = [i for i, item in enumerate(given) if isinstance(item, fx.Node) and i not in free]
    output.meta["user_visible_output_idxs"] = fixed
    # Inductor's caches know neither of its choices nor of which layouts are fixed
    tag = f"{torch.compiler.config.cache_key_tag} gradstow {_CHOICES} {fixed}"
    settings: Any = torch.compiler.config
    with V.set_choices_handler(_near_only()), settings.patch(cache_key_tag=tag):
        code: Any = compile_fx_inner(
            module, list(inputs), is_backward=backward, graph_id=next(_numbers), static_input_idxs=()
        )
    return Compiled(code, str(getattr(code, "source_code", "") or ""), list(inputs))


def donate_nothing() -> None:
    """Tell AOTAutograd that no saved tensor's memory is written over, so that a graph can be retained.

    Where it was asked not to look for such tensors, it takes them for unknown, and refuses.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


@functools.cache
def _near_only() -> Any:
    """Inductor's choices, without loops that join what lies far apart in the graph only because it reads the same.

    What is recomputed for two layers would be made at once then, and the second part would wait in memory.
    """
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            apart = max(abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order))
            return apart <= _NEAR and InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    return Choices()


def compiled_peak(
    forward: Compiled,
    backward: Compiled,
    outputs: int,
    costs: Mapping[str, OpCost],
    *,
    held: bool,
    price: Price,
) -> int | None:
    """Most bytes that a compiled region has alive above its inputs, gradients included; None where it is not known.

    The code that calls the kernels runs on fakes, kernels left out: it allocates and frees as it will. Where it calls
    a library otherwise than was planned, in layouts of Inductor's choice, that is priced here.

    Args:
        outputs: how many of the forward's results are the caller's; the rest is saved for the backward.
        costs: working memory of library calls.
        held: whether the caller holds the outputs while the backward runs.
        price: what calls cost that ``costs`` does not have, by signature.
    """
    if not forward.source or not backward.source:
        return None
    mode = torch._guards.detect_fake_mode([*forward.inputs, *backward.inputs])
    if mode is None:
        return None
    counting = _count(forward, backward, outputs, _Counting(costs), held, mode)
    if counting.unknown:
        found = {text: cost for text, cost in price(list(counting.unknown)).items() if cost.how == "measured"}
        counting = _count(forward, backward, outputs, _Counting({**costs, **found}), held, mode)
    return counting.peak


def _count(
    forward: Compiled, backward: Compiled, outputs: int, counting: _Counting, held: bool, mode: Any
) -> _Counting:
    with torch.utils._python_dispatch._disable_current_modes(), mode, counting:
        given = [_copy(item) for item in forward.inputs]
        counting.ignore(given)
        results = list(_runner(forward.source)(list(given)))
        kept = results[:outputs] if held else []
        saved = results[outputs:]
        del results
        counting.look()
        tangents = [_copy(item) for item in backward.inputs[len(saved) :]]
        kept += [t for t in tangents if isinstance(t, torch.Tensor) and not t.dim()]  # backward() holds a loss's own
        args = [*saved, *tangents]
        del saved, tangents
        gradients = _runner(backward.source)(args)
        counting.look()
        del gradients, kept
    return counting


class _Counting(TorchDispatchMode):
    """Counts the bytes of storages that are alive.

    ``unknown``: signatures of calls whose working memory is guessed, by what their op needs elsewhere.
    """

    def __init__(self, costs: Mapping[str, OpCost]) -> None:
        super().__init__()
        self.costs, self.peak = costs, 0
        self.unknown: dict[str, None] = {}
        self._most: dict[str, int] = {}  # by the op's name
        for signature, cost in costs.items():
            name = _name(signature[2:].partition('"')[0])
            self._most[name] = max(cost.working_bytes, self._most.get(name, 0))
        self._there: dict[StorageWeakRef, int] = {}
        self._ignored: set[StorageWeakRef] = set()

    def ignore(self, items: Sequence[Any]) -> None:
        self._ignored |= {_ref(t) for t in items if isinstance(t, torch.Tensor)}
        self._there = {}

    def look(self, working: int = 0) -> None:
        self._there = {ref: size for ref, size in self._there.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._there.values()) + working)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            if _ref(tensor) not in self._ignored:
                self._there[_ref(tensor)] = tensor.untyped_storage().nbytes()
        signature = encode(str(func), args, kwargs or {})
        cost = self.costs.get(signature)
        self.look(self._most.get(_name(str(func)), 0) if cost is None else cost.working_bytes)
        if cost is None and signature and made and func not in _NO_CALLS:
            self.unknown[signature] = None
        return result


def _name(target: str) -> str:
    """An op's name without its overload."""
    return ".".join(target.split(".")[:2])


def _ref(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _copy(item: Any) -> Any:
    """A fake of the same layout on memory of its own."""
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)


class _NoKernels:
    """Stands for Inductor's compiler of kernels: whatever it is asked for does nothing."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self

    def __getitem__(self, _item: Any) -> Any:
        return self


def _runner(source: str) -> Callable[[list[Any]], Any]:
    """The text's function, with fakes for memory and nothing for kernels."""
    lines = [line for line in source.splitlines() if "import AsyncCompile" not in line]
    names: dict[str, Any] = {"__name__": "compiled on fakes", "AsyncCompile": _NoKernels}
    exec(compile("\n".join(lines), "<compiled on fakes>", "exec"), names)
    for name in _ALLOCATORS:
        device = "cuda" if "cuda" in name else "cpu"
        names[name] = lambda size, stride, dtype, device=device: torch.empty_strided(
            size, stride, dtype=dtype, device=device
        )
    names.update(dict.fromkeys(_CHECKS, lambda *_args: None))
    names["reinterpret_tensor"] = lambda t, size, stride, offset: torch.as_strided(
        t, size, stride, t.storage_offset() + offset
    )
    found: Callable[[list[Any]], Any] = names["call"]
    return found
