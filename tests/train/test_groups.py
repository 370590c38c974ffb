"""Parameter groups: every trainable parameter once, and decay only where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradstow._errors import GradstowError
from gradstow.train._groups import parameter_groups


class RMSNormOfOnesOwn(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.mix = nn.MultiheadAttention(8, 2)
        self.norm, self.own_norm = nn.LayerNorm(8), RMSNormOfOnesOwn(8)
        self.rnn = nn.GRU(8, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def names(model: nn.Module, groups: list[dict[str, Any]]) -> list[set[str]]:
    return [{n for n, p in model.named_parameters() if any(p is q for q in group["params"])} for group in groups]


def models() -> list[nn.Module]:
    found: list[nn.Module] = [Tied(), nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2, bias=False))]
    try:
        import torchvision

        found += [torchvision.models.resnet18(), torchvision.models.vit_b_16(image_size=32)]
    except ImportError:
        pass
    return found


@pytest.mark.parametrize("no_decay", [(), ("norm", "bias"), ("vector",), ("norm", "bias", "embedding")])
def test_every_trainable_parameter_is_in_one_group(no_decay: tuple[str, ...]) -> None:
    for model in models():
        groups = parameter_groups(model, 0.1, no_decay=no_decay)
        found = [id(p) for group in groups for p in group["params"]]
        assert len(found) == len(set(found))
        assert set(found) == {id(p) for p in model.parameters() if p.requires_grad}
        assert [group["weight_decay"] for group in groups] == ([0.1, 0.0] if len(groups) == 2 else [0.1])
        torch.optim.AdamW(groups, lr=1e-3)  # which itself refuses a parameter in two groups


def test_norms_and_biases_have_no_decay() -> None:
    model = Tied()
    decayed, spared = names(model, parameter_groups(model, 0.1))
    assert decayed == {
        "table.weight", "mix.in_proj_weight", "mix.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "gamma",
    }  # fmt: skip
    assert {"norm.weight", "own_norm.scale", "mix.in_proj_bias", "rnn.bias_hh_l0", "head.bias"} <= spared


def test_a_shared_parameter_is_spared_where_any_of_its_places_is() -> None:
    model = Tied()
    _, spared = names(model, parameter_groups(model, 0.1, no_decay=("embedding",)))
    assert spared == {"table.weight"}
    _, spared = names(model, parameter_groups(model, 0.1, no_decay=("head.*",)))
    assert spared == {"table.weight", "head.bias"}


def test_globs_and_vectors() -> None:
    model = Tied()
    _, spared = names(model, parameter_groups(model, 0.1, no_decay=["gamma", "rnn.*"]))
    assert spared == {"gamma", *(n for n, _ in model.named_parameters() if n.startswith("rnn."))}
    _, spared = names(model, parameter_groups(model, 0.1, no_decay="vector"))
    assert "gamma" in spared
    assert "table.weight" not in spared


def test_decay_really_leaves_them_alone() -> None:
    model = Tied()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == names(model, parameter_groups(model, 0.5))[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"weight_decay": 0.1, "no_decay": ("gama",)}, "gama"),
    ],
)
def test_what_means_nothing_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(GradstowError, match=says):
        parameter_groups(Tied(), **wrong)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(GradstowError, match="no trainable"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)
