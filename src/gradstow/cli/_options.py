"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradstow._units import parse_budget
from gradstow.cli._input import InputError

if TYPE_CHECKING:
    import torch

Text = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="torchvision:NAME, timm:NAME, transformers:NAME or path/to/file.py:make. "
        "Options of the model follow its name: transformers:gpt2,n_layer=4.",
        show_default=False,
    ),
]
Batch = Annotated[int | None, typer.Option("--batch", help="Examples in the batch; needed except for file.py:make.")]
Budget = Annotated[str | None, typer.Option("--budget", help='"6GiB", "60%" of plain PyTorch\'s step peak, or "auto".')]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="auto, store-all, recompute-all, sqrt, selective; or rules: relu=recompute,layer3.*=store,layer1.*=int4. "
        "Given several times, all hold.",
        show_default=False,
    ),
]
Lossy = Annotated[
    str | None,
    typer.Option(
        "--lossy", help="Allow a code that is not exact: bf16, fp8, int8, int4, int2, or the largest error (0.01)."
    ),
]
Offload = Annotated[
    str | None, typer.Option("--offload", help='Let values wait elsewhere: "host", "disk", or "disk:/path/to/folder".')
]
Seq = Annotated[int, typer.Option("--seq", min=1, help="Tokens of a text model's example.")]
Attn = Annotated[str | None, typer.Option("--attn", help="transformers' attention: eager or sdpa.")]
Image = Annotated[int | None, typer.Option("--image", min=1, help="Width and height of an image.")]
Optimizer = Annotated[
    str, typer.Option("--optimizer", help="Whose state and working memory count: none, sgd or adamw.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@dataclass(frozen=True)
class Rules:
    """How a step is planned; with ``spread`` each field is an option of the command."""

    policy: Policy = None
    lossy: Lossy = None
    offload: Offload = None

    def keywords(self) -> dict[str, Any]:
        """The arguments of ``gs.plan`` and its like. Of several policies all hold, and later rules win."""
        return {"policy": ",".join(self.policy or ["auto"]), "lossy": _code(self.lossy), "offload": self.offload}


@dataclass(frozen=True)
class Build:
    """How a target is built, and what steps it; with ``spread`` each field is an option of the command."""

    seq: Seq = 256
    attn: Attn = None
    image: Image = None
    optimizer: Optimizer = "none"

    def step(self, target: str, batch: int | None, device: str | None = None) -> dict[str, Any]:
        """The training step as arguments of ``gs.plan`` and its like: model, batch, loss and optimizer.

        Args:
            device: where model and batch are moved; None leaves them where the target makes them.

        Raises:
            InputError: there is no such target, or no such optimizer.
        """
        from gradstow.cli._targets import build_target  # here, so that --help does not wait for torch
        from gradstow.train._window import map_tensors

        made = build_target(target, batch, seq=self.seq, attn=self.attn, image=self.image)
        model, data = made.model, made.batch
        if device is not None:
            model, data = model.to(device), map_tensors(data, lambda t: t.to(device))
        return {"model": model, "batch": data, "loss": made.loss, "optimizer": _optimizer(self.optimizer, model)}


def check_budgets(*budgets: str | None) -> None:
    """Before anything takes time.

    Raises:
        BudgetError: one of them means nothing.
    """
    for text in budgets:
        if text is not None:
            parse_budget(text)


def _code(text: str | None) -> str | float | None:
    """A code's name, or the error that a number stands for."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _optimizer(name: str, model: torch.nn.Module) -> Any:
    """The optimizer that an option names; None for "none"."""
    import torch

    if name == "none":
        return None
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    raise InputError(f"there is no optimizer {name!r}. Choose none, sgd or adamw.")
