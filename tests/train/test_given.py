"""What a training step is given by mistake is refused by name before anything runs, and whole numbers of any kind are
taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from gradstow._errors import GradstowError
from gradstow.train import AdaptiveClip, PerParameter
from gradstow.train._step import TrainStep
from gradstow.train._window import split

Tensor = torch.Tensor


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


BATCH = torch.randn(8, 4), torch.randint(0, 3, (8,))


def step_of(**options: Any) -> TrainStep:
    model = options.pop("model", None) or net()
    optimizer = options.pop("optimizer") if "optimizer" in options else torch.optim.SGD(model.parameters(), 0.1)
    return TrainStep(model, optimizer, **{"loss": loss, **options})


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), 0.1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": None}, "optimizer=None is no optimizer"),
        ({"optimizer": []}, r"optimizer=\[\] holds no optimizer"),
        ({"optimizer": "adam"}, "optimizer='adam' is no optimizer"),
        ({"optimizer": ["adam"]}, r"optimizer=\['adam'\] is no optimizer"),
        ({"optimizer": torch.optim.SGD}, "the class SGD is no optimizer.*Make one"),
        ({"optimizer": 2 * [sgd()]}, "twice"),
        ({"scheduler": "x"}, "scheduler='x' is no scheduler"),
        ({"scheduler": [3]}, r"scheduler=\[3\] is no scheduler"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "the class StepLR is no scheduler.*Make one"),
        ({"micro_batch": 4.0}, "micro_batch=4.0"),
        ({"micro_batch": np.float64(4)}, "micro_batch="),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "8"}, "batch_size='8'"),
        ({"loss": "ce"}, "loss='ce' cannot be called"),
        ({"forward": 3}, "forward=3 cannot be called"),
        ({"progress": 3}, "progress=3 cannot be called"),
        ({"precision": ["fp16"]}, r"the precision \['fp16'\]"),
        ({"precision": "fp16", "scaler": "x"}, "scaler='x'"),
        ({"precision": "fp16", "scaler": 3}, "scaler=3"),
        ({"precision": "fp16", "scaler": {"init_scale": 0}}, "init_scale.*0"),
        ({"precision": "fp16", "scaler": {"init_scale": "a"}}, "init_scale.*'a'"),
        ({"precision": "fp16", "scaler": {"growth_factor": 0.5}}, "growth factor"),
        ({"data": None}, "data=None"),
        ({"data": "x"}, "data='x'"),
        ({"model": "resnet"}, "model.*str"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_when_the_step_is_made(options: dict[str, Any], says: str) -> None:
    if options.get("model"):
        options = {**options, "optimizer": sgd()}
    with pytest.raises(GradstowError, match=says) as caught:
        step_of(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parts", [None, BATCH[0], {"x": BATCH[0]}, "ab", (b for b in [BATCH])], ids=type)
def test_a_window_is_a_list(parts: Any) -> None:
    with pytest.raises(GradstowError, match=r"step\.window takes a list of micro-batches"):
        step_of().window(parts)


def test_whole_numbers_of_any_kind_are_taken() -> None:
    for number in (np.int64(4), np.uint8(4), torch.tensor(4)):
        step = step_of(micro_batch=number, batch_size=number)
        assert step(BATCH).micro_batches == 2
        assert type(step.state_dict()["fit"]["micro_batch"]) is int, "which a checkpoint can hold"
    AdaptiveClip(percentile=np.float64(90), window=np.int64(50), warmup=np.int32(5))
    PerParameter(np.float32(1))
    assert step_of(clip=np.float32(1))(BATCH).clip_at == 1.0
    assert gs.max_batch(net(), BATCH, loss=loss, budget=np.int64(10**6), limit=np.int64(4), effort="quick").limited


@pytest.mark.parametrize(
    "wrong",
    [{"percentile": "x"}, {"window": "x"}, {"warmup": 2.5}, {"deviations": 2.0, "decay": "x"}, {"outlier": None}],
    ids=str,
)
def test_numbers_of_a_clipping(wrong: dict[str, Any]) -> None:
    with pytest.raises(GradstowError, match=list(wrong)[-1]):
        AdaptiveClip(**wrong)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ["coo", "csr", "nested"])
def test_only_dense_tensors_are_split(kind: str) -> None:
    dense = torch.eye(4)
    made = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor(list(dense), layout=torch.jagged),
    }
    batch = made[kind](), torch.zeros(4, dtype=torch.long)
    with pytest.raises(GradstowError, match=r"batch\[0\] is a .* tensor.*step\.window"):
        split(batch, 2)
    with pytest.raises(GradstowError, match=r"batch\[0\] is a .* tensor"):
        gs.max_batch(net(), batch, loss=loss, budget="1MB", limit=4)
    assert split(batch, 4) == [batch], "nothing to cut"


@pytest.mark.parametrize("wrong", [{"optimizer": "adam"}, {"loss": "x"}, {"model": None}], ids=str)
def test_what_max_batch_is_given(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"model": net(), "loss": loss, **wrong}
    with pytest.raises(GradstowError, match=next(iter(wrong))):
        gs.max_batch(given.pop("model"), BATCH, budget="1MB", limit=4, **given)


def test_a_place_that_is_no_path() -> None:
    with pytest.raises(GradstowError, match=r"3\.5 is no path"):
        step_of().save(3.5)
