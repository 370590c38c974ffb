"""Contests on images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradstow.cli._data import Order, open_set
from gradstow.cli._input import InputError
from gradstow.cli._pictures import usual_pictures
from gradstow.cli.bench._contest import Contest


def image_set(command: str, data: str | None) -> str:
    """What ``--data`` names; without it the images that are here.

    Raises:
        InputError: these are no images, or there are none.
    """
    if data == "text":
        raise InputError(f"bench {command} trains on images. Give --data mnist, fashion or a folder.")
    return data or usual_pictures()


def image_contest(
    command: str, data: str | None, batch: int, side: int, seed: int, *, make: Callable[[int], Any], **options: Any
) -> tuple[Contest, Any]:
    """A contest on pairs of images, of ``side`` pixels and three channels, and labels; and the set that they are from.

    Args:
        make: makes the model for a number of classes.
        options: of ``Contest``.
    """
    samples = open_set(image_set(command, data), channels=3, side=side, seq=1)
    order = Order(len(samples), batch, seed)
    contest = Contest(
        model=make(samples.classes or 10),
        batch=lambda step: samples.batch(order.numbers(step)),
        call=lambda model, pair: model(pair[0]),
        **options,
    )
    return contest, samples
