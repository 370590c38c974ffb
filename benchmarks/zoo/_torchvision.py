"""torchvision's image classifiers and segmentation models, at their own widths and depths."""

from __future__ import annotations

import re
from typing import Any

import torch

from zoo._subject import CLASSES, Subject, batch_for, classes, images, sum_of_losses

SEGMENTS = 5 + CLASSES
# Several GiB of weights, gradients and momentum for each of the twins: these run alone.
HEAVY = ("regnet_y_128gf", "vit_h_14", "vit_l_16", "vit_l_32", "convnext_large", "efficientnet_b7", "regnet_y_32gf")
_SIZES = {
    r"inception_v3": 299,  # its auxiliary head needs 17 x 17 features
    r"maxvit_t": 224,  # its windows divide 224
    r"vit_h_14": 70,
    r"vit_\w_32": 96,
}


def names() -> list[str]:
    from torchvision import models

    return [*models.list_models(module=models), *models.list_models(module=models.segmentation)]


def build(name: str) -> Subject:
    from torchvision import models

    size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), 64)
    if name in models.list_models(module=models.segmentation):
        options: dict[str, Any] = {"num_classes": SEGMENTS}
        if "lraspp" not in name:
            options["aux_loss"] = True
        model = models.get_model(name, weights=None, weights_backbone=None, **options)
        count = batch_for(model)
        target = torch.randint(0, SEGMENTS, (count, size, size))
        return Subject(model.train(), (images(size, count=count), target), sum_of_losses)
    options = {"num_classes": CLASSES}
    if name in ("inception_v3", "googlenet"):
        options |= {"aux_logits": True, "init_weights": False}
    if name.startswith("vit_"):
        options["image_size"] = size
    model = models.get_model(name, weights=None, **options)
    count = batch_for(model)
    return Subject(model.train(), (images(size, count=count), classes(count)), sum_of_losses)
