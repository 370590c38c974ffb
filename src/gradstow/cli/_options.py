"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

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


def policy_of(given: list[str] | None) -> str:
    """All that was said, as one text; later rules win."""
    return ",".join(given or ["auto"])


def lossy_of(text: str | None) -> str | float | None:
    """A code's name, or the error that a number stands for."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def make_optimizer(name: str, model: torch.nn.Module) -> Any:
    """The optimizer that an option names; None for "none"."""
    import torch  # here, so that --help does not wait for it

    if name == "none":
        return None
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    raise InputError(f"there is no optimizer {name!r}. Choose none, sgd or adamw.")
