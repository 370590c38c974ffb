"""Options that several commands share, as dataclasses whose fields typer shows one by one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """Put the fields of each parameter that is a dataclass in its place, as options; ``command`` gets it built of them.

    ``command`` takes its parameters by keyword. The fields are annotated as typer's options, and have defaults.
    """
    groups: dict[str, Any] = {name: kind for name, kind in _hints(command).items() if is_dataclass(kind)}

    @functools.wraps(command)
    def called(**options: Any) -> Any:
        built = {name: kind(**{f.name: options.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        return command(**options, **built)

    called.__signature__ = inspect.Signature(list(_parameters(command)))  # type: ignore[attr-defined]
    return called


def _parameters(command: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    hints = _hints(command)
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            yield parameter.replace(annotation=hints[name])
            continue
        of_fields = _hints(hints[name])
        for field in fields(hints[name]):
            yield inspect.Parameter(field.name, parameter.kind, default=field.default, annotation=of_fields[field.name])


def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)
