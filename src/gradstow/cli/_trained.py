"""What ``gradstow train`` trains: a model, the batches of its steps, its loss, and how to judge it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradstow.cli._data import BUILT_IN, VOCABULARY, Order, TrainingSet, open_set
from gradstow.cli._input import InputError
from gradstow.cli._targets import build_target
from gradstow.train._window import map_tensors

_DEFAULT_BATCH = 64
_CLASSES = {"torchvision": "num_classes", "timm": "num_classes", "transformers": "num_labels"}
_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # how transformers names what predicts the next token
_SMALLEST = 4  # pixels that the network for images halves twice
_JUDGED = 64  # held-out samples at a time


@dataclass(frozen=True)
class Job:
    """A model and its data.

    Attributes:
        batch: the batch of a step, by its number.
        loss: ``loss(output, batch)``, or None where the output has one.
        per_epoch: steps that see all the data once; 0 for one batch that comes again and again.
        judge: (name, value) on held-out samples, or None where there are none.
    """

    name: str
    model: nn.Module
    batch: Callable[[int], Any]
    batch_size: int | None
    loss: Callable[[Any, Any], torch.Tensor] | None
    per_epoch: int
    judge: Callable[[], tuple[str, float]] | None


def build_job(
    target: str,
    *,
    data: str | None,
    batch: int | None,
    seq: int,
    image: int | None,
    attn: str | None,
    seed: int,
    device: str,
) -> Job:
    """From what was typed.

    Raises:
        InputError: unknown, not installed, or model and data do not fit together.
    """
    if target in BUILT_IN:
        data = data or target
    if data is None:
        made = build_target(target, batch, seq=seq, image=image, attn=attn, seed=seed)
        own = _to(made.batch, device)
        return Job(target, made.model.to(device), lambda _step: own, batch, made.loss, 0, None)
    size = _DEFAULT_BATCH if batch is None else batch
    if size < 1:
        raise InputError(f"--batch {size} holds no sample. Give at least 1.")
    if target in BUILT_IN:
        if data in BUILT_IN and data != target:
            raise InputError(f"the network for {target} cannot learn --data {data}. Leave --data out.")
        if target == "mnist" and image is not None and image < _SMALLEST:
            raise InputError(
                f"--image {image} is smaller than the {_SMALLEST} pixels that the network for {target} needs. "
                "Make it larger."
            )
        samples = open_set(data, channels=1 if data == "mnist" else 3, side=image or 28, seq=seq)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _network(samples, seq)
        arrange: Callable[[Any], Any] = _same
        loss: Any = mean_loss
    else:
        samples, model, arrange, loss = _for_target(target, data, seq, image, attn, seed)
    return job_of(
        target, model.to(device).train(), samples, arrange, loss, Order(len(samples), size, seed), size, device
    )


def job_of(
    name: str,
    model: nn.Module,
    samples: TrainingSet,
    arrange: Callable[[Any], Any],
    loss: Any,
    order: Order,
    size: int,
    device: str,
) -> Job:
    def batch(step: int) -> Any:
        return _to(arrange(samples.batch(order.numbers(step))), device)

    def judge() -> tuple[str, float]:
        return judged(model, samples, lambda pair: _to(arrange(pair), device), loss)

    return Job(f"{name} on {samples.name}", model, batch, size, loss, order.per_epoch, judge)


def _for_target(
    target: str, data: str, seq: int, image: int | None, attn: str | None, seed: int
) -> tuple[TrainingSet, nn.Module, Callable[[Any], Any], Any]:
    """The data in the form that the target's own batch has."""
    kind = target.partition(":")[0]
    text, number = target, _CLASSES.get(kind)
    if data != "text" and number is not None:
        found = open_set(data, channels=1, side=28, seq=seq)
        text = target if f"{number}=" in target else f"{target},{number}={found.classes}"
    sample = None if target.partition(".py:")[1] else 1  # a file's own batch shows its form, whatever its size
    made = build_target(text, sample, seq=seq, image=image, attn=attn, seed=seed)
    first, keys = _input_of(made.batch)
    if data == "text":
        if keys is None and first.dim() == 2 and not first.is_floating_point():  # a file's own model over tokens
            return open_set(data, channels=1, side=28, seq=first.shape[1]), made.model, _same, made.loss
        if not type(made.model).__name__.endswith(_NEXT_TOKEN):
            raise InputError(f"{target} does not predict the next token, so --data text does not fit it.")
        return open_set(data, channels=1, side=28, seq=first.shape[1]), made.model, _language, made.loss
    if first.dim() != 4:
        raise InputError(f"{target} takes no images, so --data {data} does not fit it.")
    samples = open_set(data, channels=first.shape[1], side=first.shape[-1], seq=seq)
    return samples, made.model, (_same if keys is None else _named(keys)), made.loss


def _input_of(batch: Any) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    """The tensor that the model reads, and the names of input and target where the batch is a mapping."""
    values = (
        list(batch.values()) if isinstance(batch, Mapping) else list(batch) if isinstance(batch, (tuple, list)) else []
    )
    if len(values) != 2 or not isinstance(values[0], torch.Tensor):
        raise InputError("the target's batch is not a pair (input, target), so its data cannot be replaced by --data.")
    return values[0], tuple(batch) if isinstance(batch, Mapping) else None


def _same(pair: Any) -> Any:
    return pair


def _named(keys: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda pair: dict(zip(keys, pair, strict=True))


def _language(pair: Any) -> Any:
    """transformers shifts the labels itself."""
    return {"input_ids": pair[0], "labels": pair[0]}


def _to(batch: Any, device: str) -> Any:
    return map_tensors(batch, lambda t: t.to(device))


def mean_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Cross-entropy over the classes, which come last."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def judged(model: nn.Module, samples: TrainingSet, arrange: Callable[[Any], Any], loss: Any) -> tuple[str, float]:
    """Accuracy of images, loss of text, on what was held out; the model is left in training mode."""
    model.eval()
    right, total, summed = 0, 0, 0.0
    with torch.no_grad():
        for numbers in _chunks(range(len(samples), len(samples) + samples.held_out)):
            pair = samples.batch(numbers)
            batch = arrange(pair)
            output = model(**batch) if isinstance(batch, Mapping) else model(batch[0])
            scores = getattr(output, "logits", output)
            total += len(numbers)
            if samples.classes is not None:
                right += int((scores.argmax(-1).cpu() == pair[1]).sum())
            else:
                found = output.loss if loss is None else loss(output, batch)
                summed += float(found) * len(numbers)
    model.train()
    if samples.classes is not None:
        return "held_out_accuracy", right / max(1, total)
    return "held_out_loss", summed / max(1, total)


def _chunks(numbers: range) -> Iterator[range]:
    for start in range(0, len(numbers), _JUDGED):
        yield numbers[start : start + _JUDGED]


# ------------------------------------------------------------------------------------- networks of our own


def _network(samples: TrainingSet, seq: int) -> nn.Module:
    if samples.classes is None:
        return Letters(seq)
    return convolutions(3 if samples.name != "mnist" else 1, samples.classes)


def convolutions(channels: int, classes: int) -> nn.Module:
    """A small convolutional network without BatchNorm, so that its batches can be split."""

    def block(before: int, after: int) -> list[nn.Module]:
        conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return [conv, nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(channels, 16), *block(16, 32), nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(32 * 49, classes))


class Letters(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, length: int, width: int = 128, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


__all__ = ["Job", "build_job", "convolutions", "job_of", "judged", "mean_loss"]
