"""Plans whose kernels Inductor compiles: numbers judged against float64, peaks found before anything runs."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._dynamo import backend
from gradstow._planning import capture_step
from gradstow._stow import plan_of
from gradstow._wanted import Wanted
from gradstow.capture import Step, expand
from gradstow.capture._fuse import Kernel, fuse, kind_of
from gradstow.capture._normalize import normalize
from gradstow.errors import BudgetTooSmall, PolicyError
from gradstow.execute import _program
from gradstow.execute._inductor import compile_graph

pytestmark = pytest.mark.filterwarnings("ignore")


class Blocks(nn.Module):
    """LayerNorm, GELU and dropout around matrix products, and a BatchNorm, with its own loss."""

    def __init__(self, blocks: int = 2, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), target)


def batch(rows: int = 512, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, width, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def made(dropout: float = 0.1) -> Blocks:
    torch.manual_seed(0)
    return Blocks(dropout=dropout)


def train(model: Callable[..., Any], module: nn.Module, steps: int = 3) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers of some steps of SGD; the same random stream whatever runs."""
    found: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    floating = next(module.parameters()).dtype
    x, target = batch()
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x.to(floating), target)
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss.detach().clone()
    found |= {f"gradient of {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b.clone() for name, b in module.named_buffers()}
    found["random state"] = torch.get_rng_state()
    return found


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest error of what is floating, relative to the exact tensor's norm."""
    assert found.keys() == exact.keys()
    floats = [name for name in exact if exact[name].is_floating_point()]
    assert len(floats) > 20
    return max(float((found[n].double() - exact[n]).norm() / exact[n].norm().clamp_min(1e-12)) for n in floats)


def measured(model: nn.Module) -> int:
    x, target = batch()
    for parameter in model.parameters():
        parameter.grad = None
    with gs.measure_peak() as peak:
        model(x, target).backward()
    return peak.peak_bytes


@pytest.fixture(scope="module")
def stowed() -> Any:
    """A model that trains compiled at 60 %, and what came of it."""
    model = made()
    gs.stow(model, budget="60%", codegen="inductor")
    return model, train(model, model)


def test_numbers_are_as_near_to_float64_as_those_of_torch_compile(stowed: Any) -> None:
    _, found = stowed
    exact = made().double()
    reference = train(exact, exact)
    other = made()
    with torch._inductor.config.patch(fallback_random=True):
        control = train(torch.compile(other, dynamic=False), other)
    assert error(control, reference) > 0, "float32 is not float64"
    assert error(found, reference) <= 1.5 * error(control, reference) + 1e-7


def test_dropout_draws_eagers_numbers(stowed: Any) -> None:
    _, found = stowed
    plain = made()
    reference = train(plain, plain)
    assert torch.equal(found["random state"], reference["random state"])
    assert error(found, {k: v.double() if v.is_floating_point() else v for k, v in reference.items()}) < 1e-4


def test_batch_norm_counts_each_step_once(stowed: Any) -> None:
    _, found = stowed
    assert found["buffer norm.num_batches_tracked"].item() == 3


def test_the_peak_is_under_the_budget_and_as_planned(stowed: Any) -> None:
    model, _ = stowed
    plan = plan_of(model)
    assert plan is not None
    assert plan.step_budget_bytes is not None
    assert plan.rerun_ops > 0, "a budget that asks for something"
    found = measured(model)
    assert found <= plan.step_budget_bytes
    assert found >= 0.9 * plan.predicted_step_peak_bytes


def test_a_budget_that_cannot_be_met_is_refused_before_anything_runs() -> None:
    model = made()
    gs.stow(model, budget="2%", codegen="inductor")
    state = torch.get_rng_state()
    with pytest.raises(BudgetTooSmall) as refusal:
        model(*batch())
    assert refusal.value.minimum_bytes > 0
    assert torch.equal(torch.get_rng_state(), state)
    model(*batch()).backward()  # plain now


def compiled_text(blocks: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled code of a model of some blocks, its forward's and its backward's."""
    texts: list[str] = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        found = compile_graph(*args, **kwargs)
        texts.append(found.source)
        return found

    monkeypatch.setattr(_program, "compile_graph", compiled)
    torch.manual_seed(0)
    model = Blocks(blocks)
    gs.stow(model, policy="store-all", codegen="inductor")
    model(*batch()).backward()
    monkeypatch.undo()
    assert len(texts) == 2
    return "".join(texts)


def test_repeated_blocks_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks are more calls of the same kernels."""
    few, many = compiled_text(3, monkeypatch), compiled_text(6, monkeypatch)
    assert many.count("extern_kernels.") >= few.count("extern_kernels.") + 3 * 4, "every block has matrix products"
    assert many.count("async_compile.") == few.count("async_compile.") > 5


def test_max_pooling_is_the_first_thing_that_a_process_compiles() -> None:
    code = (
        "import torch, gradstow as gs\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.MaxPool2d(3, 2, 1))\n"
        "gs.stow(model, budget='100%', codegen='inductor')\n"
        "model(torch.randn(4, 3, 32, 32)).square().mean().backward()\n"
        "print(model[0].weight.grad.norm() > 0)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "tensor(True)", done.stderr


def test_torch_compile_takes_it_as_a_backend() -> None:
    model, plain = made(), made()
    compiled = torch.compile(model, backend=backend, options={"budget": "70%"}, dynamic=False)
    found, reference = train(compiled, model), train(plain, plain)
    assert error(found, {k: v.double() if v.is_floating_point() else v for k, v in reference.items()}) < 1e-4
    assert torch.equal(found["random state"], reference["random state"])


def test_the_backend_generates_eager_code_too() -> None:
    model, plain = made(), made()
    options = {"budget": "60%", "codegen": "eager"}
    found = train(torch.compile(model, backend=backend, options=options, dynamic=False), model)
    reference = train(plain, plain)
    assert found.keys() == reference.keys()
    assert all(torch.equal(found[name], reference[name]) for name in reference)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "no budget"),
        ({"budget": "60%", "speed": 3}, "'speed' is no option"),
        ({"budget": "60%", "codegen": "x"}, "'x'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        backend(torch.fx.symbolic_trace(nn.Linear(2, 2)), [torch.randn(2, 2)], options=options)


@pytest.mark.parametrize("action", ["compress", "disk"])
def test_exact_codes_and_files_change_no_number(action: str, tmp_path: Path) -> None:
    kept = f"disk:{tmp_path}" if action == "disk" else action
    found: dict[str, dict[str, torch.Tensor]] = {}
    peaks: dict[str, int] = {}
    for name, rules in {"store": {"*": "store"}, action: {"*": kept if action == "compress" else "offload"}}.items():
        model = made()
        offload = kept if action == "disk" and name == "disk" else None
        gs.stow(model, policy=rules, offload=offload, codegen="inductor")
        found[name], peaks[name] = train(model, model), measured(model)
    assert found["store"].keys() == found[action].keys()
    assert all(torch.equal(found["store"][name], found[action][name]) for name in found["store"])
    plan = plan_of(model)
    assert plan is not None
    wanted = "send" if action == "disk" else "pack_bits"
    assert any(op.target == f"gradstow.{wanted}.default" for region in plan.graph.regions for op in region.ops)
    assert action == "compress" or peaks[action] < 0.95 * peaks["store"], "the masks are a small part"


def test_lossy_codes_stay_near_and_leave_the_users_random_numbers_alone() -> None:
    model, plain = made(), made()
    gs.stow(model, policy={"*": "int8"}, codegen="inductor")
    found, reference = train(model, model), train(plain, plain)
    plan = plan_of(model)
    assert plan is not None
    assert any("encode_lossy" in op.target for region in plan.graph.regions for op in region.ops)
    assert torch.equal(found["random state"], reference["random state"])
    assert torch.equal(found["loss 0"], reference["loss 0"]) or torch.allclose(found["loss 0"], reference["loss 0"])
    away = error(found, {k: v.double() if v.is_floating_point() else v for k, v in reference.items()})
    assert 1e-5 < away < 0.05, "lossy, and near"


def test_lossy_codes_keep_a_relus_decisions() -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))

    torch.manual_seed(0)
    model = Net()
    gs.stow(model, policy={"*": "int2"}, codegen="inductor")
    model(torch.randn(256, 16)).square().mean().backward()
    plan = plan_of(model)
    assert plan is not None
    coded = [op.name for region in plan.graph.regions for op in region.ops if "encode_lossy" in op.target]
    assert not any("relu" in name for name in coded)


def test_an_unknown_code_generator_is_named() -> None:
    with pytest.raises(PolicyError, match="'triton'"):
        gs.stow(made(), budget="60%", codegen="triton")


# ------------------------------------------------------------------------------------------ kernels, without a compiler


def joint_graph() -> Any:
    """The normalised joint graph of the model as Inductor would see it."""
    x, target = batch()
    captured = capture_step(made(), Step(lambda m, i: m(*i), (x, target)), Wanted(codegen="inductor"))
    record = captured.order[0]
    return normalize(record.compiled.joint, record.mask), record.compiled.num_forward_outputs


def run(module: Any, arguments: list[Any]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [item for item in module(*arguments) if isinstance(item, torch.Tensor)]


def real_arguments(module: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    found: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        small = torch.rand(val.shape, generator=generator) + 0.5
        found.append((small if val.is_floating_point() else small * 0).to(val.dtype))
    return found


def test_kernels_compute_what_their_ops_do() -> None:
    module, _ = joint_graph()
    fused = fuse(module)
    again = torch.fx.GraphModule(fused, expand(fused.graph))
    arguments = real_arguments(module)
    results = [run(m, [copy.deepcopy(a) for a in arguments]) for m in (module, fused, again)]
    assert len(results[0]) > 15
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_only_what_is_read_from_memory_is_realized() -> None:
    module, _ = joint_graph()
    fused = fuse(module)
    kernels = [n for n in fused.graph.nodes if isinstance(n.target, Kernel)]
    products = [n for n in fused.graph.nodes if "mm" in str(n.target)]
    assert len(products) == len([n for n in module.graph.nodes if "mm" in str(n.target)])
    assert len(kernels) < len([n for n in module.graph.nodes if kind_of(n) in ("loop", "reduction")])
    for node in fused.graph.nodes:
        assert kind_of(node) != "loop", f"{node} is in no kernel"
