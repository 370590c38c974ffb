"""``gs.layers.convert``: what is swapped, what is left, what it says, and that the numbers stay."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from equality import Seen, differences, state
from gradstow import layers
from twins import data

MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(maker: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[maker.__name__] = maker
    return maker


@model
def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 4),
    )


@model
def residual() -> nn.Module:
    return Residual()


@model
def words() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.relu, self.last, self.head = nn.ReLU(), nn.ReLU(), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.first(x))
        return self.head(self.last(x + self.second(x)).mean((2, 3)))


def batch_of(name: str, step: int = 0) -> torch.Tensor:
    return data(6, 12, seed=step) if name == "words" else data(6, 3, 16, 16, seed=step)


def train(module: nn.Module, name: str) -> Seen:
    seen: Seen = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        loss = module(batch_of(name, step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        seen += [(f"loss {step}", loss.detach().clone()), *state(module, f"step {step}")]
        optimizer.step()
    return seen


def weights(module: nn.Module) -> Seen:
    return [(name, tensor.clone()) for name, tensor in module.state_dict().items()]


@pytest.mark.parametrize("with_batch", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_are_equal(name: str, with_batch: bool) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]().train()
    lean = copy.deepcopy(plain)
    random = torch.get_rng_state()
    conversion = layers.convert(lean, batch=batch_of(name) if with_batch else None)
    assert torch.equal(torch.get_rng_state(), random)
    assert conversion.swaps
    assert differences(weights(plain), weights(lean)) == []
    found = []
    for module in (plain, lean):
        torch.manual_seed(1)
        found.append(train(module, name))
    assert differences(*found) == []


def test_it_keeps_less_and_says_what() -> None:
    module, batch = convolutions(), batch_of("convolutions")
    conversion = layers.convert(module, batch=batch)
    n = 6 * 8 * 16 * 16
    assert conversion.saved_before is not None
    assert conversion.saved_after is not None
    assert conversion.saved_after == sum(s.saved_after or 0 for s in conversion.swaps), "the root is a Sequential, too"
    fused, relu = (next(s for s in conversion.swaps if s.path == path) for path in ("0", "0.2"))
    assert (fused.saved_before, fused.saved_after) == (4 * n + 2 * 4 * 8, 2 * 4 * 8), "statistics alone"
    assert (relu.saved_before, relu.saved_after) == (4 * n, 0)
    pool = next(s for s in conversion.swaps if s.path == "1")
    assert pool.saved_after == n // 4 // 2
    assert conversion.saved_after < 0.5 * conversion.saved_before
    text = str(conversion)
    assert "modules of" in text
    assert "4 or 8 bits per output" in text
    shown = json.loads(conversion.to_json())
    assert shown["saved_after_bytes"] == conversion.saved_after
    assert {s["path"] for s in shown["swaps"]} == {s.path for s in conversion.swaps}


def test_one_bit_only_where_nobody_keeps_the_output() -> None:
    module = Residual()
    layers.convert(module, batch=batch_of("residual"))
    assert module.relu.saves == "output", "the second convolution keeps it"
    assert module.last.saves == "mask", "a mean keeps nothing"
    module = Residual()
    layers.convert(module)
    assert (module.relu.saves, module.last.saves) == ("output", "output")


@pytest.mark.parametrize("only", [nn.ReLU, "ReLU", "la*", ["last", nn.ReLU], "last"])
def test_by_type_name_or_path(only: Any) -> None:
    module = Residual()
    swapped = {s.path for s in layers.convert(module, only).swaps}
    assert swapped == ({"last"} if only in ("la*", "last") else {"relu", "last"})
    assert type(module.last) is layers.ReLU


def test_skip_and_what_is_only_swapped_when_asked() -> None:
    module = Residual()
    assert {s.path for s in layers.convert(module, skip="last").swaps} == {"relu"}
    assert {s.path for s in layers.convert(module, nn.Conv2d).swaps} == {"first", "second"}
    assert type(module.first) is layers.Conv2d
    assert type(module.last) is nn.ReLU


@pytest.mark.parametrize(
    ("only", "words"), [("rulu", "Did you mean 'relu'"), (nn.LSTM, "no LSTM"), ("zzz", "named_modules")]
)
def test_what_fits_nothing_is_named_and_changes_nothing(only: Any, words: str) -> None:
    module = Residual()
    with pytest.raises(gs.errors.PolicyError, match=words):
        layers.convert(module, ["last", only])
    assert type(module.last) is nn.ReLU


class Own(nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_a_class_of_ones_own_is_left_and_named() -> None:
    module = nn.Sequential(Own(), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    assert layers.convert(copy.deepcopy(module)).left == {"0": "Own is not exactly torch's ReLU"}
    conversion = layers.convert(module, [nn.ReLU, nn.Linear])
    assert [s.path for s in conversion.swaps] == ["1"]
    assert conversion.left == {
        "0": "Own is not exactly torch's ReLU",
        "2": "ParametrizedLinear is not exactly torch's Linear",
    }
    assert "left: 0: Own is not exactly torch's ReLU" in str(conversion)


def test_undo() -> None:
    module, names = convolutions(), [type(m) for m in convolutions().modules()]
    conversion = layers.convert(module, batch=batch_of("convolutions"))
    assert [type(m) for m in module.modules()] != names
    conversion.undo()
    conversion.undo()
    assert [type(m) for m in module.modules()] == names
    assert not any("saves" in vars(m) for m in module.modules())


def test_twice_swaps_nothing_more() -> None:
    module = convolutions()
    layers.convert(module)
    assert layers.convert(module).swaps == ()


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    module = Residual()
    with pytest.raises(RuntimeError):
        layers.convert(module, batch=data(6, 5, 16, 16))
    assert type(module.last) is nn.ReLU


def test_the_models_own_counters_stay() -> None:
    module = convolutions().train()
    before = weights(module)
    layers.convert(module, batch=batch_of("convolutions"))
    assert differences(before, weights(module)) == []


def test_pickle_and_deepcopy_keep_the_classes() -> None:
    module = convolutions()
    layers.convert(module, batch=batch_of("convolutions"))
    again = pickle.loads(pickle.dumps(module))
    assert [type(m) for m in again.modules()] == [type(m) for m in module.modules()]
    assert differences(weights(again), weights(module)) == []
    assert differences(weights(copy.deepcopy(module)), weights(module)) == []


@pytest.mark.parametrize("name", MODELS)
def test_stowed_after_converting(name: str) -> None:
    module = MODELS[name]().train()
    layers.convert(module, batch=batch_of(name))
    found = gs.verify(module, batch_of(name), loss=lambda out, _: out.square().mean(), budget="100%", rounds=1)
    assert found.ok


class Frozen(nn.Sequential):
    """Keeps its norm out of training, whatever the model does."""

    scale = 3

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


class Twice(nn.Sequential):
    def __iter__(self) -> Any:
        return iter([*super().__iter__()] * 2)


def test_a_sequential_of_ones_own_keeps_its_methods() -> None:
    module = Frozen(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    layers.convert(module)
    assert isinstance(module, Frozen)
    assert isinstance(module, layers.FusedSequential)
    assert (type(module).__name__, module.scale) == ("Frozen", 3)
    assert not module.train()[1].training
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert type(again) is type(module)
    assert differences(weights(again), weights(module)) == []
    assert torch.equal(again(data(2, 3, 8, 8)), module(data(2, 3, 8, 8)))
    assert layers.convert(Twice(nn.Linear(4, 4), nn.ReLU()), "Twice").swaps == ()


def test_what_comes_behind_may_write_over_the_output() -> None:
    for act in (nn.LeakyReLU(), nn.ReLU6(), nn.Hardtanh()):
        for first in ([], [nn.Linear(8, 8)]):
            module = nn.Sequential(*first, act, nn.Dropout(0.5, inplace=True))
            for batch in (None, data(4, 8)):
                lean = copy.deepcopy(module)
                layers.convert(lean, batch=batch)
                x = data(4, 8).requires_grad_()
                lean(x + 0).sum().backward()
                assert x.grad is not None


def test_undo_leaves_what_got_another_class_since() -> None:
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    conversion = layers.convert(module, [nn.LayerNorm, nn.Linear])
    nn.utils.parametrizations.weight_norm(module[1])
    conversion.undo()
    assert type(module[0]) is nn.LayerNorm
    assert module(data(2, 4)).shape == (2, 4)


def test_an_attribute_of_ones_own_with_a_lean_name_is_left() -> None:
    module = nn.Sequential(nn.ReLU())
    module[0].saves = 7
    conversion = layers.convert(module)
    assert conversion.left == {"0": "it has an attribute of its own that is named saves"}
    assert module[0].saves == 7


def test_nothing_is_left_of_the_copies_that_ran() -> None:
    gone = []

    class Seen(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Seen:
            twin = Seen(4, 4)
            gone.append(weakref.ref(twin.weight))
            return twin

    layers.convert(nn.Sequential(Seen(4, 4), nn.ReLU(), nn.Linear(4, 4)), batch=data(2, 4))
    gc.collect()
    assert len(gone) >= 2
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_model_is_called_as_gs_plan_calls_it() -> None:
    class OfThree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, three: Any) -> torch.Tensor:
            return sum(self.act(x) for x in three)

    batch = tuple(torch.randn(4, 4, requires_grad=True) for _ in range(3))
    assert gs.layers.convert(OfThree(), batch=batch).saved_before == 3 * 4 * 16, "three inputs, not a pair's first"
