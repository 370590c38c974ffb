"""From a target's text to a model, a batch and a loss. Nothing is downloaded: weights are random.

A target is ``torchvision:resnet50``, ``timm:convnext_tiny``, ``transformers:gpt2`` or
``path/to/file.py:make``. Options of the model follow its name: ``transformers:gpt2,n_layer=4``.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradstow.cli._blame import remember
from gradstow.cli._input import InputError

_KINDS = ("torchvision", "timm", "transformers")
_HOW = (
    "Write torchvision:resnet50, timm:convnext_tiny, transformers:gpt2, "
    "or path/to/file.py:make for a function that returns (model, batch, loss)."
)


@dataclass(frozen=True)
class Target:
    """What to train: the model is called as ``gs.plan`` calls it; ``loss(output, batch)`` or None."""

    name: str
    model: torch.nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor] | None


def build_target(
    text: str,
    batch_size: int | None = None,
    *,
    seq: int = 256,
    image: int | None = None,
    attn: str | None = None,
    seed: int = 0,
) -> Target:
    """Build a target, with random weights and a random batch that depend on ``seed`` alone.

    Args:
        text: the target, see above.
        batch_size: examples in the batch; needed except for ``file.py:make``.
        seq: tokens of a text model's example.
        image: width and height of an image; None takes 224, or what the timm model was made for.
        attn: transformers' attention, "eager" or "sdpa"; None takes the model's own default.

    Raises:
        InputError: unknown, not installed, or not buildable; names what comes close.
    """
    file = re.fullmatch(r"(.+\.py):(\w+)", text)
    if file:
        return _from_file(text, Path(file[1]), file[2], batch_size)
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _KINDS or not rest:
        raise InputError(f"the target {text!r} cannot be read.{_closest_kind(text)} {_HOW}")
    if batch_size is None or batch_size < 1:
        given = "no batch size is given" if batch_size is None else f"{batch_size} is no batch size"
        raise InputError(f"{given} for {text}. Add --batch N with N of at least 1.")
    name, options = _options(rest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "torchvision":
            return _torchvision(text, name, options, batch_size, image or 224)
        if kind == "timm":
            return _timm(text, name, options, batch_size, image)
        return _transformers(text, name, options, batch_size, seq, image or 224, attn)


def _closest_kind(text: str) -> str:
    kind = text.partition(":")[0]
    near = difflib.get_close_matches(kind, _KINDS, 1)
    if near and near[0] != kind:
        return f" Did you mean {near[0]}:{text.partition(':')[2] or '...'}?"
    return ""


def _options(rest: str) -> tuple[str, dict[str, Any]]:
    """``"gpt2,n_layer=4"`` → ``("gpt2", {"n_layer": 4})``."""
    name, *parts = rest.split(",")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"the option {part!r} of {name} cannot be read. Write name,key=value.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{name} is not installed, and the target needs it ({error}). Run: pip install {extra}"
        ) from error


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    return InputError(f"{kind} has no model {name!r}.{_close(name, known)}")


def _close(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 3, 0.5)
    return f" Close: {', '.join(near)}." if near else ""


def construct(text: str, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    try:
        return make().train()
    except (TypeError, ValueError, KeyError, AssertionError, AttributeError) as error:
        raise InputError(f"{text} cannot be built: {type(error).__name__}: {error}") from error


def _classes(text: str, given: Any) -> int:
    if not isinstance(given, int) or given < 1:
        raise InputError(f"num_classes={given} leaves {text} nothing to tell apart. Give a number of at least 1.")
    return given


def _cross_entropy(output: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, batch[1])


def _images(model: torch.nn.Module, batch: int, size: tuple[int, ...], classes: int) -> Any:
    return torch.randn(batch, *size), torch.randint(0, classes, (batch,))


def _torchvision(text: str, name: str, options: dict[str, Any], batch: int, image: int) -> Target:
    models = _library("torchvision", "'gradstow[vision]'").models
    known = models.list_models(module=models)
    if name not in known:
        if name in models.list_models():
            raise InputError(
                f"{name} is not an image classifier, so its batch and loss are not known here. "
                "Write a file with a function that returns (model, batch, loss), and give file.py:make."
            )
        raise unknown("torchvision", name, known)
    if name in ("inception_v3", "googlenet"):  # their auxiliary heads return tuples and need a loss each
        options = {"aux_logits": False, "init_weights": False, **options}
    model = construct(text, lambda: models.get_model(name, weights=None, **options))
    classes = _classes(text, options.get("num_classes", 1000))
    return Target(text, model, _images(model, batch, (3, image, image), classes), _cross_entropy)


def _timm(text: str, name: str, options: dict[str, Any], batch: int, image: int | None) -> Target:
    timm = _library("timm", "timm")
    if name not in timm.list_models():
        raise unknown("timm", name, timm.list_models())
    model = construct(text, lambda: timm.create_model(name, pretrained=False, **options))
    config: Mapping[str, Any] = getattr(model, "default_cfg", {})
    channels, height, width = config.get("input_size", (3, 224, 224))
    size = (channels, image or height, image or width)
    classes = _classes(text, getattr(model, "num_classes", 1000))
    return Target(text, model, _images(model, batch, size, classes), _cross_entropy)


def _transformers(
    text: str, name: str, options: dict[str, Any], batch: int, seq: int, image: int, attn: str | None
) -> Target:
    from gradstow.cli._text_models import build_transformer

    _library("transformers", "'gradstow[text]'")
    model, inputs = build_transformer(text, name, options, batch, seq, image, attn)
    return Target(text, model, inputs, None)


def _from_file(text: str, path: Path, function: str, batch_size: int | None) -> Target:
    make = _load(path, function)
    takes_batch = "batch" in inspect.signature(make).parameters
    if batch_size is not None and not takes_batch:
        raise InputError(
            f"{function} in {path} takes no parameter named batch, so --batch {batch_size} would have no "
            "effect. Leave --batch out, or give the function that parameter."
        )
    given = {} if batch_size is None else {"batch": batch_size}
    made = _in_user_code(path, function, lambda: make(**given))
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise InputError(f"{function} in {path} must return (model, batch, loss); loss may be None.")
    model, batch, loss = made if len(made) == 3 else (*made, None)
    return Target(text, model, batch, loss)


def _load(path: Path, function: str) -> Callable[..., Any]:
    if not path.is_file():
        raise InputError(f"there is no file {path}. {_HOW}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # its own neighbours, as when Python runs the file
    sys.modules[path.stem] = module
    remember(path)
    loader = spec.loader
    _in_user_code(path, "its import", lambda: loader.exec_module(module))
    found = getattr(module, function, None)
    if not callable(found):
        known = (name for name, item in vars(module).items() if callable(item))
        raise InputError(f"{path} has no function {function!r}.{_close(function, known)}")
    return found


def _in_user_code(path: Path, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:  # a script calls sys.exit
        lines = [f.tb_lineno for f in _frames(error) if f.tb_frame.f_code.co_filename == str(path)]
        line = f", line {lines[-1]}" if lines else ""
        raise InputError(f"{what} failed in {path}{line}: {type(error).__name__}: {error}") from error


def _frames(error: BaseException) -> list[Any]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found
