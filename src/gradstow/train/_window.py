"""Splitting a batch into micro-batches, and weighting each by what it contributes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from gradstow._errors import GradstowError, warn_user
from gradstow.capture import check_loss

_IGNORED = -100  # torch's label for "does not count"
_LOOKS = 32  # micro-batches whose labels are searched for it


def size_of(batch: Any) -> int:
    """How many samples a batch holds: the length of the first dimension of all its tensors and NumPy arrays.

    Tensors without dimensions belong to no sample.

    Raises:
        GradstowError: there is none, or they differ.
    """
    sizes = {path: len(leaf) for path, leaf in _leaves(batch, "batch") if _has_samples(leaf)}
    if not sizes:
        raise GradstowError(
            f"the batch ({type(batch).__name__}) holds no tensor with samples along its first dimension, so it cannot "
            "be split. Use tensors in mappings, tuples or dataclasses, or split it yourself: step.window([...])."
        )
    (first, size), *rest = sizes.items()
    for path, other in rest:
        if other != size:
            raise GradstowError(
                f"the batch cannot be split: {first} has {size} samples and {path} has {other}. Keep what all samples "
                "share in the model (a buffer), or split the batch yourself: step.window([...])."
            )
    return size


def check_dense(batch: Any) -> None:
    """Whether all tensors with samples can be cut.

    Raises:
        GradstowError: the first that cannot, by name.
    """
    for path, leaf in _leaves(batch, "batch"):
        if not isinstance(leaf, torch.Tensor) or not _has_samples(leaf):
            continue
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.").replace("_", " ")
            raise GradstowError(
                f"{path} is a {kind} tensor, and only dense ones can be cut into samples. Make it dense in the loader "
                "(.to_dense()), train batches whole (micro_batch=None), or split them yourself: step.window([...])."
            )


def split(batch: Any, size: int) -> list[Any]:
    """Micro-batches of ``size`` samples, the last one shorter; the batch itself where it is not larger.

    Tensors are views of the batch's. Lists and tuples of one text per sample are cut, too; tensors without dimensions
    and all else go to every micro-batch.
    """
    total = size_of(batch)
    if size < 1:
        raise GradstowError(f"a micro-batch cannot hold {size} samples. Give at least 1.")
    if total <= size:
        return [batch]
    check_dense(batch)
    return [_cut(batch, total, range(start, min(start + size, total))) for start in range(0, total, size)]


def take(batch: Any, count: int) -> Any:
    """The first ``count`` samples, as views; where there are fewer they are repeated, as copies."""
    total = size_of(batch)
    if count == total:
        return batch
    check_dense(batch)
    if count < total:
        return _cut(batch, total, range(count))
    return _cut(batch, total, [i % total for i in range(count)])


def map_tensors(item: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``item`` with ``change`` applied to every tensor in it; containers are new, all else is the same."""
    return _map(item, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _cut(batch: Any, total: int, chosen: range | list[int]) -> Any:
    def cut(leaf: Any) -> Any:
        if not _has_samples(leaf):
            return [leaf[i] for i in chosen] if _is_texts(leaf) and len(leaf) == total else leaf
        if isinstance(chosen, range):
            return leaf[chosen.start : chosen.stop]
        index = np.array(chosen)
        return leaf[torch.as_tensor(index, device=leaf.device)] if isinstance(leaf, torch.Tensor) else leaf[index]

    return _map(batch, cut)


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def _is_texts(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and bool(item) and all(isinstance(i, (str, bytes)) for i in item)


def _map(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, torch.Tensor) or _is_texts(item):
        return change(item)
    if isinstance(item, Mapping):
        return _filled(item, {key: _map(value, change) for key, value in item.items()})
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_map(value, change) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_map(value, change) for value in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        twin = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(twin, field.name, _map(getattr(item, field.name), change))  # frozen ones too
        return twin
    return change(item)


def _filled(like: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same kind, whatever its constructor takes; a dict where no copy of it can be filled.

    Where a shallow copy keeps its items in the same place, writing to it writes to the original: that is undone.
    """
    if not isinstance(like, MutableMapping):
        return items
    before = dict(like)
    if any(like[key] is not value for key, value in before.items()):
        return items  # made anew at each look, so a write to the original could not be seen
    for copied in (copy.copy, lambda item: _deep_twin(item, items)):
        try:
            twin = copied(like)
            twin.update(items)
            alone = True
        except Exception:  # a lock in it, or items that cannot be written
            alone = False
        for key, value in before.items():
            if like[key] is not value:
                like[key], alone = value, False
        if alone:
            return twin
    return items


def _deep_twin(like: MutableMapping[Any, Any], items: dict[Any, Any]) -> MutableMapping[Any, Any]:
    """A copy all the way down to its values, which are not copied: ``items`` take their places."""
    return copy.deepcopy(like, {id(value): items[key] for key, value in like.items()})


def _leaves(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, torch.Tensor) or _is_texts(item):
        yield path, item
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(item, (list, tuple)):
        for number, value in enumerate(item):
            yield from _leaves(value, f"{path}[{number}]")
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from _leaves(getattr(item, field.name), f"{path}.{field.name}")
    else:
        yield path, item


def mean_and_count(returned: Any) -> tuple[Any, int | float | None]:
    """What a loss function returned: the mean, and over how many items; None where it did not say.

    Reading a count that lies on an accelerator waits for it.

    Raises:
        GradstowError: the count is not a number of at least 0.
    """
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        return returned, None
    mean, count = returned
    value = count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else count
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 <= value < math.inf):
        raise GradstowError(
            f"the loss returned (mean, count) with the count {value!r}. The count is how many items the mean is over: "
            "an int, or a tensor with one number."
        )
    return mean, value


class Window:
    """Adds up the gradients of one window's micro-batches, as the unsplit batch would give them.

    The weight of a micro-batch is its share of the samples. Where the loss counts its items, their total is known only
    at the end: until then the largest count per sample so far stands for all, and ``correction`` repairs the sum with
    one factor. So no micro-batch weighs more than its share of the samples, and a scaled loss in fp16 overflows no
    sooner than the whole batch's. Where a count per sample is larger than those before it, the gradients so far are
    scaled down by a power of two, which rounds nothing.

    Args:
        samples: of each micro-batch.
        scaler: scales the losses, for fp16.
        parameters: whose gradients are added up.
    """

    def __init__(
        self,
        samples: Sequence[int],
        scaler: torch.amp.GradScaler | None = None,
        parameters: Iterable[torch.Tensor] = (),
    ) -> None:
        self.samples, self.scaler, self._parameters = samples, scaler, parameters
        self.means: list[torch.Tensor] = []
        self.items: list[int | float] = []
        self.counted = False
        self._expected = float(sum(samples))

    def add(self, returned: Any) -> torch.Tensor | None:
        """Run the backward of one micro-batch; returns its loss, or None where it counted no items."""
        mean, count = mean_and_count(returned)
        number = len(self.items)
        if number and self.counted != (count is not None):
            raise GradstowError(
                "the loss gave a count for some micro-batches of this window and none for others. "
                "Always return (mean, count), or never."
            )
        self.counted = count is not None
        self.items.append(self.samples[number] if count is None else count)
        if self.items[-1] == 0:
            return None
        check_loss(mean)
        self.means.append(mean.detach())
        weight = self._weight(number)
        loss = mean if self.scaler is None else self.scaler.scale(mean)
        loss.backward(None if weight == 1 else torch.full_like(loss, weight))
        return mean

    def _weight(self, number: int) -> float:
        if len(self.samples) == 1:
            return 1.0
        if self.counted:
            total = sum(self.samples) * self.items[number] / max(1, self.samples[number])
            if len(self.means) == 1:
                self._expected = total
            elif total > self._expected:
                self._expect(2 ** math.ceil(math.log2(total / self._expected)))
        return self.items[number] / self._expected

    @torch.no_grad()
    def _expect(self, times: int) -> None:
        """So many times as many items as thought."""
        self._expected *= times
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / times)

    @property
    def correction(self) -> float:
        """What the gradients have to be multiplied by: 1 where the weights were right already."""
        total = sum(self.items)
        if len(self.samples) == 1 or not self.counted or not total:
            return 1.0
        return self._expected / total

    def read(self, norm: torch.Tensor) -> tuple[float, float]:
        """(loss of the whole window, norm), waiting for the device once. The loss is NaN where nothing was counted."""
        values = [*self.means, norm.detach()]
        *means, found = torch.stack([v.reshape(()).to(norm.device, torch.float64) for v in values]).tolist()
        if len(self.samples) == 1 or not means:
            return (means[0] if means else math.nan), found
        items = [count for count in self.items if count]
        return sum(m * n for m, n in zip(means, items, strict=True)) / sum(items), found


class IgnoredLabels:
    """Warns once where a scalar loss of a split batch seems to be a mean over valid labels, not over samples."""

    def __init__(self) -> None:
        self._left = _LOOKS

    def look(self, batch: Any) -> None:
        """Search the integer tensors of the first micro-batches for the label -100."""
        if not self._left:
            return
        self._left -= 1
        for path, leaf in _leaves(batch, "batch"):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.dim() > 0:
                if not bool((leaf == _IGNORED).any()):
                    continue
                self._left = 0
                warn_user(
                    f"gradstow: {path} holds the label {_IGNORED}, which a mean leaves out, and the loss did not say "
                    "how many labels it counted. Its micro-batches are weighted by their samples, which is not what "
                    "the unsplit batch gives. Return the count, too: "
                    f"loss=lambda output, batch: (mean, (labels != {_IGNORED}).sum())."
                )
                return
