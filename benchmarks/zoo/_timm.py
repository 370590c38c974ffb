"""One model of every timm family: the smallest that is registered, at the smallest image that it takes.

A family is the models of one source file whose names begin with the same letters. Which variant is the smallest
and which image it takes is looked for once (``python benchmarks/zoo --survey``) and lies in timm.csv.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zoo._subject import CLASSES, NotBuilt, Subject, batch_for, classes, images, sum_of_losses

HEAVY = ("deepseek_vit_412m", "gemma4_vit_167m_enc", "aimv2_large_patch14_224", "eva_large_patch14_196")
TABLE = Path(__file__).with_name("timm.csv")
FIELDS = ("family", "model", "parameters", "image", "sized", "timm")
_SIZES = (64, 96, 128, 160, 192, 224, 256)


def names() -> list[str]:
    return [row["model"] for row in table()]


def table() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def build(name: str) -> Subject:
    row = next((row for row in table() if row["model"] == name), None)
    if row is None:
        raise NotBuilt(f"timm:{name} is not in {TABLE.name}")
    size = int(row["image"])
    model = _create(name, size if row["sized"] == "yes" else None)
    count = batch_for(model)
    return Subject(model.train(), (images(size, _channels(model), count), classes(count)), sum_of_losses)


def families() -> dict[str, list[str]]:
    """Registered names by family; timm's own tiny test models are left out."""
    import timm

    found = defaultdict(list)
    for name in timm.list_models():
        if not name.startswith("test_"):
            module = timm.model_entrypoint(name).__module__.rpartition(".")[2]
            letters = re.match(r"[a-z]+", name)
            assert letters is not None
            found[f"{module}/{letters[0]}"].append(name)
    return dict(sorted(found.items()))


def survey(say: Callable[[int, int], None]) -> None:
    """Find each family's smallest variant and its smallest image, on tensors without memory, and write the table."""
    import timm

    found = families()
    rows: list[dict[str, Any]] = []
    for number, (family, members) in enumerate(found.items()):
        counts = {name: _parameters(name) for name in members}
        name = min(members, key=lambda n: (counts[n], n))
        image, sized = _smallest_image(name)
        rows.append(dict(zip(FIELDS, (family, name, counts[name], image, sized, timm.__version__), strict=True)))
        say(number + 1, len(found))
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _create(name: str, size: int | None) -> torch.nn.Module:
    import timm

    options = {} if size is None else {"img_size": size}
    model: torch.nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


def _channels(model: torch.nn.Module) -> int:
    return int(getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))[0])


def _parameters(name: str) -> int:
    try:
        with _no_memory():
            return sum(p.numel() for p in _create_empty(name, None).parameters())
    except Exception:  # some cannot be built without memory: any other is smaller
        return 1 << 62


def _smallest_image(name: str) -> tuple[int, str]:
    """The size, and whether the model is built for it; the model's own size where no other works."""
    for size in _SIZES:
        for sized in (False, True):
            with contextlib.suppress(Exception), _no_memory():
                model = _create_empty(name, size if sized else None).train()
                sum_of_losses(model(images(size, _channels(model))), (None, classes()))
                return size, "yes" if sized else "no"
    import timm

    return int(timm.get_pretrained_cfg(name).input_size[1]), "no"


@contextlib.contextmanager
def _no_memory() -> Iterator[None]:
    with torch.device("meta"), torch.no_grad():
        yield


def _create_empty(name: str, size: int | None) -> torch.nn.Module:
    """Many models read their drop rates off a linspace with ``.item()``, which one without memory cannot tell."""
    real = torch.linspace
    torch.linspace = lambda *args, **kwargs: real(*args, **{**kwargs, "device": "cpu"})
    try:
        return _create(name, size)
    finally:
        torch.linspace = real
